"""One streaming multiprocessor that issues in order: warps on four schedulers, pipes, scoreboards, products, copies,
barriers.

A warp issues an instruction when the stall of the one before is over, the scoreboards that it waits for are free, its
scheduler and its pipe take it, and what it waits for beyond them (products, copies, other warps) has come. Of the warps
of a scheduler that could issue, the one that issued last goes on, else the youngest (Huerta et al., "Analyzing Modern
NVIDIA GPU cores", arXiv 2503.20481). Bank conflicts and misses of the instruction cache are not modelled. Waits for
copies are too long: beside an H100 (`measured` in benchmarks/results/gpu-model.json), causal tiles of two stages are 2
to 12 % slower here than tiles of more. Spilled registers cost more there than here, where they are found in L1: the two
tiles of dkv with the most spills are a quarter faster here than the others.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .machine import Gpu
from .steps import Step

SCHEDULERS = 4
PIPES = ("alu", "mufu", "uniform", "matrix", "heavy", "lite")
EPSILON = 1e-6
MOST = 3_000_000  # events, beyond which a run is taken for one that never ends


@dataclass(frozen=True)
class Role:
    """The warps of a block that run the same program: `parts` are steps, each with how often they are repeated."""

    warps: int
    parts: tuple[tuple[Sequence[Step], int], ...]


@dataclass(frozen=True)
class Run:
    """The outcome of a simulation: cycles until the last warp ended, for every warp the cycle at the end of each
    repetition, cycles by what warps waited for, and bytes read from L2 and beyond."""

    cycles: float
    marks: tuple[tuple[float, ...], ...]
    waits: dict[str, float]
    bytes: float
    finished: tuple[float, ...] = ()

    def period(self, warm: int) -> float:
        """Cycles for a repetition of every warp: those of the time in which all warps are past the first `warm`
        repetitions and none has ended, over the mean of what is repeated in it. Blocks may overtake one another."""
        marks = [m for m in self.marks if len(m) > warm + 1]
        begin, end = max(m[warm] for m in marks), min(m[-1] for m in marks)
        if end <= begin:  # blocks one after another: their whole time
            begin, end = 0.0, max(m[-1] for m in marks)
        return (end - begin) * len(marks) / sum(_turns(m, end) - _turns(m, begin) for m in marks)


def _turns(marks: tuple[float, ...], t: float) -> float:
    """Repetitions until `t`, the part of one too."""
    i = bisect_right(marks, t)
    if i == len(marks):
        return float(i)
    before = marks[i - 1] if i else 0.0
    return i + (t - before) / (marks[i] - before)


class DeadlockError(RuntimeError):
    """Warps that wait for one another, or for what nobody brings."""


class Warp:
    """The state of one warp."""

    def __init__(self, number: int, block: int, role: Role, role_number: int, place: int) -> None:
        self.number, self.block = number, block
        self.leads = place == 0  # the warp that does what one warp of a role does for all
        self.group, self.mates = (role_number, place // 4), min(4, role.warps - place // 4 * 4)
        self.parts = [p for p in role.parts if p[1] and p[0]]
        self.scheduler = number % SCHEDULERS
        self.part = self.at = self.turn = 0
        self.steps: Sequence[Step] = self.parts[0][0] if self.parts else ()
        self.free = [0.0] * 8  # of scoreboards
        self.owner = [""] * 8
        self.groups: list[list[float]] = [[] for _ in range(8)]  # of copies, by scoreboard
        self.newest = 0.0  # of copies not yet in a group
        self.starts: list[float] = []  # of the newest products
        self.pending: list[float] = []  # groups of products
        self.passed: Counter[Any] = Counter()  # phases of barriers asked or posted
        self.marks: list[float] = []


def simulate(gpu: Gpu, roles: Sequence[Role], blocks: int = 1) -> Run:
    """Play `blocks` equal blocks side by side until all warps have ended."""
    return _Sm(gpu, roles, blocks).run()


class _Sm:
    """The state of the SM. Each kind of step has a method `_kind(t, w, s)`, which issues step `s` of warp `w` at cycle
    `t` and gives the cycle at which the warp may go on, or None where another warp wakes it."""

    def __init__(self, gpu: Gpu, roles: Sequence[Role], blocks: int) -> None:
        self.gpu, self.warps = gpu, []
        for block in range(blocks):
            for number, role in enumerate(roles):
                for place in range(role.warps):
                    self.warps.append(Warp(len(self.warps), block, role, number, place))
        self.width = sum(role.warps for role in roles)  # warps of a block
        # the warps that post to a barrier, in phases of one each
        self.posters = _posters(roles)
        self.copiers = _copiers(roles)
        self.issue = [0.0] * SCHEDULERS
        self.pipes = [dict.fromkeys(PIPES, 0.0) for _ in range(SCHEDULERS)]
        self.port = self.unit = self.l2 = self.l2_port = 0.0  # of shared memory, of the load/store unit, of L2
        self.bytes = 0.0
        self.waits: defaultdict[str, float] = defaultdict(float)
        self.meet: dict[Any, list[tuple[float, Warp]]] = {}
        self.signals: Counter[Any] = Counter()
        self.phases: defaultdict[Any, list[float]] = defaultdict(list)  # when each phase was complete
        self.open: dict[Any, list[float]] = {}  # barrier -> posts left, copies left, time
        self.sleepers: defaultdict[Any, list[tuple[float, Warp]]] = defaultdict(list)
        self.heap: list[tuple[float, int, int]] = []  # time, 0 after issue and 1 after a wait, the younger warp first
        self.done: list[float] = [0.0] * len(self.warps)

    def run(self) -> Run:
        heap = self.heap
        for w in self.warps:
            if w.parts:
                heapq.heappush(heap, (0.0, 1, -w.number))
        events, warps, play = 0, self.warps, self.play
        while heap:
            t, _, number = heapq.heappop(heap)
            w = warps[-number]
            at, turn, part = w.at, w.turn, w.part
            again = play(t, w)
            if again is not None:
                heapq.heappush(heap, (again, int((at, turn, part) == (w.at, w.turn, w.part)), number))
            events += 1
            if events > MOST:
                raise DeadlockError(f"no end after {events} events")
        if asleep := [x for x in (self.meet, self.sleepers) if any(x.values())]:
            names = ", ".join(str(key) for x in asleep for key, those in x.items() if those)
            raise DeadlockError(f"warps wait for ever at {names}")
        marks = tuple(tuple(w.marks) for w in warps)
        return Run(max(self.done), marks, dict(self.waits), self.bytes, tuple(self.done))

    def play(self, t: float, w: Warp) -> float | None:
        """Issue the next step of a warp, or say when to ask again; None where another warp will wake it."""
        s = w.steps[w.at]
        for i in s.wait:
            if w.free[i] > t + EPSILON:
                self.waits[w.owner[i]] += w.free[i] - t
                return w.free[i]
        issue = self.issue[w.scheduler]
        if issue > t + EPSILON:
            self.waits["issue"] += issue - t
            return issue
        return getattr(self, "_" + s.kind)(t, w, s)  # type: ignore[no-any-return]

    def go(self, t: float, w: Warp, s: Step, done: float | None = None, read: float | None = None) -> float | None:
        """Issue at `t`; `done` is when the scoreboard for the result is free, `read` that for the operands."""
        self.issue[w.scheduler] = t + 1
        if s.write < 6 and done is not None and done > w.free[s.write]:
            w.free[s.write], w.owner[s.write] = done, s.name
        if s.read < 6:
            until = done if read is None and done is not None else read or t
            if until > w.free[s.read]:
                w.free[s.read], w.owner[s.read] = until, s.name
        return self.advance(t + s.stall, w)

    def advance(self, t: float, w: Warp) -> float | None:
        """Set a warp to its next step, from `t` on; None at its end."""
        w.at += 1
        if w.at == len(w.steps):
            w.at = 0
            w.marks.append(t)
            w.turn += 1
            if w.turn == w.parts[w.part][1]:
                w.turn = 0
                w.part += 1
                if w.part == len(w.parts):
                    self.done[w.number] = t
                    return None
                w.steps = w.parts[w.part][0]
        return t

    def busy(self, reason: str, t: float, until: float) -> float:
        """Note a wait, whose end is when to ask again."""
        self.waits[reason] += until - t
        return until

    # -- kinds of steps -----------------------------------------------------------------------------------

    def _pipe(self, t: float, w: Warp, s: Step) -> float | None:
        name = s.pipe
        if name:
            pipes = self.pipes[w.scheduler]
            if name == "fma":
                name = "lite" if pipes["lite"] <= pipes["heavy"] else "heavy"
            if pipes[name] > t + EPSILON:
                return self.busy(s.name, t, pipes[name])
            pipes[name] = t + s.occupied
        return self.go(t, w, s, t + s.latency)

    def _shared(self, t: float, w: Warp, s: Step) -> float | None:
        if self.unit > t + self.gpu.memory_queue:
            return self.busy("load/store unit", t, self.unit - self.gpu.memory_queue + 1)
        took = s.amount / self.gpu.shared_rate
        self.unit = max(t, self.unit) + took
        if s.name != "SHFL":
            self.port = max(self.port, t) + took
        return self.go(t, w, s, self.unit + s.latency, self.unit + 4)

    def _global(self, t: float, w: Warp, s: Step) -> float | None:
        if self.unit > t + self.gpu.memory_queue:
            return self.busy("load/store unit", t, self.unit - self.gpu.memory_queue + 1)
        self.unit = max(t, self.unit) + max(1.0, s.amount / self.gpu.shared_rate)
        return self.go(t, w, s, self.fetched(self.unit, s.amount) + s.latency, self.unit + 4)

    def fetched(self, t: float, amount: float) -> float:
        """When so many bytes have come over the way to L2, without its latency: at the rate of its port, and no more
        than a burst ahead of what all SMs together leave to each."""
        gpu = self.gpu
        self.l2_port = max(t, self.l2_port) + amount / gpu.l2_port
        self.l2 = max(t, self.l2) + amount / gpu.l2_rate
        self.bytes += amount
        return max(self.l2_port, self.l2 - gpu.l2_burst / gpu.l2_rate)

    def _copy(self, t: float, w: Warp, s: Step) -> float | None:
        if self.unit > t + self.gpu.memory_queue:
            return self.busy("load/store unit", t, self.unit - self.gpu.memory_queue + 1)
        self.unit = max(t, self.unit) + s.amount / self.gpu.shared_rate
        self.port = max(self.port, t) + s.amount / self.gpu.shared_rate
        w.newest = max(w.newest, self.fetched(self.unit, s.amount) + self.gpu.copy_latency)
        return self.go(t, w, s, w.newest, self.unit + 4)

    def _commit(self, t: float, w: Warp, s: Step) -> float | None:
        group = w.groups[s.write]
        group.append(max([w.newest, t, *group[-1:]]))
        w.newest = 0.0
        return self.go(t, w, s, group[-1])

    def _copies(self, t: float, w: Warp, s: Step) -> float | None:
        group, left = w.groups[s.write], int(s.amount)
        if len(group) > left:
            if (until := group[len(group) - left - 1]) > t + EPSILON:
                return self.busy("copies", t, until)
            del group[: len(group) - left]
        return self.go(t, w, s)

    def _product(self, t: float, w: Warp, s: Step) -> float | None:
        queue = self.gpu.matrix_queue
        if len(w.starts) >= queue and w.starts[-queue] > t + EPSILON:
            return self.busy("products queued", t, w.starts[-queue])
        pipes = self.pipes[w.scheduler]
        start = max(t, pipes["matrix"])
        self.port = max(self.port, start) + s.amount / self.gpu.shared_rate
        pipes["matrix"] = max(start + s.occupied, self.port)
        w.starts = [*w.starts[-queue:], start]
        if s.first:
            w.pending.append(pipes["matrix"] + s.latency)
        return self.go(t, w, s)

    def _products(self, t: float, w: Warp, s: Step) -> float | None:
        left = int(s.amount)
        if len(w.pending) > left:
            if (until := w.pending[len(w.pending) - left - 1]) > t + EPSILON:
                return self.busy("products", t, until)
            del w.pending[: len(w.pending) - left]
        return self.go(t, w, s)

    def _arrive(self, t: float, w: Warp, s: Step) -> float | None:
        """The four warps of a warp group begin their products together."""
        return self.gathered(("group", w.block, w.group), w.mates, t, w, self.gpu.warpgroup, "warp group")

    def _barrier(self, t: float, w: Warp, s: Step) -> float | None:
        key = ("barrier", w.block, s.name)
        return self.gathered(key, s.warps or self.width, t, w, self.gpu.barrier, "barrier")

    def gathered(self, key: Any, count: int, t: float, w: Warp, latency: float, reason: str) -> float | None:
        """Wait until `count` warps are here; the last one wakes the others."""
        self.issue[w.scheduler] = t + 1
        here = self.meet.setdefault(key, [])
        here.append((t, w))
        if len(here) + self.signals[key] < count:
            return None
        return self.released(key, max(t, *(x for x, _ in here)) + latency, reason, w)

    def released(self, key: Any, at: float, reason: str, own: Warp | None = None) -> float | None:
        """Let the warps at a meeting point go on at `at`: the answer for `own`, the others are woken."""
        here = self.meet.pop(key, [])
        self.signals.pop(key, None)
        mine = None
        for since, other in here:
            self.waits[reason] += at - since
            again = self.advance(at, other)
            if other is own:
                mine = again
            elif again is not None:
                heapq.heappush(self.heap, (again, 1, -other.number))
        return mine

    def _signal(self, t: float, w: Warp, s: Step) -> float | None:
        """A barrier that this warp arrives at and does not wait for."""
        key = ("barrier", w.block, s.name)
        self.signals[key] += 1
        if len(self.meet.get(key, ())) + self.signals[key] >= (s.warps or self.width):
            self.released(key, t + self.gpu.barrier, "barrier")
        return self.go(t, w, s)

    # -- barriers in shared memory: phases are counted, complete when all have posted and all bytes are there -

    def _await(self, t: float, w: Warp, s: Step) -> float | None:
        if not s.keys:
            return self.go(t, w, s, t + s.latency)
        (name, before) = s.keys[0]
        key, phase = (w.block, name), w.passed["await", s.keys[0]] - before
        if phase >= 0:
            complete = self.phases[key]
            if len(complete) <= phase:
                self.sleepers[key].append((t, w))
                return None
            if complete[phase] > t + EPSILON:
                return self.busy(f"mbarrier {name}", t, complete[phase])
        w.passed["await", s.keys[0]] += 1
        return self.go(t, w, s, t + s.latency)

    def _post(self, t: float, w: Warp, s: Step) -> float | None:
        for name, _ in s.keys:
            if not s.first or w.leads:
                self.arrived((w.block, name), 0, t + s.latency)
        return self.go(t, w, s, t + s.latency)

    def _tma(self, t: float, w: Warp, s: Step) -> float | None:
        pipes = self.pipes[w.scheduler]
        if pipes["uniform"] > t + EPSILON:
            return self.busy("TMA", t, pipes["uniform"])
        pipes["uniform"] = t + self.gpu.uniform
        if w.leads or not s.first:
            there = self.fetched(t, s.amount) + s.latency
            self.port = max(self.port, t) + s.amount / self.gpu.shared_rate
            for name, _ in s.keys:
                self.arrived((w.block, name), 1, there)
        return self.go(t, w, s, t + self.gpu.mbarrier)  # its operands are read; who waits asks the barrier

    def arrived(self, key: Any, which: int, t: float) -> None:
        """A post (0) or a copy (1) for the phase that is open."""
        name = key[1]
        left = self.open.setdefault(key, [self.posters[name], self.copiers[name], 0.0])
        left[which] -= 1
        left[2] = max(left[2], t)
        if left[0] <= 0 and left[1] <= 0:
            del self.open[key]
            complete = self.phases[key]
            complete.append(max([left[2], *complete[-1:]]))
            for since, other in self.sleepers.pop(key, ()):
                self.waits[f"mbarrier {name}"] += max(0.0, complete[-1] - since)
                heapq.heappush(self.heap, (max(complete[-1], since), 1, -other.number))


def _posters(roles: Sequence[Role]) -> Counter[str]:
    """Barrier -> the posts that complete a phase: one of each role that posts, or of each of its warps. A role that
    waits for a barrier, too, posts for the others once, as the first of warp groups that take turns."""
    found: Counter[str] = Counter()
    for role in roles:
        own = {name: s.first for body, _ in role.parts for s in body if s.kind == "post" for name, _ in s.keys}
        waits = {name for body, _ in role.parts for s in body if s.kind == "await" for name, _ in s.keys}
        for name, first in own.items():
            found[name] += 0 if name in waits else 1 if first else role.warps
    return found


def _copiers(roles: Sequence[Role]) -> Counter[str]:
    """Barrier -> the copies of a phase."""
    found: Counter[str] = Counter()
    for role in roles:
        for body, _ in role.parts:
            found |= Counter(name for x in body if x.kind == "tma" for name, _ in x.keys)
    return found
