"""A discrete executor: it does what admission says, on a machine whose times are exact.

It builds views as the engine would, carries rows, KV and tokens, and notes when each token came.
Nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from specrouter.engine.admission_queue import AdmissionQueue
from specrouter.profile.batch_time import BatchTime
from specrouter.request.objective import Stage
from specrouter.request.pace import tpot_of_runs
from specrouter.slo.admission import Admission, Admit
from specrouter.view import EngineView
from tests.specrouter.predictions import ALL
from tests.specrouter.request.stage_ends import stage_ends
from tests.specrouter.slo.test_admission import KNOWN
from tests.specrouter.views import Entry, table


@dataclass(kw_only=True)
class Job:
    """A request, and what became of it. Output tokens are 0, 1, 2, ... by their place."""

    id: int
    arrived_ms: float
    prompt: int
    output: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    stages: tuple[Stage, ...] = ()
    row: int | None = None
    unread: int = 0
    is_declined: bool = False
    preemptions: int = 0
    gave_way: bool = False
    was_admitted: bool = False  # in the first of its lives, with an objective that it could attain
    came_ms: list[float] = field(default_factory=list)
    shown: Entry | None = None  # while it waits for its first token, nothing of it changes

    @property
    def admission_key(self) -> float:
        return self.arrived_ms

    @cached_property
    def has_objective(self) -> bool:
        asked = (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        return bool(self.stages) or any(each is not None for each in asked)

    @property
    def is_done(self) -> bool:
        return len(self.came_ms) >= self.output

    def needs(self) -> int:
        return self.prompt + self.output

    def stage_bounds(self) -> list[int]:
        """Tokens after which stages end; the last one is the output's end."""
        return [*stage_ends(self.stages, range(self.output)), self.output]

    def late_stages(self) -> list[float]:
        """Of TTFT and each stage: time over what was allowed."""
        found = []
        if self.ttft_ms is not None:
            found.append((self.came_ms[0] - self.arrived_ms) / self.ttft_ms)
        paces: list[float | None] = [stage.tpot_ms for stage in self.stages] or [self.tpot_ms]
        bounds = [1, *(self.stage_bounds() if self.stages else [self.output])]
        for pace, began, ended in zip(paces, bounds, bounds[1:], strict=False):
            if pace is not None and ended > began:
                took_ms = self.came_ms[ended - 1] - self.came_ms[began - 1]
                found.append(took_ms / (pace * (ended - began)))
        if self.e2e_ms is not None:
            found.append((self.came_ms[-1] - self.arrived_ms) / self.e2e_ms)
        return found

    def late_windows(self) -> list[float]:
        """Of every full run of ten tokens, where all stages have one pace."""
        if self.tpot_ms is None:
            return []
        times, counts = np.unique(self.came_ms, return_counts=True)
        commits = [(t / 1000.0, int(n)) for t, n in zip(times, counts, strict=True)]
        return [each / self.tpot_ms for each in tpot_of_runs(commits)]


