"""Every function of the table gives what torch gives, on each type it takes."""

# ruff: noqa: E501 (one row, one case)

from __future__ import annotations

import math
import operator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

from frisket.dsl.evaluate import evaluate  # noqa: E402
from frisket.dsl.from_python.trace import trace  # noqa: E402
from frisket.dsl.from_torch.scalars import (  # noqa: E402
    BINARY,
    ON_FLOAT,
    ON_NUMBER,
    PIECES,
    REDUCTIONS,
    SCALARS,
)

FLOATS = torch.tensor([-7.5, -3.0, -2.5, -1.0, -0.5, -1e-9, 0.0, 1e-9, 0.3, 0.5, 1.0, 1.5, 2.5, 3.0, 8.25, 30.0], dtype=torch.float64)  # fmt: skip
WILD = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -2.0, 3.0], dtype=torch.float64)
INTS = torch.arange(-8, 8)
FLAGS = torch.tensor([True, False] * 8)
TABLES = {"float": FLOATS, "int": INTS, "bool": FLAGS}


OPERATORS = {"and": operator.and_, "or": operator.or_, "invert": operator.invert, "log_sigmoid": F.logsigmoid}


def find(name):
    found = OPERATORS.get(name)
    places = (torch, F, torch.special, operator, torch.Tensor)
    return found or next(getattr(p, name) for p in places if hasattr(p, name))


def check(fn, *tables):
    want = fn(*tables)
    kind = "mask" if want.dtype is torch.bool else "score"
    found = trace(lambda b, h, q, k: fn(*(t[q] for t in tables)), kind)
    given = {n: t.numpy() for n, t in found.tables.items()}
    got = np.broadcast_to(evaluate(found.expr, {"q": np.arange(len(tables[0]))}, given), want.shape)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6, atol=2e-9)


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


TWO = ("logaddexp", "hypot", "copysign", "heaviside")
UNARY = sorted({*ON_FLOAT, *ON_NUMBER, *PIECES, "sign", "sgn", "softplus", "gelu", "nan_to_num", "logical_not", "bitwise_not", "invert"} - {"fabs"})  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("kind", TABLES)
def test_unary_torch_functions_have_the_values_of_torch(name, kind):
    fn = find(name)
    try:
        fn(TABLES[kind])
    except (RuntimeError, TypeError):
        return  # torch does not take it either
    check(fn, TABLES[kind])


@pytest.mark.parametrize("name", ["isnan", "isinf", "isfinite", "isneginf", "isposinf", "abs", "relu", "exp", "tanh"])  # fmt: skip
def test_of_values_that_are_no_numbers(name):
    check(find(name), WILD)


@pytest.mark.parametrize("name", ["signbit", "logaddexp", "copysign", "hypot", "heaviside"])
def test_signs_of_zeros_and_infinities(name):
    ends = torch.tensor([-0.0, 0.0, math.inf, -math.inf, -1e-310, 2.0])
    check(find(name), *((ends,) if name == "signbit" else (ends.repeat_interleave(6), ends.repeat(6))))


@pytest.mark.parametrize(
    "name", sorted({*BINARY, "div", "divide", "fmod", "logical_and", "logical_or", "logical_xor", *TWO})
)
@pytest.mark.parametrize("left", TABLES)
@pytest.mark.parametrize("right", TABLES)
def test_binary_torch_functions_have_the_values_of_torch(name, left, right):
    fn = find(name)
    x, y = TABLES[left], TABLES[right].flip(0).clone()
    y = torch.where(y == 0, torch.ones_like(y), y) if right != "bool" else torch.ones_like(y)  # division by 0 differs
    if "shift" in name:
        x, y = (t.abs() if t.dtype is not torch.bool else t for t in (x, y))
    if "pow" in name:
        x, y = x * x + 1, y * y % 5
    try:
        fn(x, y)
    except (RuntimeError, TypeError):
        return
    check(fn, x, y)


