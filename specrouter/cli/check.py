"""`specrouter check`: is a configuration valid, and do its models fit this machine?

Contract: reads configurations, tokenizers and the headers of checkpoints, never weights. From a
`hub:` source that is not in the cache only these are downloaded; but a member with `inflate_to` is
downloaded and made, as when it is served. An invalid setting raises `ConfigError`; models that do
not fit are in the report. Memory is counted as in the device manager: weights, and a KV store for
each model, which is allocated as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from modelpool import ModelPool
from modelpool.config import ModelConfig
from modelpool.device_manager import DeviceInfo, bytes_by_device, read_devices
from modelpool.drafters import Candidate, picked, read_bytes
from modelpool.errors import DoesNotFitError
from modelpool.families import family_of
from modelpool.member import Member
from modelpool.progress import LoadProgress
from specrouter.bench.conditions import request_limit
from specrouter.config import TREE_SLOTS, EngineConfig, RouterConfig, ServerConfig, slos_by_class
from specrouter.http.keys import network_warnings
from specrouter.http.serve import check_server
from specrouter.request.chat_template import ChatTemplate
from specrouter.routing.scheduler import ModelChainScheduler
from statemgr import row_tokens

_MIB = 2**20
_ROOMY = 2**60  # bytes; stands for unlimited memory in the figures of a pool that does not fit


ReadSpeed = Callable[[int], float]  # bytes/s of the memory, by number of threads
_PAIRS_HEADER = ("drafter", "parameters", "reads", "ms", "of target", "")


@dataclass(frozen=True)
class WeightReads:
    """Bytes of weights that a forward of one token reads.

    `bound_tokens_per_s` is the most tokens per second of one request without speculation, if only
    these reads took time; None if the memory's speed is unknown.
    """

    bytes: int
    bound_tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """A model, its place, and the memory it takes there.

    Attributes:
        threads: CPU threads; None on other devices.
        attention: the attention kernels.
        weights: format of the weights of its linear layers ("plain", "int8", "int4").
        reads: reads in the present format.
        reads_in_int8, reads_in_int4: reads in these formats; None if unknown or not possible.
    """

    name: str
    role: Literal["target", "draft"]
    devices: tuple[str, ...]
    dtype: str
    threads: int | None
    attention: str
    parameters: int
    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    bytes_by_device: Mapping[str, int]
    weights: str
    reads: WeightReads | None
    reads_in_int8: WeightReads | None
    reads_in_int4: WeightReads | None


@dataclass(frozen=True)
class DeviceReport:
    """A device's memory.

    `usable_bytes` is the memory that is free now, less a headroom; `needed_bytes` that of all
    models.
    """

    name: str
    needed_bytes: int
    usable_bytes: int
    total_bytes: int

    @property
    def is_too_small(self) -> bool:
        return self.needed_bytes > self.usable_bytes


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """A report of what would be served; `problems` say what does not fit and what would help.

    `kv_tokens` is the number of slots of each model's KV store, for requests' tokens and their
    trees.
    """

    target: str
    max_requests: int
    max_request_tokens: int
    kv_tokens: int
    members: tuple[MemberReport, ...]
    draft_only: tuple[str, ...]
    devices: tuple[DeviceReport, ...]
    slo_classes: Mapping[str, Mapping[str, Any]]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {"status": "ok" if self.fits else "does_not_fit", **asdict(self)}

    def to_text(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: CheckReport) -> Iterator[str]:
    yield (
        f"{report.target} serves up to {report.max_requests} requests of up to "
        f"{report.max_request_tokens} tokens; KV of {report.kv_tokens} tokens per model, trees "
        "included."
    )
    yield ""
    yield from _table(
        [
            *("model", "role", "device", "computes in", "threads", "attention"),
            *("parameters", "weights", "KV"),
        ],
        [_member_cells(member) for member in report.members],
    )
    for name in report.draft_only:
        yield f"{name}: drafts from the text itself, and takes nothing"
    yield ""
    yield from _table(
        ["device", "needed", "usable", "total"],
        [
            [d.name, *map(shown_bytes, (d.needed_bytes, d.usable_bytes, d.total_bytes))]
            for d in report.devices
        ],
    )
    yield ""
    yield "What a token reads of the weights, and the tokens/s of one request that memory permits:"
    yield from _table(
        ["model", "weights", "reads", "permits", "int8 reads", "permits", "int4 reads", "permits"],
        [_read_cells(member) for member in report.members],
    )
    yield ""
    for name, objectives in report.slo_classes.items():
        yield f"class {name}: {json.dumps(objectives)}"
    yield from (f"warning: {warning}" for warning in report.warnings)
    yield from (f"does not fit: {problem}" for problem in report.problems)
    if report.fits:
        yield "The configuration is valid, and its models fit."


def _member_cells(member: MemberReport) -> list[str]:
    return [
        member.name,
        member.role,
        ", ".join(member.devices),
        member.dtype,
        "-" if member.threads is None else str(member.threads),
        member.attention,
        f"{member.parameters / 1e6:.1f}M",
        shown_bytes(member.weight_bytes),
        shown_bytes(member.kv_bytes),
    ]


def _read_cells(member: MemberReport) -> list[str]:
    reads = (member.reads, member.reads_in_int8, member.reads_in_int4)
    return [member.name, member.weights, *(cell for each in reads for cell in _shown_reads(each))]


def _shown_reads(reads: WeightReads | None) -> tuple[str, str]:
    if reads is None:
        return "-", "-"
    bound = reads.bound_tokens_per_s
    return shown_bytes(reads.bytes), "-" if bound is None else f"{bound:.0f}/s"


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()
) -> Iterator[str]:
    """Yield lines of aligned columns; those with indices in `right` are right-aligned."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def shown_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / _MIB:.1f} MiB"


