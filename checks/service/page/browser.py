"""What a browser shows of the page, and what it lets others see; see `checks.service.page`.

Runs in an environment that has Playwright. Its services serve tiny-8m in float32, the second one
behind a key and with a fixed chain.
"""

import functools
import http.server
import json
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, Route, sync_playwright

from checks.service.report import Report

_OPTIONS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
    "--host-resolver-rules=MAP rebound.test 127.0.0.1",
)
_PATIENCE_MS = 120_000
_PROMPTS = 8
_VIEWERS = 5
_PICTURES: Mapping[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1180, "height": 1180}},
    "dark": {"viewport": {"width": 1180, "height": 1180}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 400, "height": 1100}},
}
_NOTE_VIOLATIONS = """
  window.violations = [];
  addEventListener("securitypolicyviolation",
    (event) => violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""
_MARKUP = '<img src=x onerror="window.hit=1"><script>window.hit=1</script><b>&amp;'
# Of another origin: tries to read the service by all that a page has.
_OTHER_PAGE = """<!doctype html><meta charset="utf-8"><script>
async function tried(path, options) {
  try { const answer = await fetch(path, options); return (await answer.text()).length; }
  catch (error) { return "refused"; }
}
window.result = (async () => ({
  page: await tried("URL/"), feed: await tried("URL/router/live"),
  opaque: await tried("URL/router/live", {mode: "no-cors"}),
  keyed: await tried("URL/router/live", {headers: {Authorization: "Bearer x"}}),
}))();
</script>"""


class Visit:
    """A context of the browser, and all that its pages asked and complained of."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.asked = list[str]()
        self.headers = list[Mapping[str, str]]()
        self.complaints = list[str]()
        context.set_default_timeout(_PATIENCE_MS)
        context.add_init_script(_NOTE_VIOLATIONS)
        context.on("request", self._note)
        context.on("console", self._note_console)
        context.on("weberror", lambda one: self.complaints.append(str(one.error)))

    def _note(self, request: Any) -> None:
        self.asked.append(request.url)
        self.headers.append(request.headers)

    def _note_console(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def open(self, url: str) -> Page:
        page = self.context.new_page()
        page.goto(url)
        return page

    def check_quiet(self, page: Page, url: str) -> None:
        assert page.evaluate("violations") == []
        assert self.complaints == []
        hosts = {urlsplit(one).netloc for one in self.asked}
        assert hosts == {urlsplit(url).netloc}, hosts


def main(
    browser: Browser, report: Report, plain: str, locked: str, key: str, axe: str, pictures: Path
) -> None:
    def check(name: str, run: Callable[[], str | None]) -> None:
        with report.check(name) as finding:
            finding.text = run() or ""

    with visit(browser) as one:
        page = one.open(plain)
        check("coloured spans are the answer's tokens", lambda: spans(page, plain))
        check(f"{_PROMPTS} sampled prompts: equal", lambda: equal(page))
        check("a tree with its accepted path, by keys alone", lambda: tree(page))
        check("the strips of decision and cycles", lambda: strips(page))
        check("no other host, no violation", lambda: one.check_quiet(page, plain))
        check("axe-core, light", lambda: accessible(page, axe))
    with visit(browser) as one:
        check("a token that was changed is found", lambda: differs(one.open(plain)))
        check("markup stays text", lambda: markup(one.open(plain)))
        check("no violation by markup", lambda: one.check_quiet(one.context.pages[-1], plain))
    check("replicas, pairs and objectives", lambda: service_panel(browser, plain))
    check(f"{_VIEWERS} pages watch at once", lambda: viewers(browser, plain))
    check("another origin's script gets nothing", lambda: other_origin(browser, plain))
    check("a wrong Host gets nothing", lambda: wrong_host(browser, plain))
    check(
        "the page asks for a key, and a fixed chain shows", lambda: with_key(browser, locked, key)
    )
    for name, options in _PICTURES.items():
        take = functools.partial(picture, browser, plain, axe, name, options, pictures)
        check(f"picture, {name}", take)


@contextmanager
def visit(browser: Browser, **options: Any) -> Iterator[Visit]:
    context = browser.new_context(**options)
    try:
        yield Visit(context)
    finally:
        for page in context.pages:  # it may be measuring still
            page.unroute_all(behavior="ignoreErrors")
        context.close()


def generate(
    page: Page, prompt: str, tokens: int = 24, chain: str | None = None, seed: int = 1
) -> str:
    """What the verdict says of a prompt."""
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    page.fill("#seed", str(seed))
    page.get_by_label("Temperature").fill("0.8")
    if chain is not None:
        page.select_option("#chain", chain)
    page.click("#run")
    page.wait_for_selector(".prompt button:text('Stop')")  # what was shown before is gone
    return str(page.inner_text("#verdict"))


def shown(page: Page, pane: str = "#routed") -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        f"{pane} .tokens .token", "all => all.map((one) => one.textContent)"
    )
    return found


