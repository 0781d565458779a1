"""Attention that moves tokens into another order for each call, and its result back.

The time that native CPU kernels take is counted: work of each kind, by measured times of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ParameterError
from frisket.dsl.evaluate import evaluate
from frisket.grammar.memo import remember
from frisket.lowering.analysis.tiling import Tiling
from frisket.lowering.kernels.cpp.tiles import tiles
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.registry import choose
from frisket.runtime.backends.stages import Stages
from frisket.runtime.calls.arrays import NATURAL, axis_order, by_dynamo, device_of, framework_of, in_graph
from frisket.runtime.calls.options import CallArgs, Options
from frisket.runtime.calls.program import CallProgram, remap_positions
from frisket.runtime.machine.caller import counting
from frisket.runtime.machine.cpp_build import best_variant
from frisket.runtime.machine.parameters import as_value, digest, traced
from frisket.runtime.machine.settings import Settings
from frisket.runtime.masks.mask import Mask
from frisket.runtime.plans.device import CheckedCall
from frisket.runtime.torch.jagged import is_jagged

from .attention import KEPT, Attention
from .order import BLOCK, CPU, MOVING, Order, reorder
from .weighted import Sums

BORDERS = 4  # partial tiles are many from one in so many on
WORTH_ON_CPU = 1.25  # by the model of its time, which is off by a quarter for some masks
LENGTH_AXIS = {"bhsd": 2, "bshd": 1}


class OrderedAttention(Attention):
    """An attention whose calls put queries, keys and values in an order, attend there, and put the result back; made by
    `frisket.compile(..., reorder=...)`.

    >>> import frisket as fk, torch
    >>> q, k, v = torch.randn(3, 1, 2, 4096, 16)
    >>> plain = fk.compile("causal & k % 4 == 0")(q, k, v)
    >>> att = fk.compile("causal & k % 4 == 0", reorder="auto")
    >>> torch.allclose(att(q, k, v), plain, atol=1e-5)
    True
    >>> print(att.order_of(4096, 4096, device="cuda"))  # a CPU's tiles are by its instructions
    keys: remainders by 4
      tiles of 128 x 64: 1,056 before, 272 after; gain 3.5

    Results, gradients and dropout equal those of a call without an order, to rounding. With "auto" each pair of
    lengths has the order that `frisket.reorder` finds, and none where none is cheaper. A table of the mask that comes
    with a call is looked at, so it lives on the host. An order holds the mask's values, and one by a table holds it
    whole: no parameter of it can be given to a call then. `at` gives an attention without an order.
    """

    def __init__(
        self, program: CallProgram, options: Options | None = None, order: Order | Literal["auto"] = "auto"
    ) -> None:
        super().__init__(program, options)
        if not isinstance(order, Order) and not (isinstance(order, str) and order == "auto"):
            raise ParameterError(f'reorder is {order!r}; it is "auto", None, or what `frisket.reorder` found')
        if isinstance(order, Order) and order.mask != program.mask:
            raise ParameterError(
                f"the order was found for another mask: {order.mask!r}\n"
                f"  this one is {program.mask!r}: find its own with `frisket.reorder`"
            )
        self.order = order
        self._ordered: dict[Any, tuple[Order, Attention, Attention]] = {}
        if isinstance(order, Order):
            order.ready()  # a graph of torch could not
        self._fixed = (order, *self._in_order(program, order)) if isinstance(order, Order) else None

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        o = self.order
        places = () if isinstance(o, str) else (o.q_len, o.kv_len, o.block, digest(o.positions), digest(o.kv_positions))
        return *super().identity, places

    def __reduce__(self) -> tuple[Any, ...]:
        make, kind, state = super().__reduce__()
        return make, kind, (*state, self.order)  # `__init__` takes it last

    @counting
    def order_of(self, q_len: int, kv_len: int, device: str = "cpu", **params: Any) -> Order:
        """The order of calls with these lengths, in tokens, on a type of device; `params` are what the mask lacks."""
        return self._at(q_len, kv_len, device, params)[0]

    def _in_order(self, program: CallProgram, order: Order) -> tuple[Attention, Attention]:
        """The attention of arrays that are in an order, and that of arrays which are not, whose rows kernels find."""
        program = ordered(program, order)
        # engines find no rows through a table
        options = replace(self.options, rows=order.rows, engines=False, tile=self.options.tile or _tile(order))
        return self._logs(Attention(program, self.options)), self._logs(Attention(program, options))

    def _at(self, q_len: int, kv_len: int, device: str, params: dict[str, Any]) -> tuple[Order, Attention, Attention]:
        """An order, and both attentions of `_in_order`."""
        if self._fixed is not None:
            return self._fixed
        if by_dynamo():
            raise ParameterError(
                'in a graph of torch reorder="auto" has no lengths to look at\n'
                "  find the order outside: frisket.compile(mask, reorder=frisket.reorder(mask, q_len, kv_len))"
            )
        mask = self.program.mask
        # the score mod moves no tile
        mine = {n: x for n, x in params.items() if mask is not None and n in mask.unbound}
        if wrong := [n for n, x in mine.items() if traced(x)]:
            raise ParameterError(
                f"`{wrong[0]}` is traced by JAX, and an order is found by its values\n"
                "  give it to `frisket.reorder` outside of the traced function"
            )
        # by entries: an order is for these values
        key = (q_len, kv_len, device, tuple((n, digest(as_value(n, x))) for n, x in sorted(mine.items())))
        entry = self._ordered.get(key)
        if entry is None:
            block, moving = CPU if device == "cpu" else (BLOCK, MOVING)
            order = reorder("true" if mask is None else mask, q_len, kv_len, block=block, moving=moving, **mine)
            # tiles on a CPU skip rows and lanes inside, which the count of tiles does not see
            order = timed(order) if device == "cpu" and order.gain > 1 else order
            entry = order, *self._in_order(self.program.bind(mine), order)
            remember(self._ordered, key, entry, KEPT)
        return entry

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """The call in its order. Arguments and results as of `Attention.__call__`, without plan, origin, sizes, pages
        and scales: those are of places in longer sequences, and an order is of whole ones."""
        refuse_parts(q, options)
        # the axis of tokens is needed before the call checks its arguments
        layout = axis_order(options.get("layout"), options.get("axes")) or NATURAL.get(
            framework_of(q) or "torch", "bshd"
        )
        axis = LENGTH_AXIS.get(layout, 2)
        if any(len(x.shape) < 4 or framework_of(x) == "numpy" for x in (q, k, v)):  # `run` calls this with all axes
            return super().__call__(q, k, v, **options)
        params = {n: x for n, x in options.items() if n in self.program.names}
        order, att, by_rows = self._at(q.shape[axis], k.shape[axis], _device(q), params)
        options = self._ordered_arguments(options, order)
        if order.rows is not None and self._reads_rows(q, k, v) and not in_graph(q, *options.values()):
            for x, keys in ((q, False), (k, True), (v, True)):
                order._axis(x, axis, keys)  # raises as moving would: kernels do not look at lengths
            return by_rows(q, k, v, **options)
        move = order._permuted
        k, v = (move(x, axis, keys=True) for x in (k, v))
        result = att(move(q, axis), k, v, **options)
        if not isinstance(result, tuple):
            return move(result, axis, back=True)
        if isinstance(result[1], Sums):
            out, sums = (move(x, axis, back=True) for x in (result[0], result[1].numerator))
            return out, Sums(sums, *(move(x, 2, back=True) for x in result[1][1:]))
        # lse and max have lengths last in both layouts
        return move(result[0], axis, back=True), *(move(x, 2, back=True) for x in result[1:])

    def _reads_rows(self, q: Any, k: Any, v: Any) -> bool:
        """Whether the kernels of such a call find the rows of an order by themselves."""
        framework = framework_of(q) or "torch"
        # the reference of a check, and graphs, know no rows
        if _device(q) != "cpu" or Settings.read().check or any(map(in_graph, (q, k, v))):
            return False
        record = RECORDS[choose(self.options.backend, framework, "cpu")]
        return framework in record.executors and record.executors[framework].rows

    def _ordered_arguments(self, options: dict[str, Any], order: Order) -> dict[str, Any]:
        """The arguments that the attention in order takes: what its order was found by, it holds."""
        if self.mask is None:
            return options
        if (bound := [n for n in options if n in self.mask.params]) and order.by_table:
            raise ParameterError(
                f"`{bound[0]}` is given, and the order of this attention is a table for the value that its mask holds\n"
                f'  compile the mask without a value of `{bound[0]}`, and with reorder="auto"'
            )
        return {n: x for n, x in options.items() if self._fixed is not None or n not in self.mask.unbound}

    def call(self, request: CallArgs) -> CheckedCall:
        """A call, checked; `run` runs it."""
        refuse_parts(request.q, {**request._asdict(), **request.params})
        return super().call(request)

    def run(self, call: CheckedCall) -> tuple[Any, Any, Any]:
        """(out, lse, top) of a call, by its order."""
        if call.geometry.is_empty:
            return super().run(call)
        defaults = {**self.program.scalars, **self.program.tables, **self.learned}
        # the values of the call alone: the others are in the attentions in order
        values = {n: x for p in call.plan.host_program.parts for n, x in p.params.items()} | call.plan.device_values
        params = {n: x for n, x in values.items() if n not in defaults or defaults[n] is not x}
        both: dict[str, Any] = {"seed": call.seed, "sinks": call.sinks, "layout": call.arrays.layout, **params}
        out, lse, top = self(*call.arrays.qkv, return_lse=True, return_max=True, **both)
        return out, lse, top

    def stages(self, q: Any = None, k: Any = None, v: Any = None, **sizes: Any) -> Stages:
        """The stages of the attention that runs, of arrays that are in order; as `Attention.stages`."""
        q_len = sizes.get("q_len", 4096)
        kv_len = sizes.get("kv_len") or q_len
        if q is not None:
            layout = axis_order(sizes.get("layout"), sizes.get("axes")) or NATURAL[framework_of(q) or "torch"]
            axis = LENGTH_AXIS[layout]
            q_len, kv_len = q.shape[axis], k.shape[axis]
        params = {n: x for n, x in sizes.items() if n in self.program.names}
        order, *both = self._at(q_len, kv_len, "cpu" if q is None else _device(q), params)
        rows = q is not None and order.rows is not None and not sizes.get("backend") and self._reads_rows(q, k, v)
        return both[rows].stages(q, k, v, **self._ordered_arguments(sizes, order))

    def plan(self, *lengths: Any, **options: Any) -> Any:
        """Refused: a plan is of arrays that are in order. `Attention.plan` of the attention there makes one."""
        raise ParameterError(
            "an attention with reorder= plans its calls itself\n"
            "  a model that keeps its tokens in order plans frisket.compile(mask).at(**order.coordinates)"
        )


def timed(order: Order) -> Order:
    """An order with the gain that the model of the CPU's time gives it; none where that gain is too small."""
    q_len, kv_len = order.q_len, order.kv_len
    moves = 2 * (q_len * (order.queries is not None) + kv_len * (order.keys is not None))  # q and the result, k and v
    gain = time_of(order.mask, q_len, kv_len) / time_of(order.moved, q_len, kv_len, moves)
    if gain < WORTH_ON_CPU:
        return replace(order, queries=None, keys=None, after=order.before, gain=1.0)
    return replace(order, gain=gain)


