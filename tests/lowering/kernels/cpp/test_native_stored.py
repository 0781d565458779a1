"""The native forward kernel on keys and values as caches store them: in 8 bits, with scales, in pages of a pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.attention_cases import shared
from support.lowering import brute
from support.native import call as native_call
from support.native import image as native_image

from frisket.dsl import ir
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, function, h, k, q, score
from frisket.dsl.types import FLOAT, INT
from frisket.lowering import dense
from frisket.lowering.kernels.cpp import forward as cpp
from frisket.lowering.plan import (
    K_SCALE,
    PAGES,
    RATE,
    SEED,
    V_SCALE,
    Geometry,
    Pages,
    ProgramFacts,
    Target,
    make_plan,
    survives,
)
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.machine import cpp_build as native_build

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

EIGHT = ("int8", "float8_e4m3fn", "float8_e5m2")
TO = {"bfloat16": native_call.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}
NEAR = {"float32": 4e-6, "float64": 1e-13, "bfloat16": 8e-3, "float16": 1e-3}  # of 1 + |wanted|
causal = q >= k


@dataclass(frozen=True)
class Case:
    mask: ir.Expr = causal
    mod: ir.Expr | None = None
    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 1
    kv_len: int = 320
    q0: object = 300
    dim: int = 64
    v_dim: int = 64
    dtype: str = "float32"
    stored: str = "int8"
    page: int = 0
    turned: bool = False  # scales are [batch, kv_len, kv_heads], as JAX's are
    scales: bool = True
    rate: float = 0.0
    tile: tuple = (48, 64)
    precision: str = "ieee"

    def but(self, **changes):
        return replace(self, **changes)


DECODE = Case(batch=2)
PREFILL = Case(q_len=100, q0=200)
CASES = {
    "decode": DECODE,
    "decode-pages": DECODE.but(page=16, stored="float8_e4m3fn"),
    "decode-large-pages": DECODE.but(page=48, kv_len=336, turned=True, dim=40, v_dim=24, stored="float8_e5m2"),
    "decode-plain-pages": DECODE.but(page=32, stored="", scales=False, q0=np.array([300, 70])),
    "decode-bfloat16": DECODE.but(dtype="bfloat16", kv_heads=4),
    "decode-bfloat16-plain": DECODE.but(dtype="bfloat16", kv_heads=4, stored="float8_e4m3fn", scales=False),
    "decode-bfloat16-pages": DECODE.but(dtype="bfloat16", stored="", page=16, dim=72, scales=False),
    "decode-float16": DECODE.but(dtype="float16", stored="float8_e4m3fn", kv_heads=1),
    "decode-float64": DECODE.but(dtype="float64", page=16, dim=24, v_dim=20, heads=3, kv_heads=1),
    "many-rows-of-a-head": DECODE.but(heads=12, kv_heads=1, page=16, tile=(48, 128)),
    "seven-rows": DECODE.but(heads=7, kv_heads=1, q_len=1, dtype="bfloat16", stored="float8_e5m2"),
    "prefill": PREFILL,
    "prefill-pages": PREFILL.but(page=64, stored="float8_e5m2", turned=True),
    "prefill-plain-pages": PREFILL.but(page=16, stored="", scales=False, dim=40, v_dim=72),
    "prefill-bfloat16-pages": PREFILL.but(dtype="bfloat16", stored="float8_e4m3fn", page=16),
    "prefill-holes": PREFILL.but(mask=causal & (k % 3 > 0), stored="", scales=False),
    "prefill-bfloat16-holes": PREFILL.but(
        mask=causal & (k % 3 > 0), dtype="bfloat16", stored="float8_e4m3fn", page=32
    ),
    "prefill-bfloat16-int8": PREFILL.but(mask=causal & (k % 3 > 0), dtype="bfloat16", page=32),
    "decode-holes": DECODE.but(mask=causal & (k % 3 > 0), stored="", page=16),
    "window-softcap": PREFILL.but(mask=causal & (q - k < 70), mod=20.0 * function("tanh", score / 20.0), page=16),
    "heads-differ": DECODE.but(mask=causal & (q - k < 100 * (h + 1)), page=16, q_len=3),
    "dropout": PREFILL.but(rate=0.3, batch=2, page=16),
}  # fmt: skip


class Problem:
    """A case with its arrays and what the reference says. What no query sees is NaN, in memory that is floats, scales
    included; entries of pages without visible keys are wild."""

    def __init__(self, case: Case) -> None:
        self.case, draw = case, np.random.default_rng(3)
        c, dtype = case, case.stored or case.dtype
        q0 = np.broadcast_to(c.q0, c.batch)
        origin = (0, 0, c.q0, 0)
        sizes = (c.batch, c.heads, int(q0.max()) + c.q_len, c.kv_len)
        self.g = Geometry(c.batch, c.heads, c.kv_heads, c.q_len, c.kv_len, c.dim, c.v_dim, c.dim**-0.5, origin, sizes)
        env = dense.coordinates(self.g.problem)
        seen = dense.visible(c.mask, env, {}, (c.batch, c.heads, c.q_len, c.kv_len))
        seen = seen.any(2).reshape(c.batch, c.kv_heads, -1, c.kv_len).any(2)

        self.q, _ = rounded(draw.standard_normal((c.batch, c.heads, c.q_len, c.dim)), c.dtype)
        known, self.tables = {}, {}
        for n, dim in (("k", c.dim), ("v", c.v_dim)):
            entries = draw.standard_normal((c.batch, c.kv_heads, c.kv_len, dim)) * (40 if dtype == "int8" else 1)
            scale = draw.uniform(0.5, 1.5, entries.shape[:3]).astype(np.float32) / (40 if dtype == "int8" else 1)
            held, exact = rounded(entries, dtype)
            known[n] = exact * (scale[..., None] if c.scales else 1)
            if held.dtype != np.int8:
                held[~seen] = rounded(np.array(np.nan), dtype)[0]
            scale[~seen] = np.nan
            setattr(self, n, self.paged(held))
            scale = self.paged(scale)
            self.tables[{"k": K_SCALE, "v": V_SCALE}[n]] = scale.swapaxes(1, 2) if c.turned else scale
        self.known = known["k"], known["v"]
        if c.page:
            used = seen.any(1).reshape(c.batch, -1, c.page).any(2)
            self.tables[PAGES] = np.where(used, self.places(), draw.choice([-7, 10**6, -(2**31)], used.shape))

    def places(self):
        c = self.case
        pages = c.batch * c.kv_len // c.page
        return np.random.default_rng(4).permutation(pages + 3)[:pages].reshape(c.batch, -1).astype(np.int32)

    def paged(self, x):
        """[batch, kv_heads, kv_len, ...] to [pages, kv_heads, page, ...], three pages unused."""
        c = self.case
        if not c.page:
            return x
        pool = np.full((c.batch * c.kv_len // c.page + 3, c.kv_heads, c.page, *x.shape[3:]), 85, x.dtype)
        parts = x.reshape(c.batch, c.kv_heads, -1, c.page, *x.shape[3:]).swapaxes(1, 2)
        pool[self.places()] = parts
        return pool

    def plan(self):
        c = self.case
        at = (lookup(PAGES, (b, k // c.page), INT), k % c.page) if c.page else (b, k)
        head = h // (c.heads // c.kv_heads) if c.heads > c.kv_heads else h
        index = (at[0], at[1], head) if c.turned else (at[0], head, at[1])
        scaled = score * lookup(K_SCALE, index, FLOAT)
        mod = c.mod if not c.scales else scaled if c.mod is None else ir.substitute(c.mod, {ir.SCORE: scaled})
        value_scale = lookup(V_SCALE, index, FLOAT) if c.scales else None
        pages = Pages(PAGES, c.page) if c.page else None
        limits = dict.fromkeys((*ir.COORDINATES, *ir.SIZES, PAGES), 2.0**14)
        return make_plan(
            ProgramExprs(c.mask, mod),
            "a mask",
            ProgramFacts(limits=limits),
            keep_mask=survives() if c.rate > 0 else None,
            value_scale=value_scale,
            pages=pages,
        )

    def reference(self):
        c = self.case
        same = {"scale": self.g.scale, "tables": {}, "problem": self.g.problem}
        kept = {"keep_mask": survives(), "rate": c.rate} if c.rate else {}
        params = {SEED: 5, RATE: float(np.float32(c.rate))}
        q = exact_of(self.q, c.dtype)
        out, lse = dense.attention(
            q, *self.known, dense.DenseCall(ProgramExprs(c.mask, c.mod), params=params, **kept, **same)
        )
        return (
            out,
            lse,
            dense.top(q, self.known[0], dense.DenseCall(ProgramExprs(c.mask, c.mod), params=params, **same)),
        )

    def spans(self):
        c, g = self.case, self.g
        where = {"origin": g.origin, "sizes": g.sizes}
        return shared(
            brute.spans(
                c.mask, c.q_len, c.kv_len, batch=c.batch, heads=c.heads, block=c.tile, params={}, tables={}, **where
            )
        )

    def run(self, **options):
        c, plan = self.case, self.plan()
        slots = plan.slot_values({SEED: 5, RATE: float(np.float32(c.rate))})
        tables = {t.name: self.tables[t.source] for t in plan.tables}
        target = Target("cpp", *c.tile, precision=c.precision)
        return native_call.forward(
            plan,
            self.spans(),
            self.g,
            self.q,
            self.k,
            self.v,
            slots,
            tables,
            target,
            c.dtype,
            stored=c.stored,
            **options,
        )

    def check(self, found):
        real = NEAR["float64" if self.case.dtype == "float64" else "float32"]
        for name, got, want, near in zip(
            ("out", "lse", "top"), found, self.reference(), (NEAR[self.case.dtype], real, real), strict=True
        ):
            got = exact_of(got, self.case.dtype) if name == "out" else got
            off = np.where(got == want, 0, np.abs(got - want) / (1 + np.abs(want)))
            worst = np.nan_to_num(off, nan=np.inf).max()
            assert worst <= near, f"{name}: off by {worst:.2e}, {near:.2e} allowed"


def rounded(x, dtype):
    """(as memory holds it, the numbers that are there)."""
    if dtype in TO:
        held = TO[dtype](x)
    else:
        held = np.asarray(np.clip(np.rint(x), -127, 127) if dtype == "int8" else x).astype(dtype)
    return held, exact_of(held, dtype)


def exact_of(x, dtype):
    return np.asarray(native_call.from_bfloat16(x) if dtype == "bfloat16" else x, np.float64)


USUAL = ("decode-bfloat16-plain", "prefill-bfloat16-int8")
HERE = [v for v in native_build.VARIANTS if v != "native" and not native_build.lacking(v)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES])
def test_native_forward_reads_stored_keys_and_values(name):
    made = Problem(CASES[name])
    made.check(made.run())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode-large-pages", "decode-bfloat16", "prefill-bfloat16-pages"])
@pytest.mark.parametrize("variant", HERE)
def test_native_stored_keys_work_on_every_instruction_set(variant, name):
    made = Problem(CASES[name])
    made.check(made.run(variant=variant))


@pytest.mark.parametrize("variant", ["native", *(pytest.param(v, marks=pytest.mark.slow) for v in HERE)])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [pytest.param(d, x, marks=() if (d, x) == ("bfloat16", EIGHT[1]) else pytest.mark.exhaustive)
     for d in ("bfloat16", "float32") for x in EIGHT],
)  # fmt: skip
def test_native_forward_reads_all_256_values_of_8_bits(dtype, stored, variant):
    """A query that sees one key gets its value: each of the 256 there are, NaN, infinities, subnormal ones too."""
    case = CASES["decode-bfloat16-plain"].but(batch=1, q0=0, kv_len=16, dtype=dtype, stored=stored)
    made = Problem(case)
    made.v[0, :, 0] = np.arange(256, dtype=np.uint8).view(made.v.dtype).reshape(4, 64)
    out, *_ = made.run(variant=variant)
    np.testing.assert_array_equal(exact_of(out, dtype)[0, :, 0], made.v[0, :, 0].astype(np.float32))


class Watched(native_image.Problem):
    """The same for a program of its own, each array with an end that a sanitizer watches."""

    def __init__(self, made):
        self.made, self.g, self.plan, self.spans, self.sinks = made, made.g, made.plan(), made.spans(), None
        self.case = SimpleNamespace(block=made.case.tile)
        self.q, self.k, self.v = made.q, made.k, made.v
        self.dtype, self.real = made.q.dtype, np.dtype("float64" if made.case.dtype == "float64" else "float32")
        self.params = {SEED: 5, RATE: float(np.float32(made.case.rate))}

    def kernel(self, kind):
        c = self.made.case
        arrays = cpp.CppArrays(c.dim, c.v_dim, c.dtype, c.stored)
        return cpp.CppKernel(self.plan, Target("cpp", *c.tile), arrays)

    def _fields(self):
        return super()._fields() | {"pages": [len(self.k)]}

    def _tables(self):
        words = []
        for t in self.plan.tables:
            x = np.ascontiguousarray(self.made.tables[t.source], self.real if t.type is FLOAT else np.int32)
            words += [x, *x.shape, *(n // x.itemsize for n in x.strides)]
        return words


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread"])
def test_native_stored_kernels_pass_sanitizers(sanitizer, name, tmp_path):
    flags = "-O1", "-g1", "-march=native", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"
    made = Problem(CASES[name])
    runner = native_image.program(tmp_path, native_build.compiler(), flags, threads=4)
    found = Watched(made).run(runner, backward=False)
    made.check([found[n] for n in ("out", "lse", "top")])
