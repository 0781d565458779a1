"""What Pallas kernels are lowered and compiled for: plans at lengths of use, and one of every operator."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from frisket.dsl import ir
from frisket.dsl.ir import build, lit, lookup, to_float
from frisket.dsl.sugar import eq, function, h, k, q, score
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.kernels.pallas_tpu.walk import TpuSearch, TpuWalk, walk
from frisket.lowering.plan import Geometry, LoopPlan, ProgramFacts, Spans, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from support.attention_cases import Case, causal

LENGTH = 32768
LONG = {
    "causal": Case(causal),
    "window": Case(causal & (q - k < 1024)),
    "documents": Case(
        causal & eq(lookup("doc", (q,)), lookup("doc", (k,))), tables={"doc": np.arange(LENGTH, dtype=np.int32) // 999}
    ),
    "softcap": Case(causal, 30.0 * function("tanh", score / 30.0)),
    "alibi": Case(causal, score + lookup("slope", (h,), FLOAT) * (k - q), tables={"slope": np.ones(8, np.float32)}),
    "relative bias": Case(
        causal, score + lookup("bias", (h, q - k), FLOAT), tables={"bias": np.ones((8, LENGTH), np.float32)}
    ),
    "plane": Case(causal, score + lookup("plane", (q, k), FLOAT), tables={"plane": np.ones((LENGTH, 512), np.float32)}),
    "relation": Case(
        lookup("sees", (lookup("kind", (q,)), lookup("kind", (k,))), BOOL),
        tables={"kind": np.zeros(LENGTH, np.int32), "sees": np.ones((8, 8), bool)},
    ),
}


def long_plan(case: Case, dropout: bool = False) -> LoopPlan:
    limits = dict.fromkeys([*ir.COORDINATES, *ir.SIZES, *case.tables], 2.0**15)
    return make_plan(
        ProgramExprs(case.mask, case.score),
        "the text",
        ProgramFacts(limits=limits),
        keep_mask=survives() if dropout else None,
    )


def causal_walk(geometry: Geometry, block: tuple[int, int], group: int = 1, parts: int = 1) -> TpuWalk | TpuSearch:
    """A walk of tiles on and below the diagonal; with `group` for programs of key heads, with `parts` of so many query
    heads."""
    rows, columns = -(-geometry.q_len // block[0]), -(-geometry.kv_len // block[1])
    last = np.arange(rows)
    full = np.minimum(last * block[0] // block[1], columns)
    bounds = np.stack([0 * last, 0 * last, full, np.minimum(full + 1, columns)], 1)[None, :, None].astype(np.int32)
    slice_of = np.zeros((geometry.batch, geometry.heads), np.int32)
    return walk(Spans(bounds, np.ones((1, rows), np.int32), slice_of), columns, group, parts)


def shapes_of(tree: object, sharding: jax.sharding.Sharding | None = None) -> object:
    """The inputs without values: numbers as JAX takes them."""

    def one(x: object) -> jax.ShapeDtypeStruct:
        array = np.asarray(x)
        dtype = {"i": np.int32, "f": np.float32, "b": np.bool_}[array.dtype.kind]
        return jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)

    return jax.tree.map(one, tree)


# -- operators --------------------------------------------------------------------------------------


def _operand(type: object, i: int) -> ir.Expr:
    return {
        INT: [q, lit(2), k][i], FLOAT: [score, to_float(k - q), to_float(q)][i], BOOL: [q >= k, eq(q % 3, 0), k < 7][i]
    }[type]  # fmt: skip


_FORMS = {
    "where": [(BOOL, BOOL, BOOL), (BOOL, FLOAT, FLOAT)], "random": [(INT, INT)], "and": [(BOOL, BOOL)],
    "or": [(BOOL, BOOL)], "xor": [(BOOL, BOOL)], "not": [(BOOL,)], "int": [(BOOL,), (FLOAT,)],
}  # fmt: skip


def _forms(op: str) -> list[tuple[object, ...]]:
    """Argument types of one operator."""
    if op in _FORMS:
        return _FORMS[op]
    found = []
    for types in [(INT,), (FLOAT,), (INT, INT), (FLOAT, FLOAT)]:
        try:
            if ir.result_type(op, types) is not None and ir.OPERATORS[op].arity == len(types):
                found.append(types)
        except ValueError:
            continue
    return found


def operator_cases(op: str) -> Iterator[Case]:
    """One Expr of each form, in a mask or a score mod."""
    for types in _forms(op):
        args = [_operand(t, i) for i, t in enumerate(types)]
        e = ir.random(*args) if op == "random" else build(op, *args)
        if e.type is BOOL and "score" in ir.uses(e):
            e = ir.substitute(e, {score: to_float(q)})
        yield Case(e) if e.type is BOOL else Case(causal, score + e)
