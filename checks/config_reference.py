"""The reference of the configuration, `docs/configuration.md`, from the classes that check it.

    python -m checks.config_reference > docs/configuration.md

Contract: a section for each class that `RouterConfig` holds, a row for each of its keys: type and
range as pydantic has them, the default, and the meaning from the docstring of the key, or of its
class ("Attributes:").
A key without a meaning is an error, so that none can be forgotten.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specrouter.config import RouterConfig

_INTRODUCTION = """\
# Configuration

<!-- Made by `python -m checks.config_reference`, from the classes that check the file. -->

One YAML file per scenario, given with `--config`. The default is the bundled family
(`configs/tiny.yaml`), for `specrouter bench` it is `configs/bench-cpu.yaml`. Only `pool` is
required. An unknown or repeated key is an error that names it. Relative paths count from the
working directory. `specrouter check` says what is wrong with a file and what memory its models
take. Which values to choose: [tuning.md](tuning.md).

```yaml
pool:
  target: my-7b
  models:
    - {name: my-500m, source: "hub:Qwen/Qwen2.5-0.5B-Instruct"}
    - {name: my-7b, source: "hub:Qwen/Qwen2.5-7B-Instruct"}
scheduler: {policy: adaptive}
engine: {max_requests: 16, max_model_len: 4096}
server: {port: 8000}
slo_classes:
  interactive: {tpot_ms: 50, ttft_ms: 1000}
```

