"""A race: all contestants compute the same, are compared first, and are then timed in turns.

Lines of a race say who ran, how long, the ratio to frisket, and why a contestant is missing. A contest is a mask, a
score mod, sizes, and who takes part. Measurements share the machine's name, clocks, and calls timed in turns.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from frisket.dsl.errors import BackendError, Undecided
from frisket.dsl.ir import uses
from frisket.lowering.dtypes import HALVES, SINGLE
from frisket.lowering.simplify import ProgramExprs, prepare
from frisket.runtime.attention.entry import reference
from frisket.runtime.machine.modules import pip_install
from frisket.runtime.masks.mask import Mask, Program, ScoreMod, mask, score

Array = NDArray[Any]
Call = Callable[[], Any]
Clock = Callable[[Any], float]  # the seconds of a call
Times = dict[str, list[float]]
OURS = ("frisket",)  # names of contestants that are not peers


def described() -> dict[str, Any]:
    """CPU, cores and versions, for the head of a result file."""
    versions = {}
    for name in ("numpy", "torch", "jax", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    data: dict[str, Any] = {"date": str(date.today()), "cpu": cpu_name(), "cores": os.cpu_count()}
    return data | {"python": platform.python_version(), **versions}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    # on ARM there is no model name
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def cpus() -> int:
    """The number of CPUs that this process may use."""
    # macOS and Windows have no affinity
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_count() -> str:
    return f"{cpus()} CPU{'s' if cpus() != 1 else ''}"


def installed() -> list[str]:
    """The frameworks that are there."""
    return [name for name in ("torch", "jax") if importlib.util.find_spec(name)]


def choose(framework: str | None) -> str:
    frameworks = installed()
    if framework and framework not in frameworks:
        raise BackendError(f"{framework} is not installed: {pip_install(framework)}")
    if not frameworks:
        raise BackendError(f"neither torch nor JAX is installed: {pip_install('torch')}, or with [jax]")
    return framework or frameworks[0]


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def processor_seconds(run: Callable[[], Any]) -> float:
    """Processor time of this process alone, without other work on the machine."""
    start = time.process_time()
    run()
    return time.process_time() - start


def turns(calls: Mapping[str, Any], rounds: int, rest: float = 0.0, clock: Clock = seconds) -> Iterator[Times]:
    """After every round, the seconds of every call in the rounds so far. Each is warmed up before; the order is
    another one in every round, for the second finds warm caches. `rest` is the pause before each call, in seconds,
    where one gives memory back after it has answered; `clock` is what takes the time of a call."""
    order, draw = list(calls), random.Random(0)  # the same orders in every run
    times: Times = {n: [] for n in calls}
    for call in calls.values():
        clock(call)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            time.sleep(rest)
            times[name].append(clock(calls[name]))
        yield times


def rounds_of(calls: Mapping[str, Any], rounds: int, rest: float = 0.0, clock: Clock = seconds) -> Times:
    """The seconds of every call in every round, see `turns`."""
    *_, times = turns(calls, rounds, rest, clock)
    return times


def raced(
    calls: Mapping[str, Any], rounds: int, ours: Sequence[str] = OURS, rest: float = 0.0, clock: Any = seconds
) -> dict[str, Any]:
    """A row of results: median milliseconds of every call, and the ratios "peer / ours" of what is not ours."""
    return row(rounds_of(calls, rounds, rest, clock), ours)


def row(times: Times, ours: Sequence[str] = OURS) -> dict[str, Any]:
    """A row of times that were taken, in seconds."""
    peers = [n for n in times if n not in ours]
    return {
        "figures": {"ms": {n: 1e3 * statistics.median(t) for n, t in times.items()}},
        "ratios": {f"{p} / {o}": median_ratio(times[p], times[o]) for o in ours if o in times for p in peers},
    }


def median_ratio(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """The median over rounds of above / below, and the 95 % interval of that median by order statistics. These are the
    ranks that a binomial of n fair draws leaves with at most 2.5 % on either side."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    n, tail, rank = len(ratios), 0.5 ** len(ratios), 0
    while tail <= 0.025:
        rank += 1
        tail += math.comb(n, rank) * 0.5**n
    low = max(rank - 1, 0)
    return statistics.median(ratios), ratios[low], ratios[n - 1 - low]