def spans(page: Page, url: str) -> str:
    verdict = generate(page, "def fib(n):\n", 48, "tiny-1m>tiny-8m", seed=7)
    body = {"prompt": "def fib(n):\n", "max_new_tokens": 48, "temperature": 0.8, "seed": 7}
    asked = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked) as answer:
        expected = json.load(answer)
    for pane in ("#routed", "#alone"):
        texts = shown(page, pane)
        assert len(texts) == len(expected["token_ids"])
        assert "".join(texts) == expected["text"]
    marks = page.eval_on_selector_all(
        "#routed .tokens .token", "all => [...new Set(all.map((one) => one.classList[1]))]"
    )
    assert len(marks) == 2, f"the drafter's and the target's, not {marks}"
    return verdict


def equal(page: Page) -> str:
    chains = page.eval_on_selector_all("#chain option", "all => all.map((one) => one.value)")
    for number in range(_PROMPTS):
        chain = chains[number % len(chains)]
        verdict = generate(page, f"Question {number}: why", 16, chain, seed=number)
        assert "✓ Equal. All 16 tokens" in verdict, f"{chain}, seed {number}: {verdict}"
        assert "float32" in verdict, "rounding may differ"
        assert page.locator("#verdict.equal a[href='#guarantees']").count() == 1
    return f"{len(chains)} chains"


def tree(page: Page) -> None:
    generate(page, "def fib(n):\n", 24, "tiny-1m>tiny-3m>tiny-8m")
    page.focus("#routed .tokens")
    said = set()
    for _ in range(24):
        page.keyboard.press("ArrowRight")
        said.add(page.inner_text("output.detail"))
    assert len(said) == 24
    assert any("proposed by tiny-1m" in one for one in said)
    assert all(re.search(r"chain .*cycle \d+\.", one) for one in said)
    page.keyboard.press("ArrowLeft")
    nodes = page.locator(".tree .node").count()
    accepted = page.locator(".tree .node.on").count()
    heading = page.inner_text(".tree p")
    assert page.locator(".tree .edge.on").count() == accepted
    assert nodes >= accepted >= 1, heading


def strips(page: Page) -> str:
    page.wait_for_selector("#decision tr.used")
    rows = page.locator("#decision tbody tr").count()
    assert rows >= 5
    measured = page.eval_on_selector_all(
        "#decision rect.measured",
        "all => all.filter((one) => one.getAttribute('width') > 0).length",
    )
    assert measured >= 2, "chains that ran, and the target alone"
    assert page.locator("#cycles rect.verify_ms").count() > 10
    label = page.get_attribute("#cycles", "aria-label") or ""
    assert re.fullmatch(r"The last \d+ cycles: (verify|re-score|draft|own work) .*", label)
    assert page.locator("#models tbody tr").count() == 5
    return str(page.inner_text("#decision tr.used th"))