def check_config(
    config: RouterConfig,
    devices: Sequence[DeviceInfo] | None = None,
    read_speed: ReadSpeed | None = None,
    progress: LoadProgress | None = None,
) -> CheckReport:
    """Check a configuration, and return the report.

    Args:
        config: the configuration.
        devices: devices to place models on; this machine's by default.
        read_speed: measures the CPU memory's read speed; without it the report has no such bounds.
        progress: gets what is downloaded or made.

    Raises:
        ConfigError: names the setting that cannot be served.
    """
    check_server(config.server)
    found = tuple(read_devices() if devices is None else devices)
    if config.cluster is not None and config.cluster.address == "local":
        return _of_replicas(config, found, read_speed, progress)
    pool, too_large = _pool(config, found, progress)
    slos_by_class(config.slo_classes, pool.tokenizer)  # checks the ends of their stages
    server = config.server
    ChatTemplate(pool.tokenizer, server.chat_template, server.literal_user_text)  # checks it
    speed = None if read_speed is None else cache(read_speed)  # once for each number of threads
    members = tuple(
        _member(model, pool, speed)
        for model in config.pool.models
        if model.name in pool.names and model.has_model
    )
    reports = tuple(_device(device, members) for device in found)
    return CheckReport(
        target=pool.target,
        max_requests=config.engine.max_requests,
        max_request_tokens=request_limit(config, pool),
        kv_tokens=pool.kv_tokens,
        members=members,
        draft_only=pool.draft_only,
        devices=reports,
        slo_classes={
            name: one.model_dump(mode="json", exclude_defaults=True)
            for name, one in config.slo_classes.items()
        },
        problems=_problems(too_large, reports, members, config.engine, pool.longest_sequence),
        warnings=(
            *config.warnings,
            *_pool_warnings(config, pool, members, _drafters_without_room(config, pool)),
            *_server_warnings(config.server, pool),
        ),
    )


def _of_replicas(
    config: RouterConfig,
    devices: Sequence[DeviceInfo],
    read_speed: ReadSpeed | None,
    progress: LoadProgress | None,
) -> CheckReport:
    """Return the report of all replicas on one machine, with the sum of their memory."""
    configs = config.replicas()
    distinct = {id(own): own for own in configs.values()}
    found = {key: check_config(own, devices, read_speed, progress) for key, own in distinct.items()}
    reports = {name: found[id(own)] for name, own in configs.items()}
    members = tuple(
        replace(member, name=f"{name}/{member.name}")
        for name, report in reports.items()
        for member in report.members
    )
    sums = tuple(_device(device, members) for device in devices)
    problems = [problem for report in found.values() for problem in report.problems] or [
        f"{one.name} has {shown_bytes(one.usable_bytes)} to give and all replicas together need "
        f"{shown_bytes(one.needed_bytes)}; choose fewer replicas, or less KV in each"
        for one in sums
        if one.is_too_small
    ]
    return replace(
        next(iter(found.values())),
        max_requests=sum(report.max_requests for report in reports.values()),
        max_request_tokens=min(report.max_request_tokens for report in found.values()),
        members=members,
        devices=sums,
        problems=tuple(problems),
        warnings=tuple(dict.fromkeys(one for report in found.values() for one in report.warnings)),
    )


