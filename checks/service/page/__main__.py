"""The page at `/` in headless Chromium, served from an installed wheel: `make page-test`.

    python -m checks.service.page [--venv DIR] [--pictures DIR] [--where-chromium-is-at-hand]

Builds the wheel, installs it beside the dependencies of this environment, serves bundled models in
float32 from it, without a key and with one, and looks at the page with Playwright, which has an
environment of its own, and axe-core, from npm. `--pictures` keeps screenshots; the documents' are
made so.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from checks.service.environment import environment, is_offered, run_checks
from checks.service.report import Report
from checks.service.service import DRAFTERS, TARGET, Service, running, tiny_pool
from checks.wheel_check import build

KEY = "a-key-of-this-check"
AXE = "axe-core@4.10.3"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_SERVE = ("-P", "-m", "specrouter", "serve")  # what is installed, not what lies in this folder
_STATIC = {"policy": "static", "chain": [DRAFTERS[0], TARGET], "depth": 3}
_LARGEST_PICTURE = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.service.page", description=__doc__)
    parser.add_argument("--venv", type=Path, metavar="DIR", help="keeps Playwright there")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="keeps screenshots there")
    parser.add_argument(
        "--where-chromium-is-at-hand",
        action="store_true",
        help="passes, and says so, where that, npm or Playwright is not",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        browser, axe = next(filter(None, map(shutil.which, _BROWSERS)), None), _axe(Path(folder))
        if browser is None or axe is None or not is_offered("playwright"):
            found = {"Chromium": browser, f"{AXE} from npm": axe}
            missing = [name for name, one in found.items() if one is None] or ["Playwright"]
            print(f"the page was not tested: there is no {' and no '.join(missing)} here")
            return 0 if arguments.where_chromium_is_at_hand else 1
        return checked(Path(folder), browser, axe, arguments.venv, arguments.pictures)


def checked(home: Path, browser: str, axe: Path, venv: Path | None, kept: Path | None) -> int:
    """The exit code. `home`: an empty folder but for `axe`; `kept`: where pictures go."""
    report, pictures = Report("page"), home / "pictures"
    pictures.mkdir()
    keyed = tiny_pool("float32", scheduler=_STATIC, server={"api_keys": [KEY]})
    seen = {"PYTHONPATH": str(_installed(home))}
    with (
        environment(["playwright"], venv, constrained=False) as python,
        running(tiny_pool("float32"), _SERVE, seen) as plain,
        running(keyed, _SERVE, seen) as locked,
    ):
        saved = home / "browser.json"
        asked = (browser, plain.url, locked.url, KEY, str(axe), str(pictures), str(saved))
        run_checks(python, "checks.service.page.browser", report, saved, *asked)
        for service in (plain, locked):
            with report.check("a service that a page watched stops with 0"):
                _check_stopped(service)
    with report.check(f"pictures have at most {_LARGEST_PICTURE} bytes") as finding:
        finding.text = _small(pictures, kept)
    return report.show()


def _installed(home: Path) -> Path:
    """Where the wheel of this tree is installed, without what it depends on."""
    wheel, folder = build(home), home / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True)
    return folder


def _axe(home: Path) -> Path | None:
    """None where npm is not there, or has it not."""
    npm = shutil.which("npm")
    pack = [npm or "", "pack", "--silent", AXE]
    if npm is None or subprocess.run(pack, cwd=home, check=False).returncode:
        return None
    (packed,) = home.glob("axe-core-*.tgz")
    with tarfile.open(packed) as archive:
        content = archive.extractfile("package/axe.min.js")
        assert content is not None, f"{AXE} has no axe.min.js"
        (home / "axe.js").write_bytes(content.read())
    return home / "axe.js"


def _check_stopped(service: Service) -> None:
    code = service.stop()
    assert code == 0, service.log_tail()


def _small(pictures: Path, kept: Path | None) -> str:
    """Leaves 128 colours, which is enough for text and bars; copies to `kept`."""
    from PIL import Image  # comes with matplotlib

    sizes = []
    for file in sorted(pictures.glob("*.png")):
        Image.open(file).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
            file, optimize=True
        )
        sizes.append(file.stat().st_size)
        if kept is not None:
            shutil.copy(file, kept)
    assert len(sizes) == 3, "light, dark and narrow"
    assert max(sizes) <= _LARGEST_PICTURE, sizes
    return ", ".join(map(str, sizes))


if __name__ == "__main__":
    sys.exit(main())
