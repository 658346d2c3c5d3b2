"""CheckReport: what `specrouter check` found, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import starmap
from typing import Any, Literal

_MIB = 2**20


@dataclass(frozen=True)
class WeightReads:
    """What a forward of one token reads of the weights.

    `bound_tokens_per_s`: of one request without speculation, if nothing but these reads took time;
    None where the memory's speed is not known.
    """

    bytes: int
    bound_tokens_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """A model: its place, and what it takes there.

    `threads`: of the CPU; None elsewhere. `attention`: the kernels that attend. `weights`: how its
    linear layers keep theirs ("plain", "int8", "int4"). `reads`: as they are, `reads_in_int8` and
    `reads_in_int4`: as they would be; None where it is not known, or cannot be had.
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
    """`usable_bytes`: what is free now, less a headroom; `needed_bytes`: of all models together."""

    name: str
    needed_bytes: int
    usable_bytes: int
    total_bytes: int

    @property
    def is_too_small(self) -> bool:
        return self.needed_bytes > self.usable_bytes


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What would be served, with what. `problems` say what does not fit and what would help.

    `kv_tokens`: slots of each model's KV store, for the tokens of requests and their trees.
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
        ["model", "role", "device", "dtype", "threads", "attention", "parameters", "weights", "KV"],
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
        yield f"class {name}: {', '.join(starmap(_shown_objective, objectives.items()))}"
    yield from (f"warning: {warning}" for warning in report.warnings)
    yield from (f"does not fit: {problem}" for problem in report.problems)
    if report.fits:
        yield "The configuration is valid, and its models fit."


def _shown_objective(key: str, value: Any) -> str:
    if key == "stages":
        return f"stages of {' and '.join(map(_shown_stage, value))}"
    return f"{key} {value:g}" if isinstance(value, int | float) else f"{key} {value}"


def _shown_stage(stage: Mapping[str, Any]) -> str:
    end = "".join(f" {key} {value!r}" for key, value in stage.items() if key != "tpot_ms")
    return f"tpot_ms {stage['tpot_ms']:g}{end}"


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


def _table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, *rows]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def shown_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / _MIB:.1f} MiB"
