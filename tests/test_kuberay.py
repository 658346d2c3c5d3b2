"""The KubeRay recipe parses, its configuration is one, and its parts name one another.

It is run nowhere here.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from specrouter.cli.main import _parser
from specrouter.cli.target import read_asked
from specrouter.http.keys import API_KEY_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
OBJECTS: dict[str, Any] = {
    one["kind"]: one for one in yaml.safe_load_all((ROOT / "docs" / "kuberay.yaml").read_text())
}
RAY, DEPLOYMENT = OBJECTS["RayCluster"]["spec"], OBJECTS["Deployment"]["spec"]
PODS = [
    RAY["headGroupSpec"]["template"]["spec"],
    RAY["workerGroupSpecs"][0]["template"]["spec"],
    DEPLOYMENT["template"]["spec"],
]
CONTAINERS = [container for pod in PODS for container in pod["containers"]]


def commands() -> list[list[str]]:
    [service] = DEPLOYMENT["template"]["spec"]["containers"]
    assert service["command"] == ["sh", "-c"]
    return [shlex.split(each) for each in service["args"][0].split("&&")]


def test_the_service_joins_the_cluster_with_the_configuration_of_the_recipe(
    tmp_path: Path,
) -> None:
    start, serve = commands()
    assert start[:2] == ["ray", "start"]
    head = f"--address={OBJECTS['RayCluster']['metadata']['name']}-head-svc:6379"
    assert head in start, "KubeRay's name of the head's service"
    assert serve[:2] == ["exec", "specrouter"]
    asked = _parser().parse_args(serve[2:])
    folder, name = str(asked.config).rsplit("/", 1)
    [mount] = [
        each
        for each in DEPLOYMENT["template"]["spec"]["containers"][0]["volumeMounts"]
        if each["mountPath"] == folder
    ]
    volumes = {one["name"]: one for one in DEPLOYMENT["template"]["spec"]["volumes"]}
    kept = volumes[mount["name"]]["configMap"]["name"]
    assert kept == OBJECTS["ConfigMap"]["metadata"]["name"]
    file = tmp_path / name
    file.write_text(OBJECTS["ConfigMap"]["data"][name])
    asked.config = file
    config = read_asked(asked).config
    assert config.cluster is not None
    assert config.cluster.address == "auto"
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8000)


def test_replicas_have_room_on_the_workers_and_nowhere_else() -> None:
    config = yaml.safe_load(OBJECTS["ConfigMap"]["data"]["cluster.yaml"])
    [replicas] = config["cluster"]["replicas"]
    [workers] = RAY["workerGroupSpecs"]
    cores = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert workers["replicas"] * (cores // replicas["threads"]) >= replicas["count"]
    assert RAY["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "--num-cpus=0" in commands()[0]


def test_every_process_has_rays_token_and_the_same_image() -> None:
    secret = OBJECTS["Secret"]
    for container in CONTAINERS:
        env = {one["name"]: one for one in container["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        key = env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert key["name"] == secret["metadata"]["name"]
        assert key["key"] in secret["stringData"]
    assert len({container["image"] for container in CONTAINERS}) == 1
    env = {one["name"]: one for one in CONTAINERS[-1]["env"]}
    key = env[API_KEY_VARIABLE]["valueFrom"]["secretKeyRef"]
    assert key["key"] in secret["stringData"]


def test_nodes_that_ray_starts_have_what_the_service_sets_for_itself() -> None:
    """`serve_link` sets these where it starts Ray; here others do."""
    text = (ROOT / "specrouter" / "cluster" / "serve_link.py").read_text()
    for container in CONTAINERS[:2]:
        env = {one["name"]: one.get("value") for one in container["env"]}
        for name in ("RAY_SERVE_THROUGHPUT_OPTIMIZED", "RAY_SERVE_ENABLE_DIRECT_INGRESS"):
            assert f'setdefault("{name}", "{env[name]}")' in text
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"ray=={RAY['rayVersion']}" in constraints


def test_the_service_is_found_by_its_labels() -> None:
    labels = DEPLOYMENT["template"]["metadata"]["labels"]
    assert OBJECTS["Service"]["spec"]["selector"].items() <= labels.items()
    ports = {one["name"] for one in CONTAINERS[-1]["ports"]}
    assert OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] in ports