def _tile(order: Order) -> tuple[int, int] | None:
    """The tile of native kernels where many tiles are partial, which take less time when they are small. 64 keys
    took 0.89 to 0.95 of the time of 128 there, forward and backward, and 1.03 where a sixtieth are."""
    if BORDERS * order.after.partial < order.after.visited:
        return None
    geometry = Geometry(1, 1, 1, order.q_len, order.kv_len, DIM, DIM, 1.0)
    return tiles(geometry, "float32", is_local_window=True)[0], 64


def _device(x: Any) -> str:
    """The type of device that an array is on; of a traced one, that of arrays that JAX makes."""
    return device_of(x, framework_of(x) or "torch")


WHOLE = ("plan", "origin", "sizes", "pages", "q_scale", "k_scale", "v_scale")


def refuse_parts(q: Any, options: Mapping[str, Any]) -> None:
    """Refuse calls that are not of whole sequences."""
    if is_jagged(q):
        raise ParameterError(
            "q is a nested tensor, and an order is of sequences of one length\n  make an attention without reorder="
        )
    if wrong := [n for n in WHOLE if options.get(n) is not None]:
        raise ParameterError(
            f"{wrong[0]} is given, and this attention reorders whole sequences\n"
            "  make another one without reorder= for it"
        )


def ordered(program: CallProgram, order: Order) -> CallProgram:
    """The program of arrays in an order: positions by a formula, or by tables, where the mask has separate tables."""
    if not order.coordinates:
        return program
    remapped = remap_positions(program, order.coordinates)
    return replace(remapped, mask=order.moved_beside(remapped.names)) if order.by_table else remapped


