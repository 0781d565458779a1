"""Writes the Pallas forward kernel for TPU (Mosaic) of a LoopPlan, as the text of a module.

The grid is (batch, heads, q tiles, steps). The records of the spans, in scalar memory, tell the index maps of
K and V which key tile a step visits; steps past the last one repeat it, so nothing is copied for them.

What a mask reads besides its coordinates:

- an expression with a lookup that depends on `b h q` or on `b h k` alone (`doc[q]`, `table[doc[k]]`) is
  worked out before the kernel, one value per query or key, and comes in as a block;
- one that depends on `b h` alone (`slope[h]`) comes in as a scalar per batch and head;
- a lookup whose indices are `q` and `k` up to a shift (`bias[h, q, k]`) comes in as blocks of tile size;
- any other lookup of `q` and `k` together (`bias[k - q + n]`) picks from a table of at most `SMALL` entries
  in scalar memory, entry by entry: TPUs have no gather inside a kernel. Larger ones are a LoweringError.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import COORDINATES, SIZES, Expr, param, substitute, transform, uses, var, walk
from frisket.dsl.types import BOOL, FLOAT, INT, Type

from ..plan import Geometry, LoopPlan, Spans, Target
from .expr import ATOM, COMPARISON, PREFIX, Text, machine, printed
from .expr_jnp import JNP, prelude
from .pallas_tpu_text import LOOK, PER_KEY, PER_PAIR, PER_QUERY, PICK, SHARE, SKELETON, TURN, filled

LANES = 128
PREFETCHED = ("first_row", "count", "records", "ints", "q_origin", "k_origin")
SMALL = 1024  # entries a kernel may try one by one
SCALAR_BYTES = 512 * 1024  # scalar memory that records may take: half of what a core has


@dataclass
class Inputs:
    """Where each expression that reads a table comes from; names are those of the generated module."""

    scalars: dict[Expr, str] = field(default_factory=dict)
    columns: dict[Expr, str] = field(default_factory=dict)
    rows: dict[Expr, str] = field(default_factory=dict)
    planes: dict[Expr, str] = field(default_factory=dict)
    picked: dict[str, str] = field(default_factory=dict)  # table -> its entries, flat

    def outside(self) -> dict[Expr, str]:
        return self.scalars | self.columns | self.rows | self.planes


# -- for the launcher -------------------------------------------------------------------------------


def walk_of(spans: Spans) -> tuple[int, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """(most steps of any row, slice_of [batch * heads], steps of each row [slices * rows], records
    [slices * rows * R * 4]); a record is (first step, key tile - step, first FULL step, end of FULL steps)."""
    lo, full_lo, full_hi, hi = np.moveaxis(spans.bounds, -1, 0)
    used = np.arange(lo.shape[-1]) < spans.count[..., None]
    length = np.where(used, hi - lo, 0)
    first = np.cumsum(length, -1) - length
    records = np.stack([first, lo - first, first + full_lo - lo, first + full_hi - lo], -1)
    records = np.where(used[..., None], records, [np.iinfo(np.int32).max, 0, 0, 0])
    count = length.sum(-1)
    if records.nbytes > 2 * SCALAR_BYTES:  # int64 here
        raise LoweringError(
            f"the spans of this mask take {records.nbytes // 2048} KiB of a TPU's scalar memory, at most "
            f'{SCALAR_BYTES // 1024}; use larger tiles, or backend="xla"'
        )
    flat = [np.ascontiguousarray(x.reshape(-1), np.int32) for x in (spans.slice_of, count, records)]
    return max(1, int(count.max(initial=0))), flat[0], flat[1], flat[2]


def check_tables(plan: LoopPlan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise where a table is too large for the way this kernel reads it."""
    inputs = place(plan)
    for root in _roots(plan):
        for node in _remaining(root, inputs):
            if node.op != "lookup":
                continue
            ends = zip(node.args, shapes[node.name], strict=True)
            tried = int(np.prod([n for index, n in ends if uses(index) & {"q", "k"}]))
            if tried > SMALL:
                source = next(t.source for t in plan.tables if t.name == node.name)
                raise LoweringError(
                    f"`{source}` is indexed by q and k together and a TPU kernel would have to try {tried} "
                    f'entries, at most {SMALL}; index it by q or k alone, shrink it, or use backend="xla"'
                )


# -- where things come from -------------------------------------------------------------------------


def _roots(plan: LoopPlan) -> list[Expr]:
    return [_mosaic(e) for e in (plan.mask, plan.score) if e is not None]