def _pool(
    config: RouterConfig, devices: Sequence[DeviceInfo], progress: LoadProgress | None
) -> tuple[ModelPool, DoesNotFitError | None]:
    """Return the pool; if the target fits nowhere, placed with unlimited memory, and the error."""
    pool = partial(
        ModelPool,
        config.pool,
        kv_tokens=config.engine.kv_limit or config.engine.kv_tokens,
        row_states=config.engine.row_states,
        headers_only=True,
        progress=progress,
    )
    try:
        return pool(devices=devices), None
    except DoesNotFitError as error:
        return pool(devices=[replace(device, free_bytes=_ROOMY) for device in devices]), error


def _drafters_without_room(config: RouterConfig, pool: ModelPool) -> tuple[str, ...]:
    """Return the policy's drafters that never fit beside the target within the pool's limits.

    Raises `ConfigError` for a configured chain that they leave no room for.
    """
    parameters = {name: pool.parameter_count(name) for name in pool.names}
    scheduler = partial(ModelChainScheduler, config.scheduler, pool.names, parameters, pool.target)
    left = scheduler(fit_together=pool.fit_together).drafters
    return tuple(name for name in scheduler().drafters if name not in left)


def _member(model: ModelConfig, pool: ModelPool, read_speed: ReadSpeed | None) -> MemberReport:
    plan = pool.plan(model.name)
    footprint, kv_tokens = plan.footprint, pool.kv_tokens
    taken = bytes_by_device(plan.placement, footprint, kv_tokens)
    speed = None
    if plan.threads is not None and read_speed is not None:
        speed = read_speed(plan.threads)

    def reads(count: int | None) -> WeightReads | None:
        return None if count is None else WeightReads(count, speed and speed / count)

    return MemberReport(
        name=model.name,
        role="target" if model.name == pool.target else "draft",
        devices=tuple(taken),
        dtype=plan.dtype,
        threads=plan.threads,
        attention=plan.attention.name,
        parameters=footprint.parameter_count,
        weight_bytes=footprint.weight_bytes,
        kv_bytes=footprint.row_bytes(kv_tokens),
        kv_bytes_per_token=footprint.kv_bytes_per_token,
        bytes_by_device=taken,
        weights=plan.weights,
        reads=reads(plan.read_bytes),
        reads_in_int8=reads(plan.int8_read_bytes),
        reads_in_int4=reads(plan.int4_read_bytes),
    )


def _device(device: DeviceInfo, members: Iterable[MemberReport]) -> DeviceReport:
    needed = sum(member.bytes_by_device.get(device.name, 0) for member in members)
    return DeviceReport(device.name, needed, device.usable_bytes, device.total_bytes)


def _problems(
    too_large: DoesNotFitError | None,
    devices: Sequence[DeviceReport],
    members: Sequence[MemberReport],
    engine: EngineConfig,
    longest: int,
) -> tuple[str, ...]:
    problems = [
        f"{device.name} has {shown_bytes(device.usable_bytes)} to give and "
        f"{shown_bytes(device.needed_bytes)} are needed: "
        f"{_advice(device, members, engine, longest)}"
        for device in devices
        if device.is_too_small
    ]
    return tuple(problems or ([str(too_large)] if too_large else []))


