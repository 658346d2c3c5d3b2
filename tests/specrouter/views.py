"""Views of an engine and of its requests, usual but for what a test says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from specrouter.cycle import Bools, Floats, Ints
from specrouter.request.objective import Stage
from specrouter.request.spec import SpeculationOverride
from specrouter.view import EngineView, RequestTable
from tests.specrouter.predictions import ALL, snapshot

_DTYPES: Mapping[Any, Any] = {Ints: np.int64, Floats: np.float64, Bools: np.bool_}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One request of a table: it decodes, and asks for nothing. None stands for NaN, or no row."""

    id: int
    row: int | None = None
    priority_key: float = 0.0
    arrived_s: float = 0.0
    kv_tokens: int = 256
    unread: int = 0
    unread_by: Mapping[str, int] = field(default_factory=dict)
    remaining: int = 64
    max_new_tokens: int = 128
    decoded: int = 0
    decode_ms: float = 0.0
    repeatable: int = 0
    slots: int = 0
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None
    implied_ttft_ms: float | None = None
    run_ms: float | None = None
    output_tokens: float | None = None
    stages: tuple[Stage, ...] = ()
    sampled: bool = True
    declined: bool = False
    rejects: bool = False
    promised: bool = False
    awaits_first: bool = False
    drafts: int = 0
    acceptance: float = 0.0
    override: SpeculationOverride = None

    def column(self, name: str) -> Any:
        """Return what the column of this name has for the request."""
        stage = self.stages[0] if self.stages else None
        of_stages = {
            "row": -1 if self.row is None else self.row,
            "tpot_ms": stage.tpot_ms if stage else self.tpot_ms,
            "tightest_ms": min((one.tpot_ms for one in self.stages), default=self.tpot_ms),
            "until_tokens": stage.until_tokens if stage else None,
            "has_stages": bool(stage),
        }
        return of_stages[name] if name in of_stages else getattr(self, name)


def table(entries: Sequence[Entry]) -> RequestTable:
    models = dict.fromkeys(name for one in entries for name in one.unread_by)
    columns: dict[str, Any] = {}
    for one in fields(RequestTable):
        if one.name == "unread_by":
            continue
        values = [entry.column(one.name) for entry in entries]
        columns[one.name] = np.empty(len(entries), dtype=_DTYPES.get(one.type, np.object_))
        columns[one.name][:] = values
    by = {
        name: np.array([one.unread_by.get(name, 0) for one in entries], dtype=np.int64)
        for name in models
    }
    return RequestTable(unread_by=by, **columns)


def entries_of(requests: RequestTable) -> list[Entry]:
    """The requests one by one; objectives with stages are those of the current stage."""
    found = []
    for place in range(len(requests)):
        by = {name: int(column[place]) for name, column in requests.unread_by.items()}
        values = {
            one.name: getattr(requests, one.name)[place]
            for one in fields(Entry)
            if one.name not in ("unread_by", "stages")
        }
        values = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in values.items()
        }
        values = {name: None if value != value else value for name, value in values.items()}
        values["row"] = None if values["row"] < 0 else values["row"]
        found.append(Entry(unread_by=by, **values))
    return found


def by_row(view: EngineView) -> dict[int | None, Entry]:
    return {one.row: one for one in entries_of(view.running.by_row())}


def request_view(number: int, **given: Any) -> Entry:
    """Of a request that decodes."""
    return Entry(id=number, **given)


def engine_view(
    running: Sequence[Entry] = (), waiting: Sequence[Entry] = (), **given: Any
) -> EngineView:
    """Of no requests; all models that are available are loaded."""
    usual: dict[str, Any] = {"cycle": 0, "now_s": 0.0, "free_rows": 0}
    available = given.get("available", ALL)
    usual |= {"kv_free_tokens": None, "available": available, "loaded": available}
    usual |= {"performance": snapshot({}), "running": table(running), "waiting": table(waiting)}
    return EngineView(**{**usual, **given})