def _mosaic(root: Expr) -> Expr:
    """As the machine likes it; and Mosaic cannot choose between two vectors of Bool."""

    def change(e: Expr) -> Expr:
        if e.op == "where" and e.type is BOOL:
            when, yes, no = e.args
            return (when & yes) | (~when & no)
        return e

    return transform(machine(root), change)


def place(plan: LoopPlan) -> Inputs:
    """Decide for every lookup of the plan how it reaches the kernel."""
    inputs = Inputs()
    for root in _roots(plan):
        _place(root, inputs)
        for node in _remaining(root, inputs):
            if node.op == "lookup":
                inputs.picked.setdefault(node.name, _flat(node))
    return inputs


def _place(root: Expr, inputs: Inputs) -> None:
    stack = [root]
    while stack:
        e = stack.pop()
        if not any(n.op == "lookup" for n in walk(e)) or e in inputs.outside():
            continue
        used = uses(e) & {"q", "k", "score"}
        if not used:
            inputs.scalars[e] = f"scalar{len(inputs.scalars)}"
        elif used == {"q"}:
            inputs.columns[e] = f"column{len(inputs.columns)}"
        elif used == {"k"}:
            inputs.rows[e] = f"row{len(inputs.rows)}"
        elif e.op == "lookup" and _is_plane(e):
            inputs.planes[e] = f"plane{len(inputs.planes)}"
        else:
            stack.extend(reversed(e.args))


def _flat(e: Expr) -> str:
    return f"{e.name}.reshape(-1)" + (".astype(Int)" if e.type is BOOL else "")


def _is_plane(e: Expr) -> bool:
    """`T[.., q + c, k + c']`: a table as large as the problem itself."""
    over = [i for i in e.args if uses(i) & {"q", "k"}]
    return len(over) == 2 and {v for i in over for v in "qk" if _shifted(i, v)} == {"q", "k"}


def _shifted(e: Expr, name: str) -> bool:
    if e.op == "var":
        return bool(e.name == name)
    if e.op not in ("add", "sub"):
        return False
    x, y = e.args
    constant = not uses(y) & set(COORDINATES)
    return (_shifted(x, name) and constant) or (e.op == "add" and _shifted(y, name) and not uses(x) & set(COORDINATES))


def _remaining(root: Expr, inputs: Inputs) -> list[Expr]:
    """The nodes that are left for the kernel to compute."""
    at_hand = inputs.outside()
    found: dict[Expr, None] = {}
    stack = [root]
    while stack:
        e = stack.pop()
        if e not in found and e not in at_hand:
            found[e] = None
            stack.extend(e.args)
    return list(found)


# -- text -------------------------------------------------------------------------------------------


def emit(plan: LoopPlan, target: Target, geometry: Geometry, dtype: str) -> str:
    """The module's source. Its `attention_forward(query, key, value, steps, slice_of, count, records, origin,
    sizes, slots, tables)` takes JAX arrays [batch, length, heads, dim], what `walk_of` returns, and numbers
    and tables in the order of the plan; it gives (out, lse)."""
    _check(plan, target, dtype)
    inputs = place(plan)
    scalars = ["floats"] if any(s.type is FLOAT for s in plan.slots) else []
    scalars += [*inputs.scalars.values(), *inputs.picked]
    blocks = [*inputs.columns.values(), *inputs.rows.values(), *inputs.planes.values()]
    return filled(
        SKELETON,
        text=[f"#     {line}" for line in (plan.text or "every key").splitlines()],
        block_q=target.block_q,
        block_k=target.block_k,
        scale=repr(float(geometry.scale)),
        group=geometry.heads // geometry.kv_heads,
        exact="DEFAULT" if dtype == "bfloat16" else "HIGHEST",
        math=["import math"] if inputs.picked else [],
        prelude=_prelude(plan, inputs),
        refs=_listed([*PREFETCHED, *(f"{n}_ref" for n in (*scalars, "q", "k", "v", *blocks))]),
        shapes=_listed(["kv_len", *(f"{n}_shape" for n in inputs.picked)]),
        kept=_listed(["acc", *inputs.columns.values()]),
        turned=[f"{n}[...] = turn({n}_ref[0, 0])" for n in inputs.columns.values()],
        here=_here(plan, inputs),
        score=_score(plan, inputs),
        seen=_seen(plan, inputs),
        cast=["query, key, value = (x.astype(Float) for x in (query, key, value))  # TPUs compute no float16"]
        if dtype == "float16"
        else [],
        before=_before(plan, inputs),
        passed=_listed([inputs.picked.get(n, n) for n in [*PREFETCHED, *scalars]]),
        number=len(PREFETCHED) + len(scalars),
        blocks=_block_makers(inputs),
        specs=_specs(inputs),
        scratch=[f"pltpu.VMEM((BLOCK_Q, 1), {_memory(e.type)})," for e in inputs.columns],
        operands=_listed(["*scalars", "query", "key", "value", *blocks]),
        static=_listed(["kv_len=kv_len", *(f"{t}_shape={t}.shape" for t in inputs.picked)]),
    )  # fmt: skip


