"""Keys and values as caches store them: in 8 bits beside scales, in pages of a pool, with NaN wherever no query looks;
and attention to what they mean, by the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from frisket.dsl import ir
from frisket.dsl.ir import Expr, lookup
from frisket.dsl.sugar import b, function, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering import dense
from frisket.lowering.plan import LoopPlan, Pages, ProgramFacts, make_plan
from frisket.lowering.simplify import ProgramExprs
from support import attention_cases as cases
from support.attention_cases import Case

START, END = lookup("start", (b,)), lookup("end", (b,))
DECODE = (k <= q + START) & (k < END)  # queries behind what every sequence has of its own, and nothing behind its end
DTYPES = {n: np.dtype(getattr(ml_dtypes, n, n)) for n in
          ("int8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32")}  # fmt: skip
SOFTCAP = 20.0 * function("tanh", score / 20.0)


@dataclass(frozen=True)
class Stored:
    """`kv` is the dtype of k and v, that of q where it is empty; `page` tokens of a page, 0: in one piece."""

    case: Case
    kv: str = ""
    scales: bool = True
    page: int = 0


def decode(ends: tuple[int, ...], queries: int = 1, kv_len: int = 160, mask: Expr = DECODE, **changes: Any) -> Case:
    """The last `queries` of every sequence, which are `ends` long, in arrays for `kv_len` tokens; an end of 0 is that
    of an empty sequence."""
    end = np.array(ends, np.int32)
    known = {"heads": 4, "batch": len(ends), "block": (16, 32)} | changes
    return Case(mask, q_len=queries, kv_len=kv_len, tables={"start": end - queries, "end": end}, **known)


STORED = {
    "int8": Stored(decode((150, 37, 0)), "int8"),
    "int8 in pages": Stored(decode((160, 37, 0)), "int8", page=32),
    "small pages": Stored(decode((150, 37), 3, score=SOFTCAP), "int8", page=16),
    "odd pages": Stored(decode((96, 50), 3, kv_len=144), "int8", page=48),
    "large pages": Stored(decode((256, 70), 2, kv_len=256), "int8", page=128),
    "pages alone": Stored(decode((150, 37), 2), scales=False, page=32),
    "scales alone": Stored(decode((150, 37), 2)),
    "as they are": Stored(decode((150, 37), 3), scales=False),
    "float8": Stored(decode((150, 37), 3, dtype="bfloat16"), "float8_e4m3fn", page=32),
    "wide float8": Stored(decode((150, 37), 3, dtype="float16"), "float8_e5m2"),
    "half": Stored(decode((150, 37), 3, kv_len=192, dtype="bfloat16", dim=40, v_dim=72), "int8", page=64),
    "many queries": Stored(decode((150, 90), 70, heads=2, kv_heads=1, block=(32, 32)), "int8", page=32),
    "many queries, small pages": Stored(decode((150, 90), 70, heads=2, block=(32, 64), dim=96), "int8", page=16),
    "a head each": Stored(decode((150, 37), heads=2), "int8", page=16),
    # Rows of a tile that are no queries see what was never written.
    "no end": Stored(
        Case(k <= q, heads=4, batch=2, q_len=3, kv_len=96, origin=(0, 0, 34, 0), sizes=(2, 4, 96, 96), block=(16, 32)),
        page=32,
    ),
    "no mask": Stored(Case(heads=4, batch=2, q_len=3, kv_len=96, block=(16, 32)), "int8", page=32),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A plan and its arrays, k and v in `layout` ("bhsd" or "bshd", of pages instead of batch entries where they are in
    pages), q [batch, length, heads, dim]; `tables` by the user's names."""

    plan: LoopPlan
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    tables: dict[str, np.ndarray]
    want: np.ndarray = field(repr=False)  # [batch, heads, q_len, dim], float64
    want_lse: np.ndarray = field(repr=False)