ONCE = {
    "floor of a quotient": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "quotient towards zero": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "literal divisor": lambda x, y: torch.div(x, 3, rounding_mode="trunc") + torch.fmod(x, -3) + x % -3 + x // 4,
    "clamp": lambda x, y: torch.clamp(x, -2, 3) + x.clamp(min=y) + x.clip(max=2) + torch.clamp_min(x, 1),
    "where": lambda x, y: torch.where(x > y, x, 0) + torch.where(x == y, 1.5, 2),
    "lerp": lambda x, y: torch.lerp(x + 0.0, y + 0.0, 0.3) + (x + 0.0).lerp(y + 0.0, x * 0.1),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=2) + x.addcmul(x, y),
    "addcdiv": lambda x, y: torch.addcdiv(x + 0.0, x + 0.0, y + 0.0, value=0.5),
    "masked_fill": lambda x, y: x.masked_fill(x > y, 3),
    "casts": lambda x, y: x.float().int() + x.to(torch.bool) + y.to(torch.int32).double() + x.type(torch.int64) + x.bool().long(),
    "cast like another": lambda x, y: x.to(y) + x.type_as(y),
    "reversed": lambda x, y: (2 - x) + (2 * x) + 3 / y + (7 // y) + (7 % y),
    "alpha": lambda x, y: torch.add(x, y, alpha=3) - torch.sub(x, y, alpha=2) + torch.rsub(x, y),
    "comparisons of both orders": lambda x, y: (x > 0) & (y <= 3) | (x <= 5) ^ (x != y),
    "one number": lambda x, y: x.sum(-1) + x.max() + x.any() + x.mean(0) if x.ndim == 0 else x + x + (x != 0) + x,
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("kind", ["float", "int"])
def test_torch_functions_with_options_have_the_values_of_torch(name, kind):
    if (name, kind) == ("one number", "int"):
        pytest.skip("torch has no mean of Ints")
    y = INTS.flip(0).clone()
    check(ONCE[name], TABLES[kind], torch.where(y == 0, 5, y).to(TABLES[kind].dtype))


@pytest.mark.parametrize("name", [*REDUCTIONS, "norm", "prod", "max", "min"])
@pytest.mark.parametrize("kind", TABLES)
def test_torch_reductions_have_the_values_of_torch(name, kind):
    table = TABLES[kind].reshape(4, 4)
    fn = getattr(torch, name)
    along = {} if name in ("max", "min") else {"dim": -1}
    try:
        want = torch.stack([fn(row, **along) for row in table])
    except RuntimeError:
        return
    found = trace(lambda b, h, q, k: fn(table[q], **along), "mask" if want.dtype is torch.bool else "score")
    got = evaluate(found.expr, {"q": np.arange(4)}, {"table": table.numpy()})
    np.testing.assert_allclose(np.broadcast_to(got, 4), want.numpy(), rtol=1e-6)


def test_torch_operator_table_is_covered_by_these_tests():
    others = {"where", "masked_fill", "clamp", "clip", "clamp_min", "clamp_max", "to", "type", "type_as", "astype",
              "float_power", "float", "double", "half", "bfloat16", "bool", "int", "long", "short", "fabs"}  # fmt: skip
    swapped = {n for n in SCALARS if n[0] == "r" and n[1:] in (*BINARY, "div", "and", "or", "xor")}
    assert set(SCALARS) == {*UNARY, *BINARY, *others, *swapped, "div", "divide", "fmod", "logical_and", "logical_or", "logical_xor", *TWO, "lerp", "addcmul", "addcdiv"}  # fmt: skip


SHAPED = {
    "permute": lambda x: x.permute(3, -4, 2, 1), "permute of a list": lambda x: torch.permute(x, (1, 0, 3, 2)),
    "transpose": lambda x: x.transpose(-1, 1), "mT": lambda x: x.mT, "t": lambda x: x[0, 0].t(), "T": lambda x: x[1, 1].T,
    "moveaxis": lambda x: torch.moveaxis(x, -1, 0), "movedim": lambda x: x.movedim(0, -2), "swapaxes": lambda x: x.swapaxes(0, 2),
    "unsqueeze": lambda x: x[0].unsqueeze(-1), "squeeze": lambda x: x[:1, :, 2:3].squeeze(), "squeeze one": lambda x: x[:1].squeeze(0),
    "view": lambda x: x.view(6, 20), "reshape": lambda x: x.permute(3, 2, 1, 0).reshape(4, -1, 3), "flatten": lambda x: x.flatten(1, 2),
    "flatten all": lambda x: torch.flatten(x), "expand": lambda x: x[0, :, :1].expand(2, 3, 4, -1), "select": lambda x: x.select(-2, 1),
    "broadcast_to": lambda x: torch.broadcast_to(x[0, 0], (2, 4, 5)), "expand_as": lambda x: x[:1].expand_as(x),
    "slices": lambda x: x[1, 1:, ::2, -3:], "ellipsis": lambda x: x[..., 1], "none": lambda x: x[:, None, 0, :, -1],
    "sum of two axes": lambda x: x.sum((1, -1)), "sum kept": lambda x: x.sum(-2, keepdim=True), "sum": lambda x: x.sum() + x[0, 0],
    "mean of two axes": lambda x: x.mean((0, 3)), "amax": lambda x: x.amax(1), "all": lambda x: (x > -5).all(0) + 0 * x[0],
    "any kept": lambda x: (x > 1).any(-1, keepdim=True) * x, "norm": lambda x: torch.norm(x, dim=-1), "norm of order 1": lambda x: x.norm(1, -1),
    "norm of order inf": lambda x: torch.linalg.vector_norm(x, ord=math.inf, dim=(-1,)), "linalg norm": lambda x: torch.linalg.norm(x[0, 0, 0]) + x[0, 0],
    "prod": lambda x: x.prod(-1), "matmul": lambda x: x[0, 0] @ x[1, 1, 2], "vector times matrix": lambda x: x[0, 0, :, 1] @ x[1, 2],
    "mv": lambda x: torch.mv(x[0, 0], x[1, 2, 3]), "vecdot": lambda x: torch.linalg.vecdot(x, x.flip(0).detach()), "inner": lambda x: torch.inner(x[0, 0, 0], x[0, 1, 1]) + x[0, 0],
    "stack": lambda x: torch.stack([x[0], x[1] * 2, x[0] + 1]), "stack at the end": lambda x: torch.stack((x[0, 0], x[1, 1]), -1),
    "take": lambda x: torch.take(x, torch.tensor([3, 50, 7])), "index_select": lambda x: torch.index_select(x, 2, torch.tensor([3, 0])),
    "linear": lambda x: F.linear(x[0, 0, 0], x[1, 1], x[0, 0, :, 1]), "embedding": lambda x: F.embedding(torch.tensor([2, 0]), x[0, 0]),
    "index vectors side by side": lambda x: x[:, torch.tensor([2, 0]), torch.tensor([1, 3])], "index vectors apart": lambda x: x[:, torch.tensor([2, 0]), :, torch.tensor([1, 3])],
    "broadcast": lambda x: x[0, :, :, None, 0] * x[0, 0, 0], "isin": lambda x: torch.isin(x.round(), torch.tensor([1.0, 0.0])) * x,
    "numpy's names": lambda x: x.sum(axis=-1) + x.mean(axis=-1),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPED)
def test_torch_shape_functions_have_the_values_of_torch(name):
    x = torch.nn.Parameter(torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)))
    want = SHAPED[name](x).detach()
    places = "bhqk"[: want.ndim]
    found = trace(lambda b, h, q, k: SHAPED[name](x)[(b, h, q, k)[: want.ndim]] + 0.0, "score")
    env = dict(zip(places, np.ogrid[tuple(map(slice, want.shape))]))
    got = evaluate(found.expr, env, {n: t.detach().numpy() for n, t in found.tables.items()})
    np.testing.assert_allclose(np.broadcast_to(got, want.shape), want.numpy(), rtol=1e-6, atol=1e-9)
    assert "x" in found.tables, "the learned tensor keeps its place"
