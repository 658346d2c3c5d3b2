"""`specrouter check`: is a configuration valid, and do its models fit this machine?

Contract: reads configurations, tokenizers and the headers of checkpoints, never weights. Of a
`hub:` source that is not in the cache only these are downloaded; but a member with `inflate_to` is
downloaded and made, as when it is served. What is invalid raises `ConfigError`; what does not fit
is in the report. Memory is counted as the device manager does: weights, and for each model a KV
store, which is taken as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from modelpool import ModelPool
from modelpool.config import ModelConfig
from modelpool.device_manager import DeviceInfo, bytes_by_device, read_devices
from modelpool.errors import DoesNotFitError
from modelpool.progress import LoadProgress
from specrouter.bench.conditions import request_limit
from specrouter.cli.check_report import (
    CheckReport,
    DeviceReport,
    MemberReport,
    WeightReads,
    shown_bytes,
)
from specrouter.config import TREE_SLOTS, EngineConfig, RouterConfig, ServerConfig, slos_by_class
from specrouter.http.keys import network_warnings
from specrouter.http.serve import check_server
from specrouter.request.chat_template import ChatTemplate
from specrouter.routing.scheduler import ModelChainScheduler
from statemgr import row_tokens

_MIB = 2**20
_ROOMY = 2**60  # bytes; for the figures of a pool that does not fit


ReadSpeed = Callable[[int], float]  # of memory, in bytes/s, with so many threads


def check_config(
    config: RouterConfig,
    devices: Sequence[DeviceInfo] | None = None,
    read_speed: ReadSpeed | None = None,
    progress: LoadProgress | None = None,
) -> CheckReport:
    """
    Args:
        devices: what to place on; by default this machine's devices.
        read_speed: of the CPU's memory; without it nothing is said of what that permits.
        progress: told what is downloaded or made.

    Raises:
        ConfigError: names the setting that cannot be served.
    """
    check_server(config.server)
    found = tuple(read_devices() if devices is None else devices)
    if config.cluster is not None and config.cluster.address == "local":
        return _of_replicas(config, found, read_speed, progress)
    pool, too_large = _pool(config, found, progress)
    slos_by_class(config.slo_classes, pool.tokenizer)  # the ends of their stages
    ChatTemplate(pool.tokenizer, config.server.chat_template)  # tried out
    members = _members(config, pool, read_speed)
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
    """Of all replicas on one machine, where what they take adds up."""
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
    """The pool; where the target fits nowhere, as it would be placed with room for everything."""
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
    """Those of the policy's choice that the pool's limits never let in beside the target.

    Raises `ConfigError` for a configured chain that they leave no room for.
    """
    parameters = {name: pool.parameter_count(name) for name in pool.names}
    scheduler = partial(ModelChainScheduler, config.scheduler, pool.names, parameters, pool.target)
    left = scheduler(fit_together=pool.fit_together).drafters
    return tuple(name for name in scheduler().drafters if name not in left)


def _members(
    config: RouterConfig, pool: ModelPool, read_speed: ReadSpeed | None
) -> tuple[MemberReport, ...]:
    """Memory is measured once for each number of threads."""
    speed = None if read_speed is None else cache(read_speed)
    models = [model for model in config.pool.models if model.name in pool.names]
    models = [model for model in models if model.has_model]
    return tuple(_member(model, pool, speed) for model in models)


def _member(model: ModelConfig, pool: ModelPool, read_speed: ReadSpeed | None) -> MemberReport:
    plan = pool.plan(model.name)
    footprint, kv_tokens = plan.footprint, pool.kv_tokens
    taken = bytes_by_device(plan.placement, footprint, kv_tokens)
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
        reads=_reads(plan.read_bytes, plan.threads, read_speed),
        reads_in_int8=_reads(plan.int8_read_bytes, plan.threads, read_speed),
        reads_in_int4=_reads(plan.int4_read_bytes, plan.threads, read_speed),
    )


def _reads(
    count: int | None, threads: int | None, read_speed: ReadSpeed | None
) -> WeightReads | None:
    """`threads`: of the CPU; None elsewhere."""
    if count is None:
        return None
    if threads is None or read_speed is None:
        return WeightReads(count, None)
    return WeightReads(count, read_speed(threads) / count)


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
    """What to change so that the device is large enough."""
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
    """Of a model that is spread over several devices."""
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
