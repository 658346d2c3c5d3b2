"""Where no replicas are configured, nothing imports Ray; where they are, its lack is told."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SERVED = """
import sys
from pathlib import Path
import specrouter.cli.main, specrouter.http.app, specrouter.http.serve, specrouter.cluster.router
from specrouter import ChainRouter, RouterConfig
from specrouter.http.serve import _router
from modelpool.progress import LoadProgress
config = RouterConfig.load("tiny").model_copy(update={"cluster": None})
models = config.pool.models[-1:]
pool = config.pool.model_copy(update={"models": models})
with _router(config.model_copy(update={"pool": pool}), LoadProgress()) as router:
    assert isinstance(router, ChainRouter)
    print(sorted(name for name in sys.modules if name.partition(".")[0] == "ray"))
"""


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def test_a_service_without_replicas_imports_no_ray() -> None:
    done = run("-c", SERVED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


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