def fresh(code: str, **variables: str) -> str:
    """The output of a new Python that runs `code`, with bytecode kept as an installed package has it."""
    env = {n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"} | variables
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


SAMPLED = 32  # queries in a row that are computed by the interpreter, in three places


class NoWordsError(Exception):
    """A peer cannot be told this mask or score mod, or does not take these sizes; the text says why."""


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens. `backward` times the forward and the gradients of q, k and v together."""

    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    backward: bool = False

    def settings(self) -> dict[str, Any]:
        data: dict[str, Any] = {"q_len": self.q_len, "kv_len": self.kv_len, "batch": self.batch, "heads": self.heads}
        data |= {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": self.dtype}
        return data | {"direction": "forward and backward" if self.backward else "forward"}

    @property
    def problem(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.q_len, self.kv_len

    def drawn(self) -> tuple[Array, Array, Array, Array]:
        """Normal q, k, v and a cotangent, float32 [batch, heads, length, dim]; the same at every call."""
        draw = np.random.default_rng(0)
        shapes = [(self.heads, self.q_len), *[(self.kv_heads, self.kv_len)] * 2, (self.heads, self.q_len)]
        q, k, v, cotangent = (draw.standard_normal((self.batch, *x, self.head_dim), np.float32) for x in shapes)
        return q, k, v, cotangent


@dataclass(frozen=True)
class Contest:
    """One row: what everybody computes."""

    name: str
    mask: Mask | None
    score: ScoreMod | None
    sizes: Sizes

    @property
    def program(self) -> Program:
        return Program(self.mask, self.score)

    @property
    def everything(self) -> bool:
        """Whether it is plain that every query sees every key."""
        return self.mask is None or prepare(ProgramExprs(self.mask.expr)).mask is None

    def dense(self) -> Array:
        """The mask by the interpreter, bool [1 or batch, 1 or heads, q_len, kv_len]."""
        s, m = self.sizes, self.mask
        if m is None:
            return np.ones((1, 1, s.q_len, s.kv_len), bool)
        simple = prepare(ProgramExprs(m.expr)).mask
        read = frozenset() if simple is None else uses(simple)
        batch, heads = (n if name in read else 1 for name, n in (("b", s.batch), ("h", s.heads)))
        return m.dense(s.q_len, s.kv_len, batch=batch, heads=heads)

    def window(self) -> int | None:
        """How many keys a query sees up to its own under a causal window (0: all, plain causal); None otherwise."""
        s = self.sizes
        if self.mask is None or s.q_len != s.kv_len:
            return None

        def means(other: Mask) -> bool:
            assert self.mask is not None
            return bool(self.mask.equivalent(other, s.q_len, s.kv_len, batch=s.batch, heads=s.heads))

        if means(mask("causal")):
            return 0
        layout = self.mask.layout(s.q_len, s.kv_len, batch=s.batch, heads=s.heads)
        n = int(layout.row_counts.reshape(-1)[-1])  # of the last query
        return n if n and means(mask("causal & window(n)", n=n)) else None

    def oracle(self) -> Iterator[tuple[slice, Array]]:
        """(queries, float64 output [batch, heads, queries, dim]) at the start, middle and end; of gradients nothing."""
        if self.sizes.backward:
            return
        q, k, v, _ = self.sizes.drawn()
        n = min(SAMPLED, self.sizes.q_len)
        # a set: of short lengths the three places are one
        for start in sorted({0, (self.sizes.q_len - n) // 2, self.sizes.q_len - n}):
            at = slice(start, start + n)
            origin, sizes = (0, 0, start, 0), self.sizes.problem
            yield at, reference(q[:, :, at], k, v, self.mask, self.score, layout="bhsd", origin=origin, sizes=sizes)


@dataclass(frozen=True)
class Contestant:
    """One way to compute it. `missing`: why it does not run here; `prepare` makes the call, or raises NoWordsError."""

    name: str
    prepare: Callable[[Contest], Call]
    ours: bool = False
    missing: str = ""
    family: str = ""  # what --peers calls it


@dataclass(frozen=True)
class Stage:
    """A framework on a device: its contestants, and what it takes to compare and to time them."""

    name: str
    contestants: tuple[Contestant, ...]
    numpy: Callable[[Any], Array]  # of a result: float32 [batch, heads, length, dim]
    clock: Callable[[Call], float]
    truth: Callable[[Contest], Iterable[tuple[slice, Array]]] = Contest.oracle  # some rows of the right result
    rest: float = 0.0  # seconds before each call, where one gives memory back after it has answered
    machine: Mapping[str, Any] = field(default_factory=dict)

    def chosen(self, families: Collection[str] | None) -> list[Contestant]:
        return [c for c in self.contestants if c.ours or families is None or c.family in families]


def standard(sizes: Sizes) -> list[Contest]:
    """The masks that are raced by default: causal, a window, packed documents, score mods, an image."""
    n = sizes.kv_len
    doc = np.sort(np.random.default_rng(0).integers(0, 16, n)).astype(np.int32)  # sorted: one document behind another
    slope = np.exp2(-8 * np.arange(1, sizes.heads + 1) / sizes.heads).astype(np.float32)
    contests = [
        Contest("causal", mask("causal"), None, sizes),
        Contest("causal & window(256)", mask("causal & window(256)"), None, sizes),
        Contest("causal & same(doc)", mask("causal & same(doc)", doc=doc), None, sizes),
        Contest("causal, softcap(50)", mask("causal"), score("softcap(50)"), sizes),
        Contest("causal, ALiBi", mask("causal"), score("score + slope[h] * (k - q)", slope=slope), sizes),
    ]
    side = math.isqrt(n)
    if side * side == n == sizes.q_len and side >= 8:
        kernel = min(13, side // 2 * 2 - 1)  # a kernel of natten is odd, and no larger than the image
        text = f"natten2d({side}, {side}, {kernel}, {kernel})"
        contests.append(Contest(text, mask(text), None, sizes))
    return contests


ALLOWED = {SINGLE: 1e-4, **dict.fromkeys(HALVES, 2e-2)}  # of the largest result, or of 1


@dataclass
class ContestResult:
    """The result of a contest on a stage: who is ours, who is out and why, what is done just now."""

    contest: Contest
    stage: str
    ours: tuple[str, ...]
    out: dict[str, str] = field(default_factory=dict, kw_only=True)
    doing: str = field(default="", kw_only=True)
    machine: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # what of the stage's device is worth a name


@dataclass
class Race(ContestResult):
    """One contest as far as it has come. `times` are seconds by contestant; `out` says who is not timed, and why."""

    rounds: int
    times: Times = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)  # seconds of the first call, compilation included

    def row(self) -> dict[str, Any]:
        """A row in the form of schema.py."""
        timed = {n: t for n, t in self.times.items() if t}
        entry = row(timed, self.ours) if timed else {}
        if self.first:
            entry.setdefault("figures", {})["s, first call"] = dict(self.first)
        return entry | ({"notes": dict(self.out)} if self.out else {})

    def default(self) -> str | None:
        """Ours that is taken by default, among those that were timed."""
        return next((n for n in self.ours if self.times.get(n)), None)

    def ratio(self, name: str) -> tuple[float, float, float] | None:
        """Time of a contestant / time of our default, round by round."""
        base = self.default()
        if base in (None, name) or not self.times.get(name):
            return None
        assert base is not None
        n = min(len(self.times[name]), len(self.times[base]))
        return median_ratio(self.times[name][:n], self.times[base][:n]) if n else None


def run(contest: Contest, stage: Stage, rounds: int, families: Collection[str] | None = None) -> Iterator[Race]:
    """The race after every step. `families` are the peers that take part, None for all."""
    chosen = stage.chosen(families)
    race = Race(contest, stage.name, tuple(c.name for c in chosen if c.ours), rounds, machine=stage.machine)
    calls: dict[str, Call] = {}
    results: dict[str, Any] = {}
    for c in chosen:
        if c.missing:
            race.out[c.name] = c.missing
            continue
        race.doing = f"{c.name}: first call"
        yield race
        start = time.perf_counter()
        try:
            call = c.prepare(contest)
            result = call()
            results[c.name] = [stage.numpy(x) for x in (result if isinstance(result, tuple) else (result,))]
        except Exception as error:  # of any library: what it says is part of the result
            race.out[c.name] = failure_text(error)
            continue
        race.first[c.name] = time.perf_counter() - start
        calls[c.name] = call
    race.doing = "comparing results"
    yield race
    for name, why in disagreeing(contest, results, race.ours, stage).items():
        race.out[name] = why
        del calls[name]
    results.clear()  # arrays of all contestants would fill the memory while times are taken
    for n, race.times in enumerate(turns(calls, rounds, stage.rest, stage.clock), 1):
        race.doing = f"round {n} of {rounds}" if n < rounds else ""
        yield race


def failure_text(error: Exception) -> str:
    """A text that says why a participant is not timed."""
    if isinstance(error, NoWordsError):
        return str(error)
    return f"failed: {type(error).__name__}: {error}".split("\n")[0][:200]


def disagreeing(contest: Contest, results: dict[str, Any], ours: Collection[str], stage: Stage) -> dict[str, str]:
    """Contestants whose results are not right, and how far off they are. They are held against the interpreter for
    some rows, then everything against ours. Of gradients the interpreter says nothing here, so that those that differ
    from ours are named as differing."""
    bad: dict[str, str] = {}
    sizes = contest.sizes
    for at, want in stage.truth(contest):
        for name, (out,) in results.items():  # without gradients a result is one array
            if why := difference(out[:, :, at], want, sizes.dtype):
                bad.setdefault(name, f"wrong, not timed: {why} from the interpreter")
    base = next((n for n in ours if n in results and n not in bad), None)
    for name, arrays in results.items():
        if base is None or name in bad or name == base:
            continue
        whys = [difference(x, y, sizes.dtype) for x, y in zip(arrays, results[base], strict=True)]
        if why := next(filter(None, whys), ""):
            bad[name] = f"not timed: {why} from {base}"
    peers = [n for n in bad if n not in ours]
    if peers and contest.mask is not None and _sees_nothing(contest):
        bad |= {n: f"{bad[n]}; some queries see no key, where results are 0 here" for n in peers}
    return bad


def _sees_nothing(contest: Contest) -> bool:
    """Whether some query sees no key: what others answer there is theirs to choose."""
    s = contest.sizes
    assert contest.mask is not None
    try:
        return bool(contest.mask.empty_rows(s.q_len, s.kv_len, batch=s.batch, heads=s.heads))
    except Undecided:
        return False


def difference(got: Any, want: Any, dtype: str) -> str:
    """How two results differ, where it is more than their numbers allow."""
    if got.shape != want.shape:
        return f"its shape {got.shape} differs"
    nan = int(np.isnan(got).sum() - np.isnan(want).sum())  # NaN where the right result has it is no mistake
    if nan > 0:
        return f"{nan:,} of {got.size:,} numbers are NaN, apart"
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = float(np.nanmax(np.abs(got - want), initial=0.0))
    size = max(1.0, float(np.nanmax(np.abs(want), initial=0.0)))
    return "" if error <= ALLOWED[dtype] * size else f"{error:.2g} apart"


BAR = 24  # characters of the longest bar
GOOD, LOSS, AWAY = "green", "magenta", "dim"
HEAD = f"{'median':>8}  {'time / frisket':>14}  "
LEAST = 4  # columns that a bar of a narrow terminal needs
ENOUGH = 6  # rounds that a 95 % interval of a median takes; of fewer their range is shown


def lines(races: Iterable[Race], columns: int | None = None) -> list[Text]:
    """A heading for each race, and a line for each contestant; of `columns` at most, where a terminal has so many."""
    out: list[Text] = []
    for race in races:
        wide = max(map(len, [*race.times, *race.out, *race.ours]), default=0)
        out += [Text(), Text.assemble((f"{race.contest.name}, {race.stage}", "bold"))]
        medians = {n: median(t) for n, t in race.times.items() if t}
        if medians:
            spread = "95 % interval" if race.rounds >= ENOUGH else "range" if race.rounds > 1 else ""
            out.append(Text(f"  {'':{wide}}  {HEAD}{spread}".rstrip(), "dim"))
        longest = max(medians.values(), default=0.0)
        for name, t in sorted(medians.items(), key=lambda x: x[1]):
            room = BAR if columns is None else min(BAR, columns - wide - len(HEAD) - 22)
            bar = "█" * max(1, round(room * (t / longest))) if room >= LEAST else ""
            out.append(_line(race, name, t, wide, bar))
        out += [line for name, why in race.out.items() for line in away(name, why, wide, columns)]
        if race.doing:
            out.append(Text(f"  {race.doing} ...", "dim"))
    return out[1:]


def away(name: str, why: str, wide: int, columns: int | None) -> list[Text]:
    """A name and why it is missing, in a second column if there is one."""
    parts = [why] if columns is None else wrap(why, max(columns - wide - 4, 24), break_on_hyphens=False)
    return [Text.assemble(f"  {name if n == 0 else '':{wide}}  ", (part, AWAY)) for n, part in enumerate(parts or [""])]


def _line(race: Race, name: str, seconds: float, wide: int, bar: str) -> Text:
    ours, estimate = name in race.ours, race.ratio(name)
    if estimate is None:
        ratio, colour = f"{'1.00' if name == race.default() else '':>14}  {'':16}", GOOD
    else:
        middle, low, high = estimate
        colour = LOSS if high < 1 and not ours else ""  # the whole interval is below 1: slower beyond doubt
        interval = f"{low:.2f} to {high:.2f}" if race.rounds > 1 else ""
        ratio = f"{middle:14.2f}  {interval:16}"
    styles = ("bold", "cyan") if ours else ("", "dim")
    parts = (f"  {name:{wide}}", styles[0]), f"  {spoken(seconds):>8}  ", (ratio, colour), "  ", (bar, styles[1])
    text = Text.assemble(*parts)
    text.rstrip()
    return text


def spoken(seconds: float) -> str:
    """`spoken(0.0123) == "12.3 ms"`."""
    size, unit = (1.0, "s") if seconds >= 1 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "µs")
    x = seconds / size
    return f"{x:.0f} {unit}" if x >= 100 else f"{x:.1f} {unit}" if x >= 10 else f"{x:.2f} {unit}"


def losses(races: Iterable[Race]) -> list[str]:
    """Peers that are faster than ours that is taken by itself, by more than the interval leaves open."""
    texts = []
    for race in races:
        for name in race.times:
            ratio: Any = race.ratio(name)
            if name not in race.ours and ratio and ratio[2] < 1:
                texts.append(f"{race.contest.name}: {name} is faster, {ratio[0]:.2f} × our time")
    return texts
