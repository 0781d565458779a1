"""Writes the Pallas forward kernel for TPU (Mosaic) of a LoopPlan, as the text of a module.

The walk over the tiles is `walk.py`, what expressions read is `inputs.py`; both serve the backward too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from textwrap import wrap

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr
from frisket.dsl.types import FLOAT
from frisket.lowering.dtypes import ACCELERATED
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.plan import Geometry, LoopPlan, Target

from . import inputs as pallas_inputs
from . import walk as pallas_walk

TEXT = parts(__package__, "forward")
LANES = 128
PARTS, LONGEST = 8, 1024  # pages and keys of a tile of pages, at most: each page is an operand
CAST = ["dtype = query.dtype  # float16, which TPUs neither compute nor write"]
CAST_ALL = [*CAST, "query, key, value = (x.astype(Float) for x in (query, key, value))"]
CAST_QUERY = [*CAST, "query = query.astype(Float)"]


def roots(plan: LoopPlan) -> list[Expr]:
    """The expressions that a forward kernel computes."""
    return [e for e in (plan.mask, plan.score, plan.keep_mask, plan.weight) if e is not None]


def refused(plan: LoopPlan, dtype: str) -> str:
    """The reason why no TPU kernel computes a call, or nothing."""
    if dtype not in ACCELERATED:
        return f'TPUs have no {dtype}; use float32 or bfloat16, or backend="xla" on CPU'
    if plan.int64:
        return (
            "an index of this mask may leave 32 bits and TPU kernels have no 64-bit integers; "
            'shrink the numbers in the mask, or use backend="xla"'
        )
    if plan.pages and dtype == "float16":
        return (
            "TPUs have no float16, and a pool of pages would be converted whole at every call; "
            'use bfloat16 or float32, or backend="xla"'
        )
    if plan.pages and not keys_of_a_tile(plan.page, LONGEST):
        return (
            f"a TPU kernel takes {LANES} keys or a multiple at a time, in at most {PARTS} pages, and none of them is "
            f'whole pages of {plan.page} tokens; use a page of 16, 32, 64, or a multiple of 128, or backend="xla"'
        )
    return ""


def fits(page: int, block_k: int) -> bool:
    """Whether a page has a whole number of tiles of keys, or a tile few enough pages."""
    return page % block_k == 0 or (block_k % page == 0 and block_k <= PARTS * page)


def keys_of_a_tile(page: int, most: int) -> int:
    """The longest tile of keys up to `most` that fits pages of so many tokens, 0 where there is none.

    >>> keys_of_a_tile(16, 512), keys_of_a_tile(64, 512), keys_of_a_tile(1024, 512), keys_of_a_tile(144, 512)
    (128, 512, 512, 0)
    """
    return max((n for n in range(LANES, max(most, LANES) + 1, LANES) if fits(page, n)), default=0)


def check(plan: LoopPlan, target: Target, dtype: str) -> None:
    """Raise for tiles without a kernel."""
    if why := refused(plan, dtype):
        raise LoweringError(why)
    if target.block_q % LANES or target.block_k % LANES:
        raise LoweringError(
            f"TPU tiles are multiples of {LANES}, not {target.block_q} x {target.block_k}; "
            f"pass tile=({LANES}, {LANES}) or a multiple"
        )
    if plan.pages and not fits(plan.page, target.block_k):
        raise LoweringError(
            f"a tile of {target.block_k} keys is no whole number of pages of {plan.page} tokens up to {PARTS}, nor a "
            f"page of tiles; pass tile=({target.block_q}, {keys_of_a_tile(plan.page, target.block_k)}), or none"
        )


def head(
    title: str,
    plan: LoopPlan,
    target: Target,
    geometry: Geometry,
    dtype: str,
    needs_math: bool,
    constants: Collection[str],
) -> str:
    """The head of the module: a docstring of its computation, imports, constants."""
    return filled(
        TEXT["head"],
        title=title,
        text=[f"#     {line}".rstrip() for line in (plan.text or "every key").splitlines()],
        math=["import math"] if needs_math else [],
        block_q=target.block_q,
        block_k=target.block_k,
        group=geometry.heads // geometry.kv_heads,
        sharing=list(constants),
        scale=repr(float(geometry.scale)),
        # products of bfloat16 are exact in one pass of the matrix unit, those of float32 take six
        exact="DEFAULT" if dtype == "bfloat16" else "HIGHEST",
    )


@dataclass(frozen=True)
class ForwardOptions(pallas_walk.TpuOptions):
    """The facts of a call that the text of the forward depends on, besides those of the device and the walk."""

    sinks: bool = False  # the call has attention sinks
    kv_8bit: bool = False  # keys and values have 8 bits: they are converted tile by tile
    lse_residual: bool = False  # the rounding error of lse is a result too, which a backward takes


DEFAULTS = ForwardOptions()


def emit(plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, options: ForwardOptions = DEFAULTS) -> str:
    """The source of a module. Its `attention_forward(query, key, value, walk, origin, sizes, slots, tables, sinks)`
    takes JAX arrays [batch, length, heads, dim], of keys in pages [pages, tokens, heads, dim], a `walk.TpuWalk` or
    `walk.TpuSearch`, and numbers and tables in the order of the plan; it gives (out, lse, top)."""
    check(plan, target, dtype)
    sinks, search, lse_residual = options.sinks, options.search, options.lse_residual
    inputs = pallas_inputs.place(roots(plan), strided=options.strided, program_heads=options.program_heads)
    program = pallas_walk.TpuProgram(options.program_heads, geometry.heads // geometry.kv_heads)
    words = program.holes
    walk = pallas_walk.names(search)
    numbers = [*walk, "ints", "q_origin", "k_origin", *pallas_inputs.floats(plan), *["sinks"] * sinks]
    if plan.pages:
        numbers.append("pages")
    # more than one page in a tile: each is an operand
    parts = target.block_k // plan.page if plan.pages and target.block_k > plan.page else 1
    marks = [str(i) for i in range(parts)] if parts > 1 else [""]
    key, value = ([f"{n}{mark}_ref" for mark in marks] for n in "kv")
    refs = [*numbers, *(f"{n}_ref" for n in inputs.scalars), "q_ref", *key, *value]
    unwritten = plan.mask is not None and plan.unwritten
    lengths = ["q_len", "kv_len"] if unwritten else ["kv_len"]
    blocks = inputs.blocks
    shapes = [f"{n}_shape" for n in inputs.picked]
    at_key = TEXT["at_page" if plan.pages else "at_key"]
    return head("Attention forward", plan, target, geometry, dtype, inputs.needs_math, program.constants) + filled(
        TEXT["skeleton"], **words, wide=pallas_inputs.TEXT["wide"].strip().splitlines(),
        definitions=_paged(plan, target, parts) + pallas_inputs.definitions(inputs, turns=unwritten),
        locate=pallas_walk.locate(search, options.program_heads, grouped=False).splitlines(),
        walk=", ".join(walk), tables=len(walk),
        sizes=pallas_walk.static_arguments(search, False, words["programs"], "q_tiles", "k_tiles"),
        head=program.head,
        refs=wrap(f"{', '.join([*refs, *(f'{n}_ref' for n in blocks)])},", 116),
        kept="".join(f"{n}, " for n in inputs.scratch_values.values()),
        static=", ".join(["at", *lengths, *shapes]), turned=pallas_inputs.turned(inputs),
        here=pallas_inputs.coordinate_lines(plan, inputs),
        score=_assigned(plan.score, inputs, "y", "s = jnp.broadcast_to({}, s.shape)"),
        stored=[f"v = {_together(value, options.kv_8bit)}"], keys=_together(key, options.kv_8bit),
        seen=_seen(plan, inputs, unwritten),
        drop=_assigned(plan.keep_mask, inputs, "z", "p = jnp.where({}, p, 0.0)"),
        # in a tile with the mask a weight may be the scale of a value that was never written
        weigh=_assigned(plan.weight, inputs, "w", "p = p * {0} if not partial else jnp.where(p > 0, p * {0}, 0.0)"),
        sink=TEXT["sink"].strip().splitlines() if sinks else [], low_ref=" low_ref," * lse_residual,
        low=filled(TEXT["low"], part=words["part"]).splitlines() if lse_residual else [],
        named=", low" * lse_residual, rows=2 + lse_residual, out=_out(plan, sinks, words["own"]),
        lengths=_lengths(plan),
        cast=[] if dtype != "float16" else CAST_QUERY if options.kv_8bit else CAST_ALL,
        narrowed=".astype(dtype)" if dtype == "float16" else "",
        before=[
            *pallas_inputs.before(plan, inputs),
            *["sinks = jnp.asarray(sinks, Float)"] * sinks,
            *[f"pages = jnp.clip({plan.pages}, 0, key.shape[0] - 1)  # entries that nobody reads may be anything"]
            * bool(plan.pages),
        ],
        passed=", ".join(
            pallas_walk.passed(search)
            + ["pages.reshape(-1)" if n == "pages" else n for n in numbers[len(walk) :]]
            + [inputs.picked.get(n, n) for n in inputs.scalars]
        ),
        number=len(numbers) + len(inputs.scalars),
        at_key=filled(at_key, pages=3 + len(numbers) - 1 - 2, kv_head=words["kv_head"]).splitlines(),
        of_keys=_specs(plan, parts),
        given=", ".join([f"{n}={n}" for n in lengths] + [f"{n}_shape={n}.shape" for n in inputs.picked]),
        specs=pallas_inputs.specs(inputs), scratch=pallas_inputs.scratch(inputs),
        operands=", ".join(
            ["*scalars", "query", "key, value" if parts == 1 else "*[key] * PARTS, *[value] * PARTS", *blocks]
        ),
    )  # fmt: skip


def _paged(plan: LoopPlan, target: Target, parts: int) -> list[str]:
    if not plan.pages:
        return []
    page = [f"PAGE, ROWS = {plan.page}, {min(plan.page, target.block_k)}  # tokens of a page, and of it in a block"]
    if parts == 1:
        return page
    return [*page, f"PARTS = {parts}  # pages in a tile of keys", "", "", *TEXT["together"].strip().splitlines()]


def _lengths(plan: LoopPlan) -> list[str]:
    """The text of `kv_len` and `v_dim`; the table of pages is as long as a sequence."""
    if not plan.pages:
        return ["kv_len, v_dim = value.shape[1], value.shape[3]"]
    place = [t.name for t in plan.tables].index(plan.pages)
    return [f"kv_len, v_dim = tables[{place}].shape[1] * PAGE, value.shape[3]"]


def _specs(plan: LoopPlan, parts: int) -> list[str]:
    if not plan.pages:
        return [f"pl.BlockSpec((1, 1, BLOCK_K, {n}), at_key)," for n in ("dim", "v_dim")]
    if parts == 1:
        return [f"pl.BlockSpec((1, 1, ROWS, {n}), at_page(0))," for n in ("dim", "v_dim")]
    return [f"*(pl.BlockSpec((1, 1, ROWS, {n}), at_page(part)) for part in range(PARTS))," for n in ("dim", "v_dim")]


def _together(names: list[str], kv_8bit: bool) -> str:
    """The text of the keys or values of a tile, in the dtype of the queries."""
    if len(names) > 1:
        return f"together(q_ref.dtype, {', '.join(names)})"
    return f"{names[0]}[0, 0]{'.astype(q_ref.dtype)' if kv_8bit else ''}"


def _seen(plan: LoopPlan, inputs: pallas_inputs.TableInputs, unwritten: bool) -> list[str]:
    if not unwritten:
        return _assigned(plan.mask, inputs, "x", "s = jnp.where({}, s, -jnp.inf)")
    seen = _assigned(plan.mask, inputs, "x", "seen = jnp.broadcast_to({}, s.shape)")
    return [*seen, "s = jnp.where(seen, s, -jnp.inf)", *TEXT["unwritten"].strip().splitlines()]


def _assigned(root: Expr | None, inputs: pallas_inputs.TableInputs, temporary: str, form: str) -> list[str]:
    if root is None:
        return []
    lines, value = pallas_inputs.in_kernel(root, inputs, temporary)
    return [*lines, form.format(value)]


def _out(plan: LoopPlan, sinks: bool, index: str) -> str:
    out = f"acc[{index}] * wide(shrink, acc.shape[-1])" if sinks else f"acc[{index}]"
    return out if plan.rate is None else f"{out} / (1.0 - {_rate(plan)})"


def _rate(plan: LoopPlan) -> str:
    """The kernel's text for the rate of dropout."""
    floating = [s.name for s in plan.slots if s.type is FLOAT]
    return f"floats[{floating.index(plan.rate or '')}]"
