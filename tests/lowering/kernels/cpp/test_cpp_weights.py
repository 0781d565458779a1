"""The backward's weights are the forward's, however large the scores are.

With values that are the identity, out is the softmax itself; with cotangents that are, so is dv, turned.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.native import call as native_call

from frisket.lowering import pipeline as bind
from frisket.lowering.plan import RATE, SEED, Geometry, Target
from frisket.runtime.calls.program import program_of
from frisket.runtime.machine import cpp_build as native_build
from lowering.kernels.cpp import test_cpp_forward

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())
R = np.random.default_rng(8)
SIZES = (1e-3, 1.0, 10.0, 1e3, 1e5, 1e9, 1e18, 1e30)
TO = {"bfloat16": native_call.bfloat16, "float16": np.float16, "float32": np.float32, "float64": np.float64}
ROUNDING = {"bfloat16": 2**-7, "float16": 2**-9, "float32": 1e-6, "float64": 1e-14}


@dataclass(frozen=True)
class Case:
    mask: str | None = "causal"
    score: str | None = None
    params: dict = field(default_factory=dict)
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 77
    kv_len: int = 83
    dim: int = 40
    dtype: str = "float32"
    tile: tuple = (32, 48)
    sinks: bool = False
    rate: float | None = None

    def but(self, **changes):
        return replace(self, **changes)


PLAIN = Case()
TABLES = test_cpp_forward.EVERY_TABLE
BIAS = Case(
    "causal & doc[q] == doc[k]", "score * c + bias[h, q - k] - 0.3 * sl[h] * (q - k) + row[q] * score",
    {"doc": np.sort(R.integers(0, 4, 90)), "bias": R.standard_normal((4, 90)), "sl": R.standard_normal(4), "c": 0.7,
     "row": R.standard_normal(90)},
)  # fmt: skip
CASES = {
    # sizes by which values have the head size of that kernel
    "every table": Case(TABLES.mask, TABLES.score, TABLES.params, q_len=40, kv_len=80, dim=24, tile=TABLES.tile),
    "itself": Case("k == q", sinks=True),
    "bias": BIAS,
    "plain": PLAIN,
    "few rows": PLAIN.but(q_len=3, mask="k <= q + 70"),
    "few rows and bias": BIAS.but(q_len=2, mask="doc[q] <= doc[k]"),
    "heads together": PLAIN.but(q_len=5, kv_heads=1, mask="k <= q + 70"),
    "few rows at the end": PLAIN.but(q_len=69),
    "one row": PLAIN.but(q_len=1, mask=None, heads=2, kv_heads=2),
    "few rows of bfloat16": PLAIN.but(q_len=2, mask=None, dtype="bfloat16"),
    "softcap": PLAIN.but(score="30 * tanh(score / 30)"),
    "minus infinity": PLAIN.but(score="score + where(k % 3 == 0, -inf, 0.0)"),
    "empty rows": PLAIN.but(mask="q > k & k > 20", sinks=True),
    "dropout": PLAIN.but(rate=0.3),
    "bfloat16": PLAIN.but(dtype="bfloat16"),
    "bfloat16 and bias": BIAS.but(dtype="bfloat16", dim=41),
    "float16": PLAIN.but(dtype="float16"),
    "float64": PLAIN.but(dtype="float64", score="score * c", params={"c": 0.9}),
    "wide": PLAIN.but(dim=200, heads=1, kv_heads=1),
    "tiles": PLAIN.but(tile=(7, 16), dim=8),
}  # fmt: skip
QUICK = ("every table",)


class Weights:
    """The kernels of a case, and the weights they find."""

    def __init__(self, case):
        self.case = c = case
        program = program_of(c.mask, c.score, c.params)
        self.group = c.heads // c.kv_heads
        self.v_dim = max(c.kv_len, self.group * c.q_len)
        self.g = Geometry(1, c.heads, c.kv_heads, c.q_len, c.kv_len, c.dim, self.v_dim, c.dim**-0.5, (0, 0, 0, 0))
        self.work = bind.work(program, self.g.problem, c.tile, proofs=True, dropout=c.rate is not None)
        drop = {} if c.rate is None else {SEED: 5, RATE: float(np.float32(c.rate))}
        self.slots = {s.name: drop.get(s.source, self.work.slots[s.name]) for s in self.work.plan.slots}
        self.sinks = np.linspace(-2, 3, c.heads) if c.sinks else None

    def found(self, size, variant="native"):
        """[heads, q_len, kv_len] of the forward and of the backward, where scores are about `size`."""
        c, group = self.case, self.group
        draw = np.random.default_rng(1)
        q, k = (
            TO[c.dtype](np.float64(size) ** 0.5 * draw.standard_normal((1, n, length, c.dim)))
            for n, length in ((c.heads, c.q_len), (c.kv_heads, c.kv_len))
        )
        one = np.eye(self.v_dim)
        v = TO[c.dtype](np.tile(one[: c.kv_len], (1, c.kv_heads, 1, 1)))
        dout = TO[c.dtype](np.tile(one[: group * c.q_len].reshape(1, group, c.q_len, -1), (1, c.kv_heads, 1, 1)))
        rest = self.slots, self.work.tables, Target("cpp", *c.tile), c.dtype
        more = {"sinks": self.sinks, "variant": variant}
        norm = np.full((1, c.heads, c.q_len, 2), 7, np.float64 if c.dtype == "float64" else np.float32)
        out, lse, _ = native_call.forward(self.work.plan, self.work.spans, self.g, q, k, v, *rest, **more, norm=norm)
        found = native_call.backward(
            self.work.plan, self.work.spans, self.g, q, k, v, out, lse, dout, None, *rest, **more, norm=norm
        )
        out, dv = (native_call.from_bfloat16(x) if c.dtype == "bfloat16" else x for x in (out, found["v"]))
        turned = dv[0].reshape(c.kv_heads, c.kv_len, -1)[..., : group * c.q_len].transpose(0, 2, 1)
        return out[0, ..., : c.kv_len].astype(float), turned.reshape(c.heads, c.q_len, -1).astype(float)


def check(case, variant="native"):
    weights = Weights(case)
    for size in SIZES[:5] if case.dtype == "float16" else SIZES:
        forward, backward = weights.found(size, variant)
        error = np.abs(forward - backward).max()
        assert error <= ROUNDING[case.dtype], f"scores of {size}: weights differ by {error:.1e}"
        if case.rate is None and not case.sinks:
            total = backward.sum(-1)
            seen = forward.any(-1)
            assert np.abs(total - seen).max() <= ROUNDING[case.dtype], f"scores of {size}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.exhaustive) for n in CASES])
def test_native_backward_weights_are_those_of_the_forward(name):
    check(CASES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bias", "few rows", "bfloat16", "float64"])
@pytest.mark.parametrize("variant", ["avx512bf16", "avx512", "avx2", "scalar"])
def test_native_weights_agree_on_every_instruction_set(variant, name):
    if why := native_build.lacking(variant):
        pytest.skip(why)
    check(CASES[name], variant)
