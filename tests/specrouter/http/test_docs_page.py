"""The pages at `/` and `/docs` work without the internet, and with keys."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import request

ROOT = Path(__file__).resolve().parents[3]


def page() -> str:
    response = request(FakeRouter(), "GET", "/docs")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    return response.text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page()
    assert "//" not in re.sub(r"^\s*// .*$", "", text, flags=re.MULTILINE)  # no address
    assert not re.search(r"\b(src|href)=\"(?!#)", text)
    policy = request(FakeRouter(), "GET", "/docs").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert request(FakeRouter(), "GET", "/redoc").status_code == 404  # it would need the internet


def test_the_first_page_leads_to_every_page_that_needs_no_name_and_to_every_document() -> None:
    home = request(FakeRouter(), "GET", "/")
    assert home.status_code == 200
    assert home.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in home.headers["content-security-policy"]
    assert "//" not in home.text, "an address elsewhere"
    links = {f"/{path}" for path in re.findall(r'<a href="([^"]*)"', home.text)}
    paths = request(FakeRouter(), "GET", "/openapi.json").json()["paths"]
    named = {path for path, one in paths.items() if "get" in one and "{" not in path}
    assert links == named | {"/docs", "/openapi.json"}
    documents = {file.name for file in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r"[\w-]+\.md", home.text)) == documents


# What the script asks of a browser. It comes first: the script fetches as soon as it is read.
_BROWSER = """
const make = (tag) => ({
  children: [], textContent: "", setAttribute() {}, addEventListener() {},
  append(...more) { this.children.push(...more); },
});
const places = {};
globalThis.document = {createElement: make, getElementById: (name) => (places[name] ??= make())};
globalThis.window = {addEventListener() {}};
const schema = JSON.parse(require("fs").readFileSync(0));
globalThis.fetch = async () => ({json: async () => schema});
const text = (one) => typeof one === "string" ? one
  : [one.textContent, ...one.children.map(text)].join(" ");
setTimeout(() => console.log(Object.values(places).map(text).join(" ")));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_shows_every_endpoint_and_every_field(tmp_path: Path) -> None:
    script = re.search(r"<script>(.*)</script>", page(), re.DOTALL)
    assert script is not None
    file = tmp_path / "page.js"
    file.write_text(_BROWSER + script[1])
    schema = request(FakeRouter(), "GET", "/openapi.json")
    ran = subprocess.run(
        ["node", str(file)], input=schema.content, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()
    shown = ran.stdout.decode()
    assert set(schema.json()["paths"]) <= set(shown.split())
    for name, one in schema.json()["components"]["schemas"].items():
        for field, kind in one.get("properties", {}).items():
            assert kind["description"] in shown, f"{name}.{field}"