def _advice(
    device: DeviceReport, members: Sequence[MemberReport], engine: EngineConfig, longest: int
) -> str:
    """Return changes that would make the device large enough."""
    here = [member for member in members if device.name in member.bytes_by_device]
    per_token = sum(_share(member, device) * member.kv_bytes_per_token for member in here)
    weights = sum(_share(member, device) * member.weight_bytes for member in here)
    others = "a smaller dtype, or fewer or smaller models"
    tokens = int((device.usable_bytes - weights) / per_token) if per_token else 0
    if tokens < 2:
        return f"the weights alone leave no room for KV; choose {others}"
    if engine.kv_memory is not None:
        whole = int(tokens * per_token / _MIB)
        return f"{tokens} tokens of KV fit, so set engine.kv_memory: {whole}MiB"
    requests = tokens // engine.row_slots(longest)
    length = row_tokens(tokens // engine.max_requests, TREE_SLOTS)
    ways = []
    if requests >= 1:
        ways.append(f"engine.max_requests: {requests}")
    if length >= 2:
        ways.append(f"engine.max_model_len: {length}")
    return f"{tokens} tokens of KV fit, so set {', or '.join([*ways, others])}"


def _share(member: MemberReport, device: DeviceReport) -> float:
    """Return the device's share of a model that is spread over several devices."""
    return member.bytes_by_device[device.name] / max(sum(member.bytes_by_device.values()), 1)


def _pool_warnings(
    config: RouterConfig,
    pool: ModelPool,
    members: Sequence[MemberReport],
    unusable: Collection[str],
) -> Iterator[str]:
    for name, reason in pool.left_out.items():
        yield f"{name!r} is left out: {reason}"
    if config.cluster is not None:
        yield "cluster.address: replicas may be elsewhere; memory is that of one engine here"
    for member in members:
        for warning in (pool.placement(member.name).warning, pool.plan(member.name).warning):
            if warning:
                yield warning
    engine = config.engine
    shortest = min(pool.names, key=pool.max_positions)
    longest = pool.max_positions(shortest)
    if engine.max_model_len is not None and longest < engine.max_model_len:
        yield (
            f"engine.max_model_len: {shortest!r} ends at {longest} tokens, and so do all requests"
        )
    budget, asked = engine.kv_budget_tokens, engine.max_request_tokens(longest, pool.kv_tokens)
    if budget is not None and budget < asked:
        yield f"engine.kv_budget_tokens: requests of more than {budget} tokens are always refused"
    room = row_tokens(pool.kv_tokens, TREE_SLOTS)
    if engine.kv_memory is not None and room < asked:
        yield f"engine.kv_memory: requests of more than {room} tokens are always refused"
    limits = ("max_loaded_models", "memory_limit_mb")
    limit = " and ".join(f"pool.{n}" for n in limits if getattr(config.pool, n) is not None)
    for name in unusable:
        yield f"{limit}: {name!r} has no room beside the target and what is pinned: it never drafts"
    limit_mb = config.pool.memory_limit_mb
    needed = sum(m.weight_bytes + m.kv_bytes for m in members if m.name not in unusable)
    if limit_mb is not None and needed > limit_mb * _MIB:
        yield (
            f"pool.memory_limit_mb: the models take {shown_bytes(needed)}, so idle ones are "
            "evicted, and loaded again when they are wanted"
        )


def _server_warnings(server: ServerConfig, pool: ModelPool) -> Iterator[str]:
    yield from network_warnings(server)
    if server.chat_template is None and not getattr(pool.tokenizer, "chat_template", None):
        yield (
            "server.chat_template: the target's tokenizer has no template, so it reads "
            "conversations as plain transcripts"
        )


def shown_pairs(target: Member, found: Sequence[Candidate], speed: float) -> str:
    """Return the table of `specrouter pairs`; `speed` is the CPU's memory speed in bytes/s."""
    taken, own = picked(found), read_bytes(target)
    rows = [
        (target.config.name, *_costs(target.facts.parameter_count, own, speed), "", "target"),
    ]
    for one in found:
        verdict = "fits" if one.refusal is None else f"no: {one.refusal}"
        share = "" if one.share is None else f"{one.share:.0%}"
        said = f"{verdict}; --draft auto takes it" if one is taken else verdict
        rows.append((one.name, *_costs(one.parameters, one.read_bytes, speed), share, said))
    lines = [*_table(_PAIRS_HEADER, rows, right=range(1, len(_PAIRS_HEADER) - 1))]
    lines.append(f"ms: of a token, by the {speed / 1e9:.1f} GB/s at which this CPU reads memory")
    if taken is None:
        lines.append("--draft auto takes ngram alone")
    return "\n".join([*lines, *_siblings(target, found)])


def _costs(parameters: int | None, read: int | None, speed: float) -> tuple[str, str, str]:
    if parameters is None or read is None:
        return "", "", ""
    return f"{parameters / 1e6:,.1f}M", f"{read / 1e6:,.1f} MB", f"{read / speed * 1000:.2f}"


def _siblings(target: Member, found: Sequence[Candidate]) -> list[str]:
    """Return a line with the target's smaller family members that are not on this machine."""
    name = target.config.name
    family = family_of(name)
    if family is None:
        return []
    here = {one.name for one in found}
    missing = [one for one in family.smaller_than(name) if one not in here]
    return [f"not here, of {family.name}: {', '.join(missing)}"] if missing else []