`--config` also takes the name of a bundled file. A released model that is fetched once:
[smollm2](../configs/smollm2.yaml). Released models with their small siblings:
[qwen2.5](../configs/qwen2.5.yaml), [qwen3](../configs/qwen3.yaml),
[llama3](../configs/llama3.yaml), [llama2-paper](../configs/llama2-paper.yaml) (the pool of
SpecRouter's paper). The bundled family: [tiny](../configs/tiny.yaml),
[tiny-ngram](../configs/tiny-ngram.yaml), as two replicas
[cluster-tiny](../configs/cluster-tiny.yaml), as a stream pair
[cluster-pair-tiny](../configs/cluster-pair-tiny.yaml). Inflated targets for benchmarks:
[bench-cpu](../configs/bench-cpu.yaml), in int8
[bench-cpu-int8](../configs/bench-cpu-int8.yaml), with specialised drafters
[bench-specialists](../configs/bench-specialists.yaml), on a GPU
[bench-gpu](../configs/bench-gpu.yaml).

## Environment variables

| variable | meaning |
|---|---|
| `SPECROUTER_API_KEY` | of `serve`: a key beside `server.api_keys`; of `cluster` and \
`bench load --server`: the key to send |
| `SPECROUTER_CACHE` | folder for measured times, inflated models and compiled kernels; by default \
`$XDG_CACHE_HOME/specrouter`, else `~/.cache/specrouter` |
| `SPECROUTER_KERNEL` | the CPU's kernels: `off` (PyTorch alone), \
`avx512-vnni`, `avx-vnni`, `avx2`, `neon`, `plain` |
| `CC` | the C compiler of the CPU's kernels; by default `cc` |
| `HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN` | the hub's: its cache folder; 1 for downloaded models \
only; the token for gated models |
| `OMP_NUM_THREADS` | CPU threads of PyTorch, and so of the target |
| `CUDA_VISIBLE_DEVICES` | GPUs that may be used |
| `RAY_AUTH_MODE`, `RAY_AUTH_TOKEN` | Ray's access control; the mode is `token` unless set |
| `RAY_SERVE_THROUGHPUT_OPTIMIZED` | 1 unless set |
| `RAY_SERVE_ENABLE_DIRECT_INGRESS`, `RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO`, \
`RAY_ENABLE_AUTO_CONNECT`, `RAY_USAGE_STATS_ENABLED`, `RAY_worker_niceness` | 0 unless set |
| `PIP_EXTRA_INDEX_URL` | of `make serve`: where `pip` finds PyTorch's CPU build |
"""

_ATTRIBUTE = re.compile(r"    (\w+(?:, \w+)*): (.*)")
_HEADER = "| key | type | default | meaning |\n|---|---|---|---|"


def configuration_reference() -> str:
    """The whole page, as Markdown."""
    return "\n".join([_INTRODUCTION, *_sections("", RouterConfig)])


def attribute_meanings(model: type[BaseModel]) -> dict[str, str]:
    """What docstrings say of each attribute, on one line; in that of a class names may share a
    meaning."""
    _, _, listed = inspect.cleandoc(model.__doc__ or "").partition("Attributes:\n")
    told = {name: field.description or "" for name, field in model.model_fields.items()}
    meanings = {
        name: " ".join((text[0].lower() + text[1:]).split()) for name, text in told.items() if text
    }
    names: list[str] = []
    for line in listed.splitlines():
        entry = _ATTRIBUTE.fullmatch(line)
        if entry:
            names = entry[1].split(", ")
            meanings |= dict.fromkeys(names, entry[2])
        elif line.strip():
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
    return meanings


def _sections(path: str, model: type[BaseModel]) -> Iterator[str]:
    """The section of `model`, which stands at `path` of the file, and those of what it holds."""
    summary = inspect.cleandoc(model.__doc__ or "").partition("Attributes:\n")[0].strip()
    meanings = attribute_meanings(model)
    properties = model.model_json_schema()["properties"]
    rows = [
        _row(path, model, name, properties[name], meanings[name]) for name in model.model_fields
    ]
    yield "\n".join([f"## {path or 'The file'}", "", summary, "", _HEADER, *rows, ""])
    for name, field in model.model_fields.items():
        held = _held_model(field.annotation)
        if held is not None and name == _first_with(held, model):
            yield from _sections(_place(path, name, field), held)


def _row(
    path: str, model: type[BaseModel], name: str, schema: Mapping[str, Any], meaning: str
) -> str:
    field = model.model_fields[name]
    held = _held_model(field.annotation)
    if held is None:
        kind = _type(schema)
    else:
        described = _first_with(held, model)
        place = _place(path, described, model.model_fields[described])
        kind = f"[{place}](#{re.sub(r'[^a-z_]', '', place.lower())})"
    cells = (f"`{name}`", kind, _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _first_with(held: type[BaseModel], model: type[BaseModel]) -> str:
    """The key of `model` whose section describes `held`; others that hold it refer to that."""
    fields = model.model_fields.items()
    return next(name for name, field in fields if _held_model(field.annotation) is held)


def _place(path: str, name: str, field: FieldInfo) -> str:
    """As errors write it, with NAME for a key of the user's own."""
    place = f"{path}.{name}" if path else name
    kinds = {"list[": "[]", "tuple[": "[]", "dict[": ".NAME"}
    return place + next((kinds[kind] for kind in kinds if kind in str(field.annotation)), "")


def _held_model(annotation: Any) -> type[BaseModel] | None:
    """The class of a section: the annotation itself, or what its tuple or mapping holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    held = (_held_model(argument) for argument in getattr(annotation, "__args__", ()))
    return next((model for model in held if model is not None), None)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None or value in ((), {}):
        return "none"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words: `whole number, at least 1`."""
    if "examples" in schema:  # a policy
        registered = ", ".join(f"`{value}`" for value in schema["examples"])
        return f"{registered} or `package.module:NAME`"
    if "anyOf" in schema:
        return " or ".join(
            _type(option) for option in schema["anyOf"] if option != {"type": "null"}
        )
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "array":
        if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])}, each a {_type(schema['prefixItems'][0])}"
        return f"list of {_type(schema['items'])}"
    names = {
        "integer": "whole number",
        "boolean": "`true` or `false`",
        "string": "text",
        "object": "mapping",
    }
    name = "path" if schema.get("format") == "path" else names.get(schema["type"], schema["type"])
    return ", ".join([name, *_bounds(schema)])


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and most is not None:
        yield f"{least} to {most}"
    elif least is not None:
        yield f"at least {least}"
    if "exclusiveMinimum" in schema:
        yield f"above {schema['exclusiveMinimum']}"


if __name__ == "__main__":
    print(configuration_reference(), end="")