def accessible(page: Page, axe: str) -> str:
    page.evaluate(Path(axe).read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    bad = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    assert not bad, [(one["id"], one["nodes"][0]["html"][:200]) for one in bad]
    return f"{len(found['passes'])} rules pass, {len(found['violations'])} lesser violations"


def changing(change: Callable[[dict[str, Any], int], None], of: str) -> Callable[[Route], None]:
    """A hook on answers: `change` gets each event, and the number of tokens before it.

    `of`: answers to requests with "off" for speculation, or to the others.
    """

    def handle(route: Route) -> None:
        is_off = json.loads(route.request.post_data or "")["speculation"] == "off"
        if is_off != (of == "off"):
            route.continue_()
            return
        answer, parts, before = route.fetch(), list[str](), 0
        for part in answer.text().split("\n\n"):
            if part.startswith("data: {"):
                event = json.loads(part[6:])
                change(event, before)
                before += len(event["token_ids"])
                part = f"data: {json.dumps(event)}"
            parts.append(part)
        route.fulfill(response=answer, body="\n\n".join(parts))

    return handle


def differs(page: Page) -> None:
    for place in (0, 9, 23):

        def change(event: dict[str, Any], before: int, place: int = place) -> None:
            if before <= place < before + len(event["token_ids"]):
                event["token_ids"][place - before] += 1

        page.route("**/generate", changing(change, "off"))
        verdict = generate(page, "The sea", 24, "tiny-1m>tiny-8m")
        page.unroute("**/generate")
        assert f"✗ Differs from token {place + 1} on." in verdict
        assert page.locator("#verdict.differs").count() == 1
        assert page.locator("#routed .token.other").count() == 24 - place
    assert "✓ Equal" in generate(page, "The sea", 24, "tiny-1m>tiny-8m")


def markup(page: Page) -> None:
    def change(event: dict[str, Any], before: int) -> None:
        event["draft"]["texts"][0] = _MARKUP
        tree = event["draft"]["tree"]
        tree["texts"] = [_MARKUP] * len(tree["texts"])
        tree["proposed_by"] = tree["proposed_by"] and [_MARKUP] * len(tree["texts"])

    page.route("**/generate", changing(change, "routed"))
    generate(page, _MARKUP, 12, "tiny-1m>tiny-8m")
    assert _MARKUP in shown(page)
    assert page.locator("#app img, #app script, #app .tokens b").count() == 0
    assert page.evaluate("window.hit") is None
    assert page.input_value("#prompt") == _MARKUP


def service_panel(browser: Browser, url: str) -> None:
    """By a snapshot to which is added what only other services have."""
    with urllib.request.urlopen(f"{url}/router/live") as feed:
        snapshot = json.loads(feed.readline().removeprefix(b"data: "))
    snapshot |= {
        "replicas": {"r-0": "ready", "r-1": "lost: <b>killed</b>"},
        "pairs": ["p"],
        "objectives": {"interactive": [3, 4], "none": [0, 0]},
        "cycles": [],
    }
    with visit(browser) as one:
        page = one.context.new_page()
        body = f"data: {json.dumps(snapshot)}\n\n"
        page.route("**/router/live", lambda route: route.fulfill(body=body))
        page.goto(url)
        facts = page.inner_text(".facts")
        for part in (
            "r-0: ready",
            "r-1: lost: <b>killed</b>",
            "pairs: p",
            "interactive: 3 of 4 (75%)",
        ):
            assert part in facts, facts
        assert "none" not in facts
        assert "Replicas do not report single cycles" in page.inner_text("#app")


def viewers(browser: Browser, url: str) -> None:
    with visit(browser) as one:
        for page in [one.open(url) for _ in range(_VIEWERS)]:
            assert page.inner_text("#target") == "tiny-8m"
        assert one.complaints == []


def other_origin(browser: Browser, url: str) -> str:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(_OTHER_PAGE.replace("URL", url).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with visit(browser) as one:
            result = one.open(f"http://127.0.0.1:{server.server_port}/").evaluate("result")
    finally:
        server.shutdown()
    assert result.pop("opaque") == 0, "an answer that the browser hides"
    assert set(result.values()) == {"refused"}, result
    return ", ".join(result)


def wrong_host(browser: Browser, url: str) -> None:
    """A name of somebody else that leads to this address."""
    with visit(browser) as one:
        page = one.context.new_page()
        answer = page.goto(f"http://rebound.test:{urlsplit(url).port}/")
        assert answer is not None
        assert answer.status == 403
        for path in ("/router/live", "/page/app.js"):
            assert page.evaluate(f"fetch('{path}').then((one) => one.status)") == 403


def with_key(browser: Browser, url: str, key: str) -> str:
    with visit(browser) as one:
        page = one.open(url)
        page.fill("#key", "another")
        page.click("#key-form button")
        page.wait_for_selector("text=does not know this key")
        page.fill("#key", key)
        page.click("#key-form button")
        page.wait_for_selector("#decision tr.used")
        assert page.locator("#key-form").count() == 0
        assert "✓ Equal" in generate(page, "The sea", 12)
        assert not [asked for asked in one.asked if key in asked], "a key in an address"
        sent = [headers.get("authorization") for headers in one.headers]
        assert sent.count(f"Bearer {key}") >= 3, "the feed and two texts"
        used = page.inner_text("#decision tr.used th")
        assert "tiny-1m" in used, used
        assert "policy static" in page.inner_text("section:has(#decision)")
        return " ".join(used.split())


def picture(
    browser: Browser, url: str, axe: str, name: str, options: dict[str, Any], folder: Path
) -> str:
    """After a prompt, and by axe-core, too."""
    with visit(browser, **options) as one:
        page = one.open(url)
        generate(page, "def fib(n):\n", 40, "tiny-1m>tiny-3m>tiny-8m", seed=4)
        page.wait_for_timeout(2500)  # two more snapshots
        page.screenshot(path=folder / f"page-{name}.png")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it overflows"
        one.check_quiet(page, url)
        return accessible(page, axe)


if __name__ == "__main__":
    chromium, plain_url, locked_url, secret, axe_file, pictures_folder, saved = sys.argv[1:]
    checked = Report("browser")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=list(_OPTIONS))
        main(opened, checked, plain_url, locked_url, secret, axe_file, Path(pictures_folder))
        opened.close()
    checked.save(Path(saved))
    sys.exit(0 if checked.passed else 1)
