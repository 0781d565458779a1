"""Chooses tile sizes of the native kernels, by a model measured on one core of a Zen 4 (AVX-512, 1 MiB of L2).

Measured, as parts of the speed of a plain product, at D = 64 unless a line says otherwise:

    rows see all keys before them    96 x 64: 1.03   96 x 128: 1.05   192 x 256: 1.06; bfloat16 1.74, 1.84
    the same at D = 256              96 x 64: 0.97   96 x 128: 1.00   192 x 128: 1.05; 48 rows: 0.87
    window of 256, documents of 256  96 x 64: 0.84   96 x 128: 0.85   192 x 256: 0.85
    neighbourhoods of 13 x 13        96 x 64: 0.30   96 x 128: 0.24   192 x 256: 0.21

A kernel leaves out what a few rows do not see of a tile's ends, so wide tiles cost little where rows see one range of
keys. They cost much where rows see many ranges. Tall tiles pack keys less often, which counts when heads are wide. For
bfloat16 on the matrix unit of an Intel Xeon (AMX, 2 MiB of L2), tiles of 256 keys take 0.92 of the time of those of
128. With its other vectors 0.98 to 1.00, and with those of AVX2 1.00 at D = 128 and 1.06 at D = 64. float32 in six
products takes tiles of three times the bytes. 192 x 64 takes 0.93, 0.84 and 0.85 of the time of 96 x 64 at D = 64, 128
and 256.

float32 by vectors of AVX-512 and AVX2 there: tiles of 64 keys take, up to D = 128, 0.95 to 1.02 of the time of 128
forward. They take 0.92 to 1.01 with backward, 0.85 to 1.01 under windows, documents and neighbourhoods. Above, 0.99 to
1.02.
"""

from __future__ import annotations

import os

from frisket.dsl.ir import Expr, uses, walk
from frisket.grammar.memo import memo
from frisket.lowering.dtypes import DTYPES, HALVES, SINGLE, accumulate
from frisket.lowering.plan import MAX_DECODE_QUERIES, Geometry
from frisket.lowering.simplify.affine import is_int_comparison, relation

ITEMS = 64  # tiles of queries wanted at least, so that many threads have work
SIX_QUERIES, SIX_KEYS, SIX_DIM = 64, 1024, 64  # of a call whose float32 a matrix unit multiplies, at least


def pays(g: Geometry, dtype: str, is_local_window: bool) -> bool:
    """Whether a matrix unit of bfloat16 multiplies float32 faster than vectors do, in six products."""
    long = g.q_len >= SIX_QUERIES and g.kv_len >= SIX_KEYS and min(g.head_dim, g.v_dim) >= SIX_DIM
    return dtype == SINGLE and not g.kv_dtype and not is_local_window and long


@memo(group="expressions")
def long_runs(mask: Expr) -> bool:
    """Whether rows of a mask see keys in long runs, as far as the mask says it without its tables.

    Bounds of k, of q, and of q - k on one side leave them. Of short runs vectors multiply less (design notes)."""
    sides = set()
    for e in _parts(mask):
        if not uses(e) >= {"q", "k"} and any(n.op == "lookup" for n in walk(e)):  # padding, most often
            continue
        op, form = relation(e.op, *e.args) if is_int_comparison(e) else ("eq", None)
        factors = {a: f for a, f in form.terms if uses(a) & {"q", "k"}} if form else {}
        if op in ("eq", "ne") or any(a.op != "var" for a in factors):
            return False
        if len(factors) == 2:
            sides.add((op == "ge") == (next(f for a, f in factors.items() if a.name == "q") > 0))
    return len(sides) < 2


def _parts(e: Expr) -> list[Expr]:
    """The parts of `and` and `or` in which a position occurs."""
    if e.op in ("and", "or"):
        return [part for a in e.args for part in _parts(a)]
    return [e] if uses(e) & {"q", "k"} else []


def tiles(g: Geometry, dtype: str, is_local_window: bool, six: bool = False) -> tuple[int, int]:
    """The queries and keys of a tile: `tiles(geometry, "float32", is_local_window=False)`. `is_local_window`: rows see
    few keys, or several runs of them. `six`: float32 is multiplied on a matrix unit. All numbers of queries share a
    text."""
    if six:
        return next((n for n in (192, 128) if g.batch * g.heads * -(-g.q_len // n) >= ITEMS * n // 192), 64), 64
    entry = DTYPES[accumulate(dtype)].bytes
    keys = 128 if dtype in HALVES or max(g.head_dim, g.v_dim) > 128 else 64
    many = g.q_len > MAX_DECODE_QUERIES and g.kv_len >= 1024
    keys = 256 if dtype == "bfloat16" and not is_local_window and many else keys
    while keys > 32 and keys * (g.head_dim + g.v_dim) * entry > second_level() // 2:
        keys //= 2
    queries = 96 if is_local_window else tallest(g.head_dim, g.v_dim)
    if 0 < g.q_len <= MAX_DECODE_QUERIES:  # a tile full of queries needs no mask where they see all of its keys
        return g.q_len, keys
    while queries > 32 and g.batch * g.heads * -(-g.q_len // queries) < ITEMS:
        queries = 64 if queries == 96 and dtype == "bfloat16" else queries // 2  # 32 at once on matrix units
    return queries, keys


def tallest(head_dim: int, v_dim: int, six: bool = False) -> int:
    """The most queries of a tile."""
    return 192 if six or max(head_dim, v_dim) > 128 else 96


@memo(group="once")
def second_level() -> int:
    """The bytes of a core's second-level cache; 1 MiB where the system does not say."""
    try:
        # 0 or -1 where the system does not know
        known = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (AttributeError, ValueError, OSError):
        known = 0
    return known if known > 0 else 1 << 20
