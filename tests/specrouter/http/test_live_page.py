"""The page at `/`: what is served of it, to whom, and what a browser may do with it."""

from __future__ import annotations

import hashlib
import re
import shutil
import socket
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from modelpool.errors import ConfigError
from specrouter import RouterConfig
from specrouter.http.live_feed import FEED_PATH
from specrouter.http.live_page import PAGE_PATHS
from tests.specrouter.fake_router import FakeRouter
from tests.specrouter.http.client import Headers, request, send, service

KEY = "a-key"
OWN = [("Host", "127.0.0.1:8000")]
FOLDER = resources.files("specrouter.http").joinpath("page")
MOST_BYTES = 300_000
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return service()


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_every_file_is_served_with_a_policy_that_lets_nothing_else_load(
    app: FastAPI, path: str
) -> None:
    answer = send(app, "GET", path, headers=OWN)
    assert answer.status_code == 200
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert set(policy.values()) <= {"'self'", "'none'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    again = send(app, "GET", path, headers=[*OWN, ("If-None-Match", answer.headers["etag"])])
    assert (again.status_code, again.content) == (304, b"")


def test_own_scripts_and_styles_name_no_other_host_and_no_markup() -> None:
    for file in FOLDER.iterdir():
        if file.is_file() and not file.name.endswith(".svg"):
            text = file.read_text("utf-8")
            assert not re.search(r"https?:|innerHTML|dangerouslySet|eval\(|\bstyle=", text), file


def test_the_libraries_are_those_of_the_notice_and_all_is_small() -> None:
    vendor = FOLDER.joinpath("vendor")
    notice = vendor.joinpath("NOTICE").read_text("utf-8")
    told = dict(re.findall(r"^(\S+\.(?:js|css)) [^\n]*\n  sha256 ([0-9a-f]{64})$", notice, re.M))
    files = {file.name: file.read_bytes() for file in vendor.iterdir() if file.name != "NOTICE"}
    assert told == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    own = [file.read_bytes() for file in FOLDER.iterdir() if file.is_file()]
    assert sum(map(len, [*own, *files.values()])) <= MOST_BYTES


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Host", "127.0.0.1:8000")], 200),
        ([("Host", "[::1]:8000")], 200),
        ([("Host", "192.0.2.7")], 200),
        ([("Host", "localhost")], 200),
        ([("Host", "LLM.example.com:80")], 200),
        ([("Host", "evil.example:8000")], 403),
        ([("Host", "127.0.0.1.evil.example")], 403),
        ([("Host", "")], 403),
        ([("Host", "localhost:8000"), ("Origin", "http://localhost:8000")], 200),
        ([("Host", "localhost:8000"), ("Origin", "https://evil.example")], 403),
        ([("Host", "localhost:8000"), ("Origin", "http://localhost:9000")], 403),
        ([("Host", "localhost:8000"), ("Origin", "null")], 403),
    ],
)
def test_another_pages_script_and_a_wrong_host_get_nothing(headers: Headers, status: int) -> None:
    app = service(page_hosts=["llm.example.com"], cors_origins=["*"])
    assert send(app, "GET", "/", headers=headers).status_code == status
    feed = send(app, "GET", FEED_PATH, headers=[*headers, ("Sec-Fetch-Site", "cross-site")])
    assert (feed.status_code, feed.json()["error"]["code"]) == (403, "not_this_page")
    assert "access-control-allow-origin" not in send(app, "GET", "/", headers=OWN).headers


@pytest.mark.parametrize(
    ("host", "server", "status"),
    [
        *[(name, {}, 200) for name in ("127.0.0.1:8000", "localhost:8000", "[::1]:8000")],
        *[(name, {}, 200) for name in (socket.gethostname(), "host.docker.internal:8000")],
        ("llm.example.com", {"page_hosts": ["llm.example.com"]}, 200),
        ("evil.example:8000", {}, 403),
        ("evil.example:8000", {"host": "::1", "page": False}, 403),
        ("", {}, 200),  # no browser's
        ("evil.example:8000", {"host": "0.0.0.0"}, 200),
        ("evil.example:8000", {"api_keys": [KEY]}, 200),
    ],
)
def test_a_name_that_was_led_here_reaches_nothing_where_only_the_address_guards(
    host: str, server: dict[str, Any], status: int
) -> None:
    sent = [
        ("Host", host), ("Origin", f"http://{host}"), ("Content-Type", "application/json"),
        ("Authorization", f"Bearer {KEY}"),
    ]  # fmt: skip
    app = service(**server)
    assert send(app, "POST", "/generate", b'{"prompt": "a"}', sent).status_code == status
    assert send(app, "GET", "/v1/models", headers=sent).status_code == status
    assert send(app, "GET", "/health", headers=sent).status_code == 200


def test_a_link_from_elsewhere_leads_to_the_page(app: FastAPI) -> None:
    from_elsewhere = [*OWN, ("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate")]
    assert send(app, "GET", "/", headers=from_elsewhere).status_code == 200


def test_the_page_needs_no_key_and_its_feed_does() -> None:
    app = service(api_keys=[KEY])
    assert send(app, "GET", "/", headers=OWN).status_code == 200
    assert send(app, "GET", FEED_PATH, headers=OWN).status_code == 401
    in_url = send(app, "GET", f"{FEED_PATH}?key={KEY}&api_key={KEY}", headers=OWN)
    assert in_url.status_code == 401


def test_it_can_be_switched_off() -> None:
    router = FakeRouter(server={"page": False})
    for path in (*PAGE_PATHS, FEED_PATH):
        assert request(router, "GET", path).status_code == 404
    assert request(router, "GET", "/docs").status_code == 200


@pytest.mark.parametrize("host", ["http://llm.example.com", "llm.example.com:80", "", "a b", "*"])
def test_a_host_that_is_no_name_is_refused_by_its_field(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^server\.page_hosts: .*is no host name"):
        RouterConfig.load(
            {**FakeRouter().config.model_dump(include={"pool"}), "server": {"page_hosts": [host]}}
        )


# The pages at `/` and `/docs` work without the internet, and with keys


def docs_page() -> str:
    response = request(FakeRouter(), "GET", "/docs")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    return response.text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = docs_page()
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
    script = re.search(r"<script>(.*)</script>", docs_page(), re.DOTALL)
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
