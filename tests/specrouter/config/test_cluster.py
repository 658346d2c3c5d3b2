"""The section `cluster`: strict, and every replica serves the same pool."""

from typing import Any

import pytest

from modelpool.errors import ConfigError
from specrouter import RouterConfig

POOL: dict[str, Any] = {
    "target": "big",
    "models": [
        {"name": "rules", "source": "ngram"},
        {"name": "small", "source": "path:/none/small"},
        {"name": "big", "source": "path:/none/big", "device": "cpu"},
    ],
}


def load(cluster: Any, **more: Any) -> RouterConfig:
    return RouterConfig.load({"pool": POOL, "cluster": cluster, **more})


def test_each_replica_has_a_configuration_of_its_own_without_the_section() -> None:
    replicas = [
        {"name": "cpu", "count": 2, "threads": 2},
        {"name": "gpu", "device": "cuda:1", "engine": {"max_requests": 64}},
    ]
    found = load({"replicas": replicas}, engine={"max_model_len": 512}).replicas()
    assert RouterConfig.load({"pool": POOL}).replicas() == {}
    assert list(found) == ["cpu-0", "cpu-1", "gpu"]
    assert all(one.cluster is None for one in found.values())
    assert {one.engine.max_model_len for one in found.values()} == {512}
    assert found["gpu"].engine.max_requests == 64
    assert [one.device for one in found["cpu-0"].pool.models] == ["auto", "auto", "cpu"]
    assert [one.device for one in found["gpu"].pool.models[1:]] == ["cuda:1", "cuda:1"]


def test_a_twin_in_int8_stays_on_the_cpu_of_its_replica() -> None:
    twin = {"name": "twin", "source": "quantised:big"}
    pool = {**POOL, "models": [twin, *POOL["models"]]}
    cluster = {"replicas": [{"name": "gpu", "device": "cuda:1"}]}
    models = RouterConfig.load({"pool": pool, "cluster": cluster}).replicas()["gpu"].pool.models
    assert {one.name: one.device for one in models} == {
        "twin": "auto", "rules": "auto", "small": "cuda:1", "big": "cuda:1"
    }  # fmt: skip


def test_the_halves_of_a_pair_are_processes_with_names_and_settings_of_their_own() -> None:
    pair = {
        "name": "p",
        "prefill": {"threads": 2, "engine": {"max_requests": 4}},
        "decode": {"device": "cuda:2"},
    }
    config = load({"replicas": [{"name": "a"}], "pairs": [pair]})
    found = config.replicas()
    assert list(found) == ["a", "p-prefill", "p-decode"]
    assert found["p-prefill"].engine.max_requests == 4
    assert [one.device for one in found["p-decode"].pool.models[1:]] == ["cuda:2", "cuda:2"]
    assert config.cluster is not None
    assert config.cluster.threads == {"a": 1, "p-prefill": 2, "p-decode": 1}


@pytest.mark.parametrize(
    ("field", "cluster"),
    [
        ("cluster.replicas", {"replicas": []}),
        ("cluster.replicas[0].name", {"replicas": [{"name": "a b"}]}),
        ("cluster.replicas", {"replicas": [{"name": "a"}, {"name": "a"}]}),
        ("cluster.replicas", {"replicas": [{"name": "a", "count": 2}, {"name": "a-1"}]}),
        ("cluster.replicas[0].count", {"replicas": [{"name": "a", "count": 0}]}),
        (
            "cluster.replicas[1].engine.max_request",
            {"replicas": [{"name": "a"}, {"name": "b", "engine": {"max_request": 1}}]},
        ),
        ("cluster.pair", {"replicas": [{"name": "a"}], "pair": []}),
        ("cluster.pairs[0].name", {"pairs": [{}]}),
        ("cluster.pairs[0].decode.threads", {"pairs": [{"name": "p", "decode": {"threads": 0}}]}),
        (
            "cluster.pairs[0].decode.engine.max_request",
            {"pairs": [{"name": "p", "decode": {"engine": {"max_request": 1}}}]},
        ),
        ("cluster.pairs", {"pairs": [{"name": "p"}, {"name": "p"}]}),
        ("cluster.pairs", {"replicas": [{"name": "p-decode"}], "pairs": [{"name": "p"}]}),
        ("cluster.pairs", {"replicas": [{"name": "p"}], "pairs": [{"name": "p"}]}),
        (
            "cluster.routing.policy",
            {"replicas": [{"name": "a"}], "routing": {"policy": "fastest"}},
        ),
        ("cluster.resume.silence_s", {"replicas": [{"name": "a"}], "resume": {"silence_s": 0}}),
        ("cluster.resume.silence_s", {"replicas": [{"name": "a"}], "routing": {"metrics_s": 1.5}}),
    ],
)
def test_what_is_wrong_is_named(field: str, cluster: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(cluster)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("key", "usual", "other"),
    [
        ("exact", "fast", "strict"),
        ("generation_defaults", "neutral", "model"),
        ("prefix_cache", True, False),
    ],
)
def test_what_texts_depend_on_is_that_of_all_replicas(key: str, usual: Any, other: Any) -> None:
    replicas: list[Any] = [{"name": "a"}, {"name": "b", "engine": {key: other}}]
    with pytest.raises(ConfigError, match=rf"replicas\[1\]\.engine\.{key}: .* set engine\.{key}$"):
        load({"replicas": replicas})
    assert load({"replicas": replicas}, engine={key: other}).replicas()
    replicas[1]["engine"] = {key: usual}
    assert load({"replicas": replicas}).replicas()