def _check(plan: LoopPlan, target: Target, dtype: str) -> None:
    if dtype not in ("float32", "bfloat16", "float16"):
        raise LoweringError(f'TPUs have no {dtype}; use float32 or bfloat16, or backend="xla" on CPU')
    if plan.int64:
        raise LoweringError(
            "an index of this mask may leave 32 bits and TPU kernels have no 64-bit integers; "
            'shrink the numbers in the mask, or use backend="xla"'
        )
    if target.block_q % LANES or target.block_k % LANES:
        raise LoweringError(
            f"TPU tiles are multiples of {LANES}, not {target.block_q} x {target.block_k}; "
            f"pass tile=({LANES}, {LANES}) or a multiple"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names)


def _memory(type: Type) -> str:
    return "Float" if type is FLOAT else "Int"


def _stored(text: str, type: Type) -> Text:
    """Bool lives in memory as an integer."""
    return Text(f"{text} != 0", COMPARISON) if type is BOOL else Text(text)


def _prelude(plan: LoopPlan, inputs: Inputs) -> list[str]:
    constants, definitions = prelude(*_roots(plan))
    own = ((LOOK, inputs.outside()), (TURN, inputs.columns), (PICK, inputs.picked))
    definitions += [text for text, needed in own if needed]
    return constants + [line for text in definitions for line in f"\n{text}".rstrip().splitlines()]


def _written(
    root: Expr, names: Mapping[Expr, Text], look: Callable[[Expr, str], Text], temporary: str
) -> tuple[list[str], str]:
    """(assignments, text of the value) of `root`, with `names` for what is at hand."""
    at_hand = {e: param(f"{i} at hand", e.type) for i, e in enumerate(names)}
    shown = {at_hand[e]: text for e, text in names.items()}

    def leaf(e: Expr, args: list[Text]) -> Text | None:
        if e.op == "lit":
            return _literal(e.name)
        if e.op == "var":
            return Text("s" if e.name == "score" else str(e.name))
        if e.op == "param":
            return shown.get(e) or Text(str(e.name))
        listed = ", ".join(a.text for a in args)
        if e.op == "random":
            return Text(f"random({listed})")
        return look(e, listed) if e.op == "lookup" else None

    count = itertools.count()
    root = substitute(root, at_hand)
    page = printed([root], JNP, leaf, lambda e, level: f"{temporary}{next(count)}", "pallas-tpu")
    return [f"{line.name} = {line.text}" for line in page.lines], page.values[root]


def _literal(value: bool | int | float) -> Text:
    if isinstance(value, float) and not math.isfinite(value):
        return Text("jnp.nan") if math.isnan(value) else Text("jnp.inf") if value > 0 else Text("-jnp.inf", PREFIX)
    return Text(repr(value), ATOM if value >= 0 else PREFIX)


def _in_kernel(plan: LoopPlan, inputs: Inputs) -> dict[Expr, Text]:
    forms = (
        ("{}_ref[batch, head]", inputs.scalars),
        ("{}[...]", inputs.columns),
        ("{}_ref[0, 0]", inputs.rows),
        ("{}_ref[0, 0]", inputs.planes),
    )
    return {e: _stored(form.format(name), e.type) for form, of in forms for e, name in of.items()}


def _pick(e: Expr, indices: str) -> Text:
    return _stored(f"pick({e.name}_ref, {e.name}_shape, {indices})", e.type)


