"""Random masks written with torch's functions: traced, they keep their values."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support import masks

torch = pytest.importorskip("torch")

from frisket.dsl.errors import EvaluationError  # noqa: E402
from frisket.dsl.evaluate import evaluate  # noqa: E402
from frisket.dsl.from_python.trace import trace  # noqa: E402
from frisket.dsl.ir import FALSE, uses, walk  # noqa: E402

FUNCTIONS = {
    "add": [torch.add, lambda x, y: x + y], "sub": [torch.sub, lambda x, y: x - y], "neg": [torch.neg, lambda x: -x],
    "mul": [torch.mul, lambda x, y: y * x], "abs": [torch.abs, abs, lambda x: x.abs()], "sign": [torch.sign],
    "min": [torch.minimum, lambda x, y: x.clamp(max=y)], "max": [torch.maximum, lambda x, y: torch.clamp(x, min=y)],
    "floordiv": [torch.floor_divide, lambda x, y: torch.div(x, y, rounding_mode="floor"), lambda x, y: x // y],
    "mod": [torch.remainder, lambda x, y: x % y], "div": [torch.div, torch.true_divide, lambda x, y: x / y],
    "pow": [torch.pow, lambda x, y: x**y], "where": [torch.where, lambda c, x, y: y.masked_fill(c, x)],
    "bitand": [torch.bitwise_and, lambda x, y: x & y], "bitor": [torch.bitwise_or, lambda x, y: x | y],
    "bitxor": [torch.bitwise_xor, lambda x, y: x ^ y], "bitnot": [torch.bitwise_not, lambda x: ~x],
    "shl": [torch.bitwise_left_shift, lambda x, y: x << y], "shr": [torch.bitwise_right_shift, lambda x, y: x >> y],
    "xor": [torch.logical_xor, lambda x, y: x != y], "not": [torch.logical_not, lambda x: ~x],
    "lt": [torch.lt, lambda x, y: x < y], "le": [torch.less_equal, lambda x, y: x <= y], "gt": [torch.greater],
    "ge": [torch.ge, lambda x, y: x >= y], "eq": [torch.eq, lambda x, y: x == y], "ne": [torch.not_equal],
    "int": [lambda x: x.int(), lambda x: x.to(torch.int64)], "float": [lambda x: x.float(), lambda x: x * 1.0],
    "floor": [lambda x: torch.floor(x).long()], "exp": [torch.exp], "log": [torch.log], "sqrt": [torch.sqrt],
    "tanh": [torch.tanh], "sigmoid": [torch.sigmoid, torch.special.expit], "sin": [torch.sin],
}  # fmt: skip
JOIN = {"and": [torch.logical_and, torch.bitwise_and, lambda x, y: x & y],
        "or": [torch.logical_or, torch.bitwise_or, lambda x, y: x | y]}  # fmt: skip


class Different(Exception):  # noqa: N818
    """torch computes numbers at once, and has its own answer for floor(inf) and division by 0."""


def written(e, rng, tables, params):
    """A torch callable for an Expr: one way of several to write each operator."""
    how = {n: rng.random() for n in walk(e)}
    chains = {n: rng.random() < 0.5 for n in walk(e) if n.op == "lookup"}

    def mask(b, h, q, k):
        places = {"b": b, "h": h, "q": q, "k": k, "Q_LEN": 60, "KV_LEN": 50}
        done = {}
        for n in walk(e):
            args = [done[a] for a in n.args]
            if n.op == "lit":
                done[n] = torch.tensor(n.name)
            elif n.op in ("var", "param"):
                done[n] = torch.as_tensor(places[n.name] if n.op == "var" else params[n.name])
            elif n.op == "lookup":
                t = tables[n.name]
                for i, index in enumerate(n.args):  # numbers count from the end in torch, and raise beyond it
                    args[i] = args[i] if set("bhqk") & uses(index) else args[i].clamp(0, t.shape[i] - 1)
                done[n] = t[tuple(args)] if not chains[n] else t[args[0]][tuple(args[1:])] if args[1:] else t[args[0]]
            elif n.op == "segment":
                done[n] = (torch.searchsorted(tables[n.name], args[0], right=True) - 1).clamp(
                    0, len(tables[n.name]) - 2
                )
            elif n.op in JOIN:
                ways = JOIN[n.op]
                x, *rest = args
                for y in rest:
                    x = ways[int(how[n] * len(ways))](x, y)
                done[n] = x
            else:
                ways = FUNCTIONS[n.op]
                at_once = n.op in ("floor", "int", "floordiv", "mod") and all(isinstance(x, torch.Tensor) for x in args)
                if at_once and (not torch.isfinite(args[0]) or (len(args) > 1 and args[1] == 0)):
                    raise Different
                done[n] = ways[int(how[n] * len(ways))](*args)
        return done[e]

    return mask


def check(seed):
    rng = random.Random(f"torch {seed}")
    case = masks.case(FALSE, rng)
    e = masks.random_mask(rng, depth=3)
    env = dict(zip("bhqk", np.ogrid[:2, :2, :12, :10])) | {"Q_LEN": 60, "KV_LEN": 50, **case.params}
    try:
        want = evaluate(e, env, case.tables)
    except EvaluationError:
        return 0
    tables = {n: torch.from_numpy(np.ascontiguousarray(t)) for n, t in case.tables.items()}
    try:
        found = trace(written(e, rng, tables, case.params), "mask")
    except Different:
        return 0
    given = {n: t.numpy() for n, t in found.tables.items()}
    try:
        got = evaluate(found.expr, env | {n: t for n, t in given.items() if t.ndim == 0}, given)
    except EvaluationError:  # 2 ** x is a shift: it refuses what pow does not
        return 0
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want, err_msg=f"seed {seed}: {e!r}")
    return 1


def test_random_torch_masks_keep_their_values_when_traced():
    assert sum(check(seed) for seed in range(120)) > 112


@pytest.mark.slow
def test_many_random_torch_masks_keep_their_values():
    assert sum(check(seed) for seed in range(120, 20_000)) > 18_100
