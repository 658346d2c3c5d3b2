"""What the deployment files start is read by the command line, and listens where others look."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from specrouter.cli.main import _parser
from specrouter.cli.target import read_asked
from specrouter.http_client import API_KEY_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def objects(recipe: str) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / recipe).read_text())}


def of_the_image(name: str) -> str:
    return str(re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)[-1])


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    [one] = deployment["spec"]["template"]["spec"]["containers"]
    return dict(one)


KUBERNETES, KUBERAY = objects("kubernetes.yaml"), objects("kuberay.yaml")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
IN_RAY = [
    shlex.split(line) for line in container(KUBERAY["Deployment"])["args"][0].split("&&")
]  # `ray start`, and what follows
STARTS = {
    "image": ast.literal_eval(of_the_image("CMD")),
    "kubernetes": container(KUBERNETES["Deployment"])["args"],
    "compose": COMPOSE["specrouter"]["command"],
    "kuberay": IN_RAY[-1][2:],
}


@pytest.mark.parametrize("where", STARTS)
def test_a_service_is_started_that_others_reach(where: str, tmp_path: Path) -> None:
    asked = _parser().parse_args(STARTS[where])
    if where == "kuberay":
        name = Path(asked.config).name
        asked.config = tmp_path / name
        asked.config.write_text(KUBERAY["ConfigMap"]["data"][name])
    config = read_asked(asked).config
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8000)
    assert (config.cluster is not None) == (where == "kuberay")


@pytest.mark.parametrize("recipe", [KUBERNETES, KUBERAY])
def test_a_recipe_finds_its_pods_and_gives_them_time_and_a_key(recipe: dict[str, Any]) -> None:
    spec = recipe["Deployment"]["spec"]["template"]["spec"]
    own = container(recipe["Deployment"])
    labels = recipe["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert recipe["Service"]["spec"]["selector"].items() <= labels.items()
    ports = {one["name"]: one["containerPort"] for one in own["ports"]}
    assert ports[recipe["Service"]["spec"]["ports"][0]["targetPort"]] == 8000
    assert API_KEY_VARIABLE in {one["name"] for one in own["env"]}
    drain_s = read_asked(_parser().parse_args(["serve"])).config.server.drain_s
    assert spec.get("terminationGracePeriodSeconds", 30) > drain_s


def test_replicas_have_room_on_the_workers_and_nowhere_else() -> None:
    [replicas] = yaml.safe_load(KUBERAY["ConfigMap"]["data"]["cluster.yaml"])["cluster"]["replicas"]
    ray = KUBERAY["RayCluster"]["spec"]
    [workers] = ray["workerGroupSpecs"]
    cores = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert workers["replicas"] * (cores // replicas["threads"]) >= replicas["count"]
    assert ray["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "--num-cpus=0" in IN_RAY[0]


def test_the_composed_service_is_scraped_with_the_files_beside_it() -> None:
    mounted = [one.split(":")[0] for each in COMPOSE.values() for one in each.get("volumes", ())]
    assert all((DEPLOY / one).is_file() for one in mounted if one.startswith("."))
    [job] = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["specrouter:8000"]}]