def problem(stored: Stored, layout: str = "bhsd") -> Problem:
    case, draw = stored.case, np.random.default_rng(5)
    group = case.heads // case.kv_heads
    own = DTYPES[case.dtype]
    query = draw.standard_normal((case.batch, case.q_len, case.heads, case.dim)).astype(own)
    hidden = ~_seen(case)
    kept = {}
    for name, dim in (("k", case.dim), ("v", case.v_dim)):
        meant = draw.standard_normal((case.batch, case.kv_heads, case.kv_len, dim)) * (0.3 if name == "v" else 1.0)
        kept[name] = _kept(meant, stored, DTYPES[stored.kv or case.dtype], hidden)
    means = [np.where(hidden[:, None, :, None], 0, codes.astype(np.float64) * scale[..., None].astype(np.float64))
             for codes, scale in kept.values()]  # fmt: skip
    rows = query.astype(np.float64).transpose(0, 2, 1, 3)
    want, want_lse = dense.attention(
        rows,
        *means,
        dense.DenseCall(
            ProgramExprs(case.mask, case.score),
            scale=case.dim**-0.5,
            params={},
            tables=case.tables,
            problem=case.problem,
        ),
    )
    tables = dict(case.tables)
    arrays = {n: codes for n, (codes, _) in kept.items()}
    scales = {n: scale for n, (_, scale) in kept.items()}
    entry: tuple[Expr, Expr] = (b, k)
    if stored.page:
        size = stored.page
        tables["pages"], arrays = _paged(arrays, size, hidden, draw)
        _, scales = _paged(scales, size, hidden, draw, tables["pages"])
        entry = lookup("pages", (b, k // size)), k % size
    places = (entry[0], h // group, entry[1]) if layout == "bhsd" else (*entry, h // group)
    scaled, value_scale = case.score, None
    if stored.scales:
        tables |= {f"{n}_scale": _laid(x, layout) for n, x in scales.items()}
        start = score * lookup("k_scale", places, FLOAT)
        scaled = start if case.score is None else ir.substitute(case.score, {ir.SCORE: start})
        value_scale = lookup("v_scale", places, FLOAT)
    limits = dict.fromkeys((*ir.COORDINATES, *ir.SIZES, *tables), 2.0**14)
    made = make_plan(
        ProgramExprs(case.mask, scaled),
        "stored",
        ProgramFacts(limits=limits),
        value_scale=value_scale,
        pages=Pages("pages", stored.page) if stored.page else None,
        unwritten=True,
    )
    return Problem(made, query, *(_laid(x, layout) for x in arrays.values()), tables, want, want_lse)


def _seen(case: Case) -> np.ndarray:
    """[batch, kv_len]: whether some query sees a key."""
    if case.mask is None:
        return np.ones((case.batch, case.kv_len), bool)
    problem = case.problem
    env = dense.coordinates(problem)
    return dense.visible(case.mask, env, case.tables, problem.lengths).any((1, 2))


def _kept(meant: np.ndarray, stored: Stored, dtype: np.dtype, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales float32) of each token and head; NaN where nothing is seen, as far as there is one."""
    scale = np.ones(meant.shape[:3], np.float32)
    if stored.scales:
        scale = (np.abs(meant).max(-1) / (127 if dtype == np.int8 else 4)).astype(np.float32)
    codes = meant / scale[..., None]
    codes = (np.rint(codes) if dtype == np.int8 else codes).astype(dtype)
    none = np.broadcast_to(hidden[:, None], scale.shape)
    if stored.scales:
        scale[none] = np.nan
    codes[none] = 99 if dtype == np.int8 else np.nan
    return codes, scale


def _paged(
    arrays: dict[str, np.ndarray], size: int, hidden: np.ndarray, draw: np.random.Generator, pages: Any = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The table [batch, pages per sequence], nonsense where it leads to nothing that is seen, and the pools."""
    batch, length = hidden.shape
    each = length // size
    if pages is None:
        pages = 1 + draw.permutation(batch * each).reshape(batch, each).astype(np.int32)
        nothing = hidden.reshape(batch, each, size).all(-1)
        pages[nothing] = draw.choice([-(2**30), -1, 2**30], nothing.sum())
    pools = {}
    for name, x in arrays.items():
        bad = 99 if x.dtype == np.int8 else np.nan
        pool = np.full((batch * each + 3, x.shape[1], size, *x.shape[3:]), bad, x.dtype)
        for at in np.ndindex(batch, each):
            if 0 < pages[at] < len(pool):
                pool[pages[at]] = x[at[0], :, at[1] * size : (at[1] + 1) * size]
        pools[name] = pool
    return pages, pools


def _laid(x: np.ndarray, layout: str) -> np.ndarray:
    return x if layout == "bhsd" else np.ascontiguousarray(x.swapaxes(1, 2))


def check(stored: Stored, made: Problem, out: Any, lse: Any) -> None:
    """Check that out [batch, heads, q_len, dim] has no error beyond what attention of these dtypes may have."""
    case = stored.case
    loose = 5e-6 if case.dtype == "float32" else cases.allowed(case)
    error = np.abs(np.asarray(out, np.float64) - made.want)
    assert error.max() <= loose, error.max()  # and so no NaN
    rough = 5e-6 if case.dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(lse), made.want_lse, rtol=rough, atol=rough)
