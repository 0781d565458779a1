"""The model beside an H100: rates of masks, the order of candidate tiles, and steps of serving, as gpu.json has them.

A call of the measurement, benchmarks/results/gpu.json, has 32,768 tokens in 2,048 columns; the model is asked for the
same batch, heads and length. Its flex_attention is that of the torch that is installed, with its default tiles.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from . import full
from . import ours as our_kernels
from .compiled import ROOT
from .full import Case
from .ours import DRAWN, Ours, Tile
from .report import WAITED
from .serving import Step, flex_timed, timed

Row = dict[str, Any]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
TOKENS, WIDTH = 32768, 2048  # of a call: batch * length, heads * head size
DIRECTIONS, DIMS = ("forward", "backward"), (64, 128, 256)
MASKS = ("causal", "full", "window 128", "window 1024", DRAWN)
TUNED, LENGTH = ("causal", "window 128", "window 1024", DRAWN), 8192  # whose tiles were tried, and at which length
RATE, PAIR, ORDER = "TFLOP/s", "model / measured", "rank correlation"


def measured(part: str) -> dict[str, Row]:
    """The rows of a part of the measurement."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["parts"][part]["rows"]  # type: ignore[no-any-return]


def compared() -> Iterator[tuple[str, Row]]:
    """The rates of masks, then how well the model orders tiles, then steps of serving."""
    for name, row in measured("speed").items():
        direction, _, rest = name.partition(": ")
        mask, _, dim = rest.partition(", D ")
        if direction in DIRECTIONS and mask in MASKS and int(dim) in DIMS:
            yield name, {"rows": {n: rates(direction, case(mask, int(dim), int(n)), x) for n, x in row["rows"].items()}}
    for kernel, mask, dim in itertools.product(our_kernels.KERNELS, TUNED, (128, 64)):
        yield tiles_of(kernel, mask, dim), order(kernel, mask, dim)
    for name, row in measured("serving").items():
        yield step_of(name), {"rows": {n: step(name, n, x) for n, x in row["rows"].items()}}


def case(mask: str, dim: int, length: int) -> Case:
    """What a call of the measurement computes, its batch as more heads."""
    return Case(mask, dim, length, TOKENS // length * WIDTH // dim)


def rates(direction: str, asked: Case, row: Row) -> Row:
    """TFLOP/s of visible work by both."""
    found, ratios = {}, {}
    for who, model in (("frisket", "ours"), ("flex", "flex")):
        said, real = full.rate(model, direction, asked), rate(who, row)
        found |= {f"{who}, model": round(said), f"{who}, measured": round(real)}
        ratios[f"{who}: {PAIR}"] = [round(said / real, 3)]
    return {"figures": {RATE: found}, "ratios": ratios}


def rate(who: str, row: Row) -> float:
    """TFLOP/s that were measured; ours are those of Triton's kernels where another backend's are beside them."""
    there = row["figures"]["tflops"]
    return float(there.get(f"{who}, triton", there[who]))


# -- tiles ------------------------------------------------------------------------------------------------


def tiles_of(kernel: str, mask: str, dim: int) -> str:
    """The name of a row."""
    return f"tiles of {kernel}: {mask}, D {dim}"


def order(kernel: str, mask: str, dim: int) -> Row:
    """How alike model and measurement order the candidates, what is lost where the model's first is taken, and which of
    them it finds slower than they are. A time of the gradients holds all kernels, those not tried with today's tiles
    in the model and with the tiles of that day in the measurement: an error of its level, and not of the order."""
    one, asked = Ours(kernel, mask, dim), case(mask, dim, LENGTH)
    described = our_kernels.chosen(one).descriptors
    real = {
        tile: ms for name, row in measured("tune").items() if name.startswith(f"{kernel}, {mask}, D {dim}, ")
        for label, ms in row["figures"]["ms"].items() if (tile := candidate(label, described))
    }  # fmt: skip
    own = {tile: 1e3 * full.ours_time(kernel, asked, tile).seconds for tile in real}
    rest = 0.0
    if kernel != "forward":
        rest = 1e3 * (full.seconds("ours", "backward", asked) - full.ours_time(kernel, asked).seconds)
    first, best = (min(x, key=x.__getitem__) for x in (own, real))
    off = {tile: (rest + own[tile]) / real[tile] for tile in real if not our_kernels.compiled(one, tile).stack}
    groups = {
        "4 warps": [x for t, x in off.items() if t.warps == 4], "8 warps": [x for t, x in off.items() if t.warps == 8],
        "2 stages": [x for t, x in off.items() if t.stages == 2], "more": [x for t, x in off.items() if t.stages > 2],
    }  # fmt: skip
    return {
        "figures": {
            ORDER: {"all tiles": round(spearman([*own.values()], [*real.values()]), 2)},
            "ms, measured": {"the model's first": round(real[first], 3), "the fastest": round(real[best], 3)},
            "time, model / measured": {n: round(float(np.mean(x)), 2) for n, x in groups.items()},
        },
        "ratios": {"the model's first / the fastest": [round(real[first] / real[best], 3)]},
        "notes": {
            "the model's first": str(first), "the fastest": str(best), "tiles": len(real),
            "that spill, in the first two rows alone": len(real) - len(off),
        },
    }  # fmt: skip


def candidate(label: str, described: int) -> Tile | None:
    """The tile of a label such as `128 x 64, 8 warps, 3 stages`; None for others."""
    found = re.fullmatch(r"(\d+) x (\d+), (\d+) warps, (\d+) stages", label)
    return Tile(*map(int, found.groups()), described) if found else None


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation of ranks; values alike share the mean of theirs."""
    return float(np.corrcoef(*(_ranks(np.asarray(each)) for each in (x, y)))[0, 1])


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    below, same = (op(values[:, None], values[None, :]).sum(1) for op in (np.greater, np.equal))
    return below + (same - 1) / 2


# -- serving ----------------------------------------------------------------------------------------------


def step_of(name: str) -> str:
    """The name of a row."""
    return f"step of {name}"


def step(name: str, size: str, row: Row) -> Row:
    """Microseconds of a step by both; a name is such as `4 queries, int8, pages of 64`, a size `8 x 32768`."""
    queries, dtype, kind = name.split(", ")
    batch, length = map(int, size.split(" x "))
    page = 0 if kind == "one piece" else int(kind.removeprefix("pages of "))
    asked = Step(int(queries.split()[0]), (length,) * batch, "" if dtype == "bfloat16" else dtype, page)
    found, ratios = {}, {}
    for who, real in row["figures"]["us"].items():
        said = 1e6 * (timed if who == "frisket" else flex_timed)(asked).seconds
        found |= {f"{who}, model": round(said, 1), f"{who}, measured": round(real, 1)}
        ratios[f"{who}: {PAIR}"] = [round(said / real, 3)]
    return {"figures": {WAITED: found}, "ratios": ratios}
