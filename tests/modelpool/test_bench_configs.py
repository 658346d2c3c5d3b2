"""The pools for benchmarks are valid, and say what is inflated."""

from pathlib import Path

import pytest

from modelpool.checkpoint.source import resolve_source
from modelpool.inflate.inflate import inflated_shape
from specrouter.config import RouterConfig

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["bench-cpu", "bench-cpu-int8", "bench-specialists"])
def test_a_benchmark_s_pool_has_the_sizes_that_it_names(name: str) -> None:
    file = CONFIGS / f"{name}.yaml"
    config = RouterConfig.load(file)
    assert "INFLATED" in file.read_text()
    assert config.pool.target == "target-200m"
    sizes = {
        member.name: inflated_shape(
            resolve_source(member.source, field=member.name), member.inflate_to
        ).parameter_count
        for member in config.pool.models
        if member.inflate_to
    }
    assert 40e6 <= sizes.pop("middle-40m") < 45e6
    assert 200e6 <= sizes.pop("target-200m") < 215e6
    assert not sizes
