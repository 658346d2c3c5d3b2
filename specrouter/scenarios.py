"""The bundled scenarios: configuration files that came with this package, by name.

Contract: imports nothing of ours and reads no file, so that the command line may use it at once.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def scenario_folder() -> Path:
    """Inside an installed package, or beside the packages in a checkout."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def scenario_names() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in scenario_folder().glob("*.yaml")))


def find_scenario(given: str | Path) -> Path:
    """A file; where there is none of this name, the bundled scenario that is called so."""
    bundled = scenario_folder() / f"{given}.yaml"
    is_name = str(given) in scenario_names()
    return bundled if is_name and not Path(given).is_file() else Path(given)
