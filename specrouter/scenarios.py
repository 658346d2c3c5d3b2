"""The bundled scenarios: configuration files of this package, by name.

Contract: imports no other module of the project and reads no file, so the command line can use it
at once.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def scenario_folder() -> Path:
    """Return the folder inside an installed package, or beside the packages in a checkout."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def scenario_names() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in scenario_folder().glob("*.yaml")))


def find_scenario(given: str | Path) -> Path:
    """Return the given file if it exists, else the bundled scenario of that name."""
    bundled = scenario_folder() / f"{given}.yaml"
    is_name = str(given) in scenario_names()
    return bundled if is_name and not Path(given).is_file() else Path(given)
