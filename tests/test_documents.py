"""The documents keep their word: links lead somewhere, options and settings exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from modelpool.source_check import check_source
from specrouter.cli.main import main
from specrouter.config import RouterConfig
from specrouter.http.app import create_app
from specrouter.http.openai_fields import ChatRequest, CompletionRequest
from specrouter.http.request_fields import GenerateRequest
from tests.pages import FENCE, ROOT
from tests.specrouter.fake_router import FakeRouter

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "research").glob("*.md")),
]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

_LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
_SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_COMMAND = re.compile(
    r"\bspecrouter (serve|check|pairs|generate|chat|inflate"
    r"|bench (?:chains|load|turns|figures))\b(.*)"
)


def identity(page: Path) -> str:
    return page.name


def prose(page: Path) -> str:
    """Without what is between fences."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> set[str]:
    found = _LINK.findall(_SPAN.sub("", prose(page)))
    return {target for pair in found for target in pair if target}


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, no punctuation, hyphens for spaces."""
    headings = _HEADING.findall(prose(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    dead = []
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        near = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        waiting += [other for other in near if other.suffix == ".md" and other not in reached]
    assert not set(PAGES) - reached


# the command line


@cache
def options_of(command: str) -> frozenset[str]:
    """What a command's --help lists."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("sys.stdout", type("Lines", (), {"write": lines.append, "flush": int})())
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
    return frozenset(_OPTION.findall("".join(lines)))


def command_lines(page: Path) -> Iterator[tuple[str, str]]:
    """Every `specrouter COMMAND` with the rest of its line, in code."""
    text = page.read_text(encoding="utf-8")
    blocks = [block.replace("\\\n", " ") for _, block in FENCE.findall(text)]
    for code in (*"\n".join(blocks).splitlines(), *_SPAN.findall(prose(page))):
        for found in _COMMAND.finditer(code):
            yield found[1], found[2].partition(" #")[0]


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_commands_have_the_options_that_are_named(page: Path) -> None:
    for command, rest in command_lines(page):
        named = set(_OPTION.findall(rest))
        assert named <= options_of(command), f"specrouter {command}{rest}"


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_modules_that_are_run_exist(page: Path) -> None:
    for module in re.findall(
        r"python -m ((?:specrouter|examples|research|tests|checks)[\w.]*)", page.read_text()
    ):
        file = ROOT / module.replace(".", "/")
        assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), module


# configurations


@pytest.mark.parametrize("file", CONFIGS, ids=identity)
def test_a_bundled_scenario_is_valid(file: Path) -> None:
    config = RouterConfig.load(file)
    for member in config.pool.models:
        scheme, _, name = member.source.partition(":")
        if scheme == "hub":
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", name)
        elif member.has_model:
            check_source(member.source, field=member.name)


def sections(page: Path) -> Iterator[dict[str, Any]]:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "yaml":
            yield from (part for part in yaml.safe_load_all(block) if isinstance(part, dict))


# The one of policies.md names a policy of that page, which tests/test_own_policy.py imports.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "policies.md"], ids=identity
)
def test_scenarios_in_the_documents_are_valid(page: Path) -> None:
    least = {"pool": {"target": "t", "models": [{"name": "t", "source": "bundled:tiny-8m"}]}}
    for section in sections(page):
        if set(section) & set(RouterConfig.model_fields):
            RouterConfig.load({**least, **section})


# examples


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_python_in_the_documents_compiles_and_imports_what_exists(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            compile(block, str(page), "exec")
            for line in block.splitlines():
                if line.startswith("from specrouter"):
                    exec(line, {})


# the interfaces


@pytest.mark.parametrize("body", [CompletionRequest, ChatRequest, GenerateRequest])
def test_every_field_of_a_request_is_documented(body: type[BaseModel]) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert not {name for name in body.model_fields if f"`{name}" not in page}


def test_every_endpoint_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").replace("/ID`", "/{model_id}`")
    paths = create_app(FakeRouter()).openapi()["paths"]  # type: ignore[arg-type]
    named = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert {"POST /v1/completions", "GET /health"} <= named
    assert not {name for name in named if f"`{name}`" not in page}