def _here(plan: LoopPlan, inputs: Inputs) -> list[str]:
    """The coordinates, sizes and slots that the kernel still computes with."""
    left = [n for root in _roots(plan) for n in _remaining(root, inputs)]
    used = {n.name for n in left if n.op in ("var", "param")}
    lines = {
        "b": "b = ints[0] + batch",
        "h": "h = ints[1] + head",
        "q": "q = q_origin[batch] + tile * BLOCK_Q + lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0)",
        "k": "k = k_origin[batch] + key_tile * BLOCK_K + lax.broadcasted_iota(Int, (1, BLOCK_K), 1)",
    } | {name: f"{name} = ints[{2 + i}]" for i, name in enumerate(SIZES)}
    wholes = floats = 0
    for s in plan.slots:
        source = f"floats_ref[{floats}]" if s.type is FLOAT else f"ints[{6 + wholes}]"
        lines[s.name] = f"{s.name} = {_stored(source, s.type).text}"
        wholes, floats = wholes + (s.type is not FLOAT), floats + (s.type is FLOAT)
    return [line for name, line in lines.items() if name in used]


def _score(plan: LoopPlan, inputs: Inputs) -> list[str]:
    if plan.score is None:
        return []
    lines, value = _written(_mosaic(plan.score), _in_kernel(plan, inputs), _pick, "y")
    return [*lines, f"s = jnp.broadcast_to({value}, s.shape)"]


def _seen(plan: LoopPlan, inputs: Inputs) -> list[str]:
    if plan.mask is None:
        return []
    lines, value = _written(_mosaic(plan.mask), _in_kernel(plan, inputs), _pick, "x")
    return [*lines, f"s = jnp.where({value}, s, -jnp.inf)"]


def _before(plan: LoopPlan, inputs: Inputs) -> list[str]:
    """What `attention_forward` works out with plain JAX before the kernel runs."""
    lines = []
    whole: list[str] = []
    floating: list[str] = []
    for i, s in enumerate(plan.slots):
        lines.append(f"{s.name} = jnp.asarray(slots[{i}], {_DTYPES[s.type]})")
        (floating if s.type is FLOAT else whole).append(s.name)
    for i, t in enumerate(plan.tables):
        lines.append(f"{t.name} = jnp.asarray(tables[{i}], {_DTYPES[t.type]})")
    lines.append(f"ints = [*origin[:2], *sizes{''.join(f', {n}' for n in whole)}]")
    lines.append("ints = jnp.stack([jnp.asarray(x, Int) for x in ints])")
    if floating:
        lines.append(f"floats = jnp.stack([{', '.join(floating)}])")
    return lines + _outside(plan, inputs)


_DTYPES = {BOOL: "jnp.bool_", INT: "Int", FLOAT: "Float"}


def _outside(plan: LoopPlan, inputs: Inputs) -> list[str]:
    outside = inputs.outside()
    used = {name for e in outside for name in uses(e)}
    lines = {
        "b": "b = jnp.asarray(origin[0], Int) + jnp.arange(batch, dtype=Int).reshape(-1, 1, 1, 1)",
        "h": "h = jnp.asarray(origin[1], Int) + jnp.arange(heads, dtype=Int).reshape(1, -1, 1, 1)",
        "q": "q = (q_origin[:, None] + jnp.arange(q_len, dtype=Int)).reshape(batch, 1, 1, q_len)",
        "k": "k = (k_origin[:, None] + jnp.arange(kv_len, dtype=Int)).reshape(batch, 1, 1, kv_len)",
    } | {name: f"{name} = jnp.asarray(sizes[{i}], Int)" for i, name in enumerate(SIZES)}
    out = [line for name, line in lines.items() if name in used]
    down = {var("q"): Text("q.swapaxes(2, 3)")}  # queries along the rows of a plane
    for e, name in outside.items():
        at_hand = down if e in inputs.planes else {}
        temporaries, value = _written(e, at_hand, _look, f"{name}_")
        if e in inputs.scalars:
            value = f"jnp.broadcast_to({value}, (batch, heads, 1, 1))[:, :, 0, 0]"
        out += [*temporaries, f"{name} = ({value}).astype(Int)" if e.type is BOOL else f"{name} = {value}"]
    return out


def _look(e: Expr, indices: str) -> Text:
    return Text(f"look({e.name}, {indices})")


def _block_makers(inputs: Inputs) -> list[str]:
    makers = [(PER_QUERY, inputs.columns), (PER_KEY, inputs.rows), (PER_PAIR, inputs.planes)]
    needed = [text for text, of in makers if of]
    return "".join([SHARE, *needed]).rstrip().splitlines() if needed else []


def _specs(inputs: Inputs) -> list[str]:
    return [
        *(f"per_query({name})," for name in inputs.columns.values()),
        *(f"per_key({name})," for name in inputs.rows.values()),
        *(f"per_pair({name})," for name in inputs.planes.values()),
    ]