@dataclass(kw_only=True)
class VirtualEngine:
    policy: Admit
    times: BatchTime
    rows: int = 1 << 20
    kv_tokens: int | None = None
    knows_windows: bool = True
    now_ms: float = 0.0
    cycles: int = 0
    running: dict[int, Job] = field(default_factory=dict)
    waiting: Any = field(default_factory=AdmissionQueue)

    def run(self, jobs: Sequence[Job]) -> None:
        """Until all have ended."""
        coming, at = sorted(jobs, key=lambda job: job.arrived_ms), 0
        while at < len(coming) or self.waiting or self.running:
            while at < len(coming) and coming[at].arrived_ms <= self.now_ms:
                coming[at].unread = coming[at].prompt
                self.waiting.push(coming[at])
                at += 1
            shown = self.waiting.shown()
            view = self.view(shown)
            took_ms = 0.0
            if len(view.running) or len(view.waiting):
                took_ms = self._step(self.policy(view), {job.id: job for job in shown})
            self.cycles += 1
            assert self.cycles < 1_000_000, "requests do not end"
            if took_ms:
                self.now_ms += took_ms
            elif at < len(coming):
                self.now_ms = coming[at].arrived_ms
            else:
                assert not self.waiting, "nothing runs, and requests wait"

    def view(self, shown: Sequence[Job]) -> EngineView:
        held = sum(job.needs() for job in self.running.values())
        return EngineView(
            cycle=self.cycles,
            now_s=self.now_ms / 1000.0,
            running=table([self._seen(job) for job in self.running.values()]),
            waiting=table([self._shown(job) for job in shown]),
            free_rows=self.rows - len(self.running),
            kv_free_tokens=None if self.kv_tokens is None else self.kv_tokens - held,
            available=ALL,
            loaded=ALL,
            performance=KNOWN,
        )

    def _shown(self, job: Job) -> Entry:
        if job.shown is None or job.came_ms:
            job.shown = self._seen(job)
        return job.shown

    def _seen(self, job: Job) -> Entry:
        came, done = job.came_ms, len(job.came_ms)
        began, stages, tpot_ms = min(1, done), job.stages, job.tpot_ms
        if stages:
            ended = [each for each in job.stage_bounds()[:-1] if each <= done]
            began, stages = (ended[-1] if ended else began), stages[len(ended) :]
            tpot_ms = stages[0].tpot_ms
        decoded = done - began
        run_began = began + decoded - decoded % 10
        return Entry(
            id=job.id,
            priority_key=job.arrived_ms,
            arrived_s=job.arrived_ms / 1000.0,
            kv_tokens=job.needs(),
            unread=max(0, job.unread - 1),
            remaining=job.output - done,
            max_new_tokens=job.output,
            row=job.row,
            decoded=decoded,
            decode_ms=self.now_ms - came[began - 1] if came else 0.0,
            tpot_ms=tpot_ms,
            ttft_ms=job.ttft_ms,
            e2e_ms=job.e2e_ms,
            stages=stages,
            run_ms=(self.now_ms - came[run_began - 1]) if came and self.knows_windows else None,
            output_tokens=job.output,
            declined=job.is_declined,
            awaits_first=job.row is not None and not came,
        )

    def _step(self, admission: Admission, waiting: Mapping[int, Job]) -> float:
        """Milliseconds that the batch takes; tokens come when it has ended."""
        for name in admission.preempted:
            job = self.running.pop(name)
            job.row, job.unread = None, job.prompt + len(job.came_ms)
            job.preemptions += 1
            self.waiting.push(job)
        for name in admission.declined:
            waiting[name].is_declined, waiting[name].shown = True, None
        rows = range(len(self.running) + len(admission.admitted))
        free = iter(sorted(set(rows) - self._rows_in_use()))
        for name in admission.admitted:
            job = waiting[name]
            self.waiting.remove(job)
            job.row = next(free)
            if not job.came_ms and name not in admission.declined and not job.is_declined:
                job.was_admitted = True
            self.running[name] = job
        assert len(self.running) <= self.rows, "admission goes beyond rows"
        if self.kv_tokens is not None:
            held = sum(job.needs() for job in self.running.values())
            assert held <= self.kv_tokens, "admission goes beyond memory"
        return self._execute(admission)

    def _rows_in_use(self) -> set[int]:
        return {job.row for job in self.running.values() if job.row is not None}

    def _execute(self, admission: Admission) -> float:
        tokens, gained = 0, set[int]()
        for job in self.running.values():
            if job.unread > 1:
                chunk = admission.chunks.get(job.id, 0)
                assert chunk <= job.unread, "more than the prompt has"
                tokens, job.unread = tokens + chunk, job.unread - chunk
                if not job.unread:
                    gained.add(job.id)
            elif job.id not in admission.paused:
                gained.add(job.id)
                tokens, job.unread = tokens + 1, 0
        if not tokens:
            return 0.0
        took_ms = self.times.ms(tokens)
        if admission.budget_ms is not None:
            assert took_ms <= admission.budget_ms + 1e-6, "the batch takes longer than planned"
        for name in gained:
            job = self.running[name]
            job.came_ms.append(self.now_ms + took_ms)
            if job.is_done:
                del self.running[name]
        return took_ms