DIM, GROUP = 64, 6  # of a head; queries that a kernel takes at once
KEYS = 128  # of a tile when `TIMES` were measured; tiles have 64 now, which changes a time by 0.88 to 1.02
SAMPLE = 64  # partial tiles that are looked at
LANES = {"avx2": 8, "neon": 4, "scalar": 1}  # others have 16
# Nanoseconds of each kind of `work`, and of a row of q, k, v or the result that moves; forward, D64, float32, one
# thread: `python benchmarks/reorder.py costs` measures them.
KINDS = ("pairs of full tiles", "partial tiles", "scores of partial tiles", "values of partial tiles", "rows moved")
TIMES = {"avx512": (2.58, 5932.7, 1.25, 1.31, 15.3), "avx2": (2.78, 7064.59, 1.97, 0.62, 18.12)}


def time_of(mask: Mask, q_len: int, kv_len: int, moves: int = 0) -> float:
    """Nanoseconds of the forward of one head of size 64, `moves` rows reordered; CPUs without AVX-512 as AVX2."""
    variant = best_variant()
    times = TIMES["avx2" if variant in LANES else "avx512"]
    return float(work(mask, q_len, kv_len, LANES.get(variant, 16)) @ times[:-1] + moves * times[-1])


def work(mask: Mask, q_len: int, kv_len: int, lanes: int = 16) -> NDArray[np.float64]:
    """How much of each kind in `KINDS` but the last a call does, by a sample of its partial tiles."""
    # the kernel's queries, the keys of `TIMES`
    block = tiles(Geometry(1, 1, 1, q_len, kv_len, DIM, DIM, 1.0), "float32", False)[0], KEYS
    layout: Tiling = mask.layout(q_len, kv_len, block=block, exact=False)
    counts, pairs = layout.counts, block[0] * block[1]
    share, seen = np.zeros(2), _seen(layout, block)
    if len(seen):
        # a vector of scores is computed if one of these queries sees it
        seen = np.logical_or.reduceat(seen, range(0, block[0], GROUP), axis=1)
        share = np.array([seen.reshape(*seen.shape[:2], -1, lanes).any(-1).mean(), seen.mean()])
    return np.array([counts.full * pairs, counts.partial, *(counts.partial * pairs * share)])


def _seen(layout: Tiling, block: tuple[int, int]) -> NDArray[np.bool_]:
    """The visible pairs of some partial tiles, bool [tiles, queries, keys]."""
    runs = layout.runs
    # full tiles have one cost, partial ones what is in them
    width = np.where(runs.kind == 1, runs.stop - runs.start, 0)
    ends = np.cumsum(width)
    total = int(width.sum())
    pick = np.linspace(0, total - 1, min(SAMPLE, total)).astype(np.int64)
    run = np.searchsorted(ends, pick, side="right")
    row = np.searchsorted(runs.row_ptr, run, side="right") - 1
    column = runs.stop[run] - (ends[run] - pick)
    q = row[:, None, None] * block[0] + np.arange(block[0])[:, None]
    k = column[:, None, None] * block[1] + np.arange(block[1])
    # tiles at the end are cut: positions behind it would be read past the ends of tables
    at: Any = {"b": 0, "h": 0, "q": np.minimum(q, layout.q_len - 1), "k": np.minimum(k, layout.kv_len - 1)}
    seen = evaluate(layout.mask, {**layout.scope().env, **at}, {n: t.array for n, t in layout.tables.items()})
    return np.asarray(seen & (q < layout.q_len) & (k < layout.kv_len), bool)
