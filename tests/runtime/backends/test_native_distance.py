"""Functions of the distance of query and key alone, which native kernels tabulate for each tile."""

import numpy as np
import pytest
import torch
from support.tiers import default_only

import frisket as fk
from frisket.dsl.ir import lit, lookup, param, var
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.cpp.forward import by_distance
from frisket.runtime.machine import cpp_build as native_build

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

BUCKETS = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
SCORES = {
    "t5_bias(table, 32, 128)": {"table": BUCKETS},
    "t5_decoder_bias(table, 32, 128)": {"table": BUCKETS},
    "score * exp(-0.01 * abs(q - k)) + slope[h] * sin(0.3 * (k - q + 2))": {"slope": BUCKETS[0]},
    "score + table[min(abs(q - k), 31), h] + slope[min(q // 16, 31)] * log(k + 2.0)": {
        "table": BUCKETS, "slope": BUCKETS[:, 0],
    },
}  # fmt: skip
LENGTHS = [(1, 300), (5, 70), (40, 40), (250, 330)]


def drawn(q_len, kv_len, dtype=torch.float32, heads=4, kv_heads=4):
    torch.manual_seed(0)
    shapes = (2, heads, q_len, 16), (2, kv_heads, kv_len, 16), (2, kv_heads, kv_len, 16)
    return [torch.randn(s).to(dtype) for s in shapes]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("score", default_only(SCORES, [*SCORES][-1]))  # those of T5 are also below
def test_native_functions_of_distance_equal_the_reference(score, lengths):
    att = fk.compile("q + 100 >= k", score, backend="native", **SCORES[score])
    att.check(*[x.requires_grad_() for x in drawn(*lengths)], gradients=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_native_functions_of_distance_in_other_dtypes(dtype):
    att = fk.compile("causal", "t5_bias(table, 32, 128)", backend="native", table=BUCKETS)
    att.check(*[x.requires_grad_() for x in drawn(90, 90, dtype)], gradients=True)


def test_grouped_heads_and_places():
    att = fk.compile("causal", "t5_decoder_bias(table, 32, 128)", backend="native", table=BUCKETS)
    att.check(*drawn(2, 600, kv_heads=1), origin=(0, 0, 598, 0), gradients=False)
    att.check(*drawn(70, 600, kv_heads=2), origin=(0, 0, 500, 0), gradients=False)


def test_lookups_by_distance_alone_are_tabulated():
    q, k, score, table = var("q"), var("k"), var("score"), param("n")
    read = lookup("t", (q - k,), FLOAT)
    assert by_distance({"modified": score + read})[1] == {"distance0": read}
    for other in (
        lookup("t", (q + k,), FLOAT), lookup("t", (q - 2 * k,), FLOAT), lookup("t", (q,), FLOAT),
        lookup("t", (q - k, k), FLOAT), lookup("t", (table,), FLOAT),
    ):  # fmt: skip
        assert by_distance({"modified": score + other})[1] == {}
    inside = lookup("t", (lit(3) + (k - q),), FLOAT)
    assert by_distance({"modified": score + inside, "slope": inside})[1] == {"distance0": inside}
