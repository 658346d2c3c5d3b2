"""The Dockerfile, the compose file and the Kubernetes recipe fit the service and each other.

None of them is run here.
"""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from specrouter.cli.main import _parser
from specrouter.cli.target import read_asked
from specrouter.http.keys import API_KEY_VARIABLE
from specrouter.version import __version__

ROOT = Path(__file__).resolve().parent.parent
OBJECTS: dict[str, Any] = {
    one["kind"]: one for one in yaml.safe_load_all((ROOT / "docs" / "kubernetes.yaml").read_text())
}
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def test_the_image_runs_without_root_and_says_what_it_needs() -> None:
    [user] = instructions("USER")
    assert user == "1000"
    assert DOCKERFILE.index("\nUSER ") < DOCKERFILE.index("\nENTRYPOINT ")
    assert instructions("EXPOSE") == ["8000"]
    assert instructions("VOLUME") == ["/cache"]
    for value in re.findall(r"=(/\S+)", instructions("ENV")[0]):
        assert value.startswith("/cache/")


def test_the_image_starts_the_service_and_checks_its_health() -> None:
    start, arguments = (instructions(name)[0] for name in ("ENTRYPOINT", "CMD"))
    command = ast.literal_eval(start) + ast.literal_eval(arguments)
    assert command[0] == "specrouter"
    config = read_asked(_parser().parse_args(command[1:])).config
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8000)
    check = instructions("HEALTHCHECK")[0]
    program = ast.literal_eval(check.partition("CMD ")[2].strip())
    compile(program[-1], "HEALTHCHECK", "exec")
    assert "127.0.0.1:8000/health" in program[-1]


def test_what_the_image_copies_is_installed_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "tests", "docs"} <= set(ignored)
    for needed in ("specrouter", "configs", "README.md", "LICENSE", "constraints.txt"):
        assert needed not in ignored


# What the recipe has of Kubernetes' words: one that is none of these is misspelt.
WORDS = {
    "apiVersion", "kind", "metadata", "name", "spec", "selector", "ports",
    "port", "targetPort", "replicas", "matchLabels", "template", "labels", "securityContext",
    "terminationGracePeriodSeconds", "runAsNonRoot", "runAsUser", "fsGroup", "containers", "image",
    "args", "env", "valueFrom", "secretKeyRef", "key", "containerPort", "startupProbe", "httpGet",
    "path", "periodSeconds", "failureThreshold", "readinessProbe", "timeoutSeconds", "resources",
    "requests", "cpu", "memory", "limits", "volumeMounts", "mountPath", "volumes", "emptyDir",
}  # fmt: skip


def words(value: Any) -> set[str]:
    if isinstance(value, list):
        return set[str]().union(*map(words, value))
    return {*value}.union(*map(words, value.values())) if isinstance(value, dict) else set()


def test_the_recipe_has_kubernetes_words() -> None:
    assert words([*OBJECTS.values()]) - WORDS == {"app"}, "the labels'"
    versions = {kind: one["apiVersion"] for kind, one in OBJECTS.items()}
    assert versions == {"Service": "v1", "Deployment": "apps/v1"}


def test_the_objects_of_the_recipe_name_one_another() -> None:
    template = OBJECTS["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["Service"]["spec"]["selector"] == labels
    [container] = template["spec"]["containers"]
    [port] = container["ports"]
    assert {one["targetPort"] for one in OBJECTS["Service"]["spec"]["ports"]} == {port["name"]}
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    [key] = container["env"]
    reference = key["valueFrom"]["secretKeyRef"]
    assert key["name"] == API_KEY_VARIABLE
    made = f"kubectl create secret generic {reference['name']} --from-literal={reference['key']}="
    assert made in (ROOT / "docs" / "operation.md").read_text(encoding="utf-8")
    volumes = {one["name"] for one in template["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes


def test_the_recipe_s_service_is_this_one() -> None:
    template = OBJECTS["Deployment"]["spec"]["template"]["spec"]
    [container] = template["containers"]
    config = read_asked(_parser().parse_args(container["args"])).config
    assert container["ports"][0]["containerPort"] == config.server.port
    assert template["terminationGracePeriodSeconds"] > config.server.drain_s
    assert container["image"] == f"specrouter:{__version__}"
    assert str(template["securityContext"]["runAsUser"]) == instructions("USER")[0]


def test_the_commands_of_the_image_can_be_read() -> None:
    for line in instructions("RUN"):
        assert shlex.split(line)


DOCS = ROOT / "docs"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCS / "compose.yaml").read_text())


def test_the_composed_services_name_one_another_and_the_files_beside_them() -> None:
    services = COMPOSE["services"]
    config = read_asked(_parser().parse_args(services["specrouter"]["command"])).config
    assert services["specrouter"]["environment"] == [API_KEY_VARIABLE]
    assert (DOCS / services["specrouter"]["build"]["context"]).resolve() == ROOT
    kept = set(COMPOSE["volumes"])
    mounted = [one.split(":") for each in services.values() for one in each["volumes"]]
    assert {source for source, *_ in mounted if not source.startswith(".")} == kept
    files = {source for source, *_ in mounted if source.startswith(".")}
    assert all((DOCS / one).is_file() for one in files)
    assert all(
        port.startswith("127.0.0.1:") for each in services.values() for port in each["ports"]
    )
    scraped = yaml.safe_load((DOCS / "prometheus.yaml").read_text())
    [job] = scraped["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"specrouter:{config.server.port}"]}]
    assert {f"./{one}" for one in scraped["rule_files"]} < files
    grafana = services["grafana"]
    assert {one["source"] for one in grafana["configs"]} == COMPOSE["configs"].keys()
    inside = {name: yaml.safe_load(one["content"]) for name, one in COMPOSE["configs"].items()}
    [source] = inside["datasource"]["datasources"]
    assert (source["url"], source["isDefault"]) == ("http://prometheus:9090", True)
    [provider] = inside["dashboards"]["providers"]
    assert grafana["environment"]["GF_AUTH_BASIC_ENABLED"] == "false"
    assert grafana["environment"]["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    assert any(target == home for _, target, *_ in mounted)


def test_the_rules_are_the_alerts_of_the_document() -> None:
    """Whose series exist, as those of the dashboard: `test_prometheus.py`."""
    [group] = yaml.safe_load((DOCS / "alerts.yaml").read_text())["groups"]
    told = (DOCS / "metrics.md").read_text().partition("## What to alert on")[2]
    expressions = [rule["expr"] for rule in group["rules"]]
    assert expressions == re.findall(r"^\| `(.*?)` \|", told, re.MULTILINE)
    assert len({rule["alert"] for rule in group["rules"]}) == len(expressions) > 5
