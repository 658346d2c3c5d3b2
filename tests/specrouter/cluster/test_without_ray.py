"""Where no replicas are configured, nothing imports Ray; where they are, its lack is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]
SERVED = """
import sys
from specrouter import RouterConfig
import specrouter.cli.main, specrouter.http.app, specrouter.http.guards
from specrouter.http.serve import _router
from modelpool.progress import LoadProgress
config = RouterConfig.load("tiny")
models = config.pool.models[-1:]
pool = config.pool.model_copy(update={"models": models})
with _router(config.model_copy(update={"pool": pool}), LoadProgress()) as router:
    output = router.generate(["Once"])
print(*sorted(name for name in sys.modules if name.startswith(("ray", "specrouter.cluster"))))
"""
# Whoever imports it is told, also where the error would be caught.
RAY = "import os, traceback; traceback.print_stack(); os._exit(9)"


def run(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_a_service_without_replicas_imports_neither_ray_nor_what_replicas_need(
    tmp_path: Path,
) -> None:
    """So that its start cannot take longer for them."""
    (tmp_path / "ray.py").write_text(RAY)
    assert run("-c", "import ray", path=str(tmp_path)).returncode == 9
    done = run("-c", SERVED, path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_replicas_without_ray_are_refused_by_their_section(tmp_path: Path) -> None:
    pool = {"target": "t", "models": [{"name": "t", "source": "bundled:tiny-1m"}]}
    scenario = tmp_path / "cluster.yaml"
    settings = {"pool": pool, "cluster": {"replicas": [{"name": "r"}]}, "server": {"port": 0}}
    scenario.write_text(json.dumps(settings))
    blocked = (
        "import sys; sys.modules['ray'] = None\n"
        "from specrouter.cli.main import main\n"
        f"sys.exit(main(['serve', '--config', {str(scenario)!r}]))"
    )
    done = run("-c", blocked)
    assert done.returncode == 2, done.stderr
    assert "cluster: needs Ray Serve: pip install 'specrouter[cluster]'" in done.stderr
