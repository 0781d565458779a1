"""The JAX operator table against the interpreter, operator by operator."""

from functools import cache

import jax
import numpy as np
import pytest

from frisket.dsl import ir
from frisket.dsl.evaluate import OPERATORS, evaluate
from frisket.dsl.ir import build, lit, lookup, make, var
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.kernels import jnp_expr as expr_jnp
from frisket.lowering.kernels.legalise import DECOMPOSITIONS

INTS = np.array([-(2**30), -70, -33, -8, -3, -1, 0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 2**30 - 1])
FLOATS = np.array([-np.inf, -90.5, -2.5, -1.0, -0.0, 0.0, 0.3, 1.0, 2.5, 40.0, 1e30, np.inf, np.nan])
BOOLS = np.array([False, True])
VALUES = {INT: INTS, FLOAT: FLOATS, BOOL: BOOLS}
KINDS = {
    "neg abs sign": [(INT,), (FLOAT,)],
    "add sub mul min max lt le gt ge eq ne": [(INT, INT), (FLOAT, FLOAT)],
    "pow div": [(FLOAT, FLOAT)],
    "floordiv mod bitand bitor bitxor shl shr wrap": [(INT, INT)],
    "and or xor": [(BOOL, BOOL)],
    "bitnot float": [(INT,)],
    "not": [(BOOL,)],
    "int": [(BOOL,), (FLOAT,)],
    "floor isfinite": [(FLOAT,)],
    "where": [(BOOL, INT, INT), (BOOL, FLOAT, FLOAT), (BOOL, BOOL, BOOL)],
    " ".join(sorted(ir.FLOAT_FUNCTIONS)): [(FLOAT,)],
}
TYPES = {op: choices for ops, choices in KINDS.items() for op in ops.split()}
CASES = [(op, types) for op, choices in TYPES.items() for types in choices]


def test_jnp_operator_table_is_complete():
    assert set(expr_jnp.JNP) | set(DECOMPOSITIONS) >= set(OPERATORS) == set(TYPES) | {"random"}


def values(roots, envs, wide=False):
    """The values of many Exprs, by one program of XLA."""

    def program(envs):
        return [expr_jnp.evaluate(root, env, {}, int64=wide, float64=wide) for root, env in zip(roots, envs)]

    return [np.asarray(x) for x in jax.jit(program)(envs)]


def check(root, env, got):
    want = evaluate(root, env)
    if root.type is FLOAT:
        with np.errstate(over="ignore"):
            want = want.astype(np.float32)
        np.testing.assert_allclose(got, want, rtol=4e-6, atol=2e-7)
    else:
        np.testing.assert_array_equal(got, want)


def operator_case(op, types):
    """(Expr, its variables by name)."""
    names = "xyz"[: len(types)]
    root = build(op, *(var(n, t) for n, t in zip(names, types)))
    env = dict(zip(names, np.meshgrid(*(VALUES[t] for t in types), indexing="ij")))
    # a mathematical integer has 32 bits here: the plan says so, or asks for 64
    if types[0] is INT and op in ("mul", "shl", "add", "sub"):
        env = {n: np.where(abs(x) > 64, 9, x) for n, x in env.items()}
        if op == "shl":
            env["x"], env["y"] = np.sign(env["x"]), np.where(env["y"] == 31, 30, env["y"])
            env["x"] = np.where((env["y"] > 31) & (env["y"] < 64), 0, env["x"])
    if op in ("int", "floor"):
        env = {n: np.where(abs(x) > 1e9, 12.0, x) if x.dtype != bool else x for n, x in env.items()}
    if op in ("sin", "cos", "tan"):
        env = {n: np.where(abs(x) > 1e9, 12.0, x).astype(np.float32) for n, x in env.items()}
    return root, {n: x.astype(np.float32) if t is FLOAT else x for (n, x), t in zip(env.items(), types)}


@cache
def values_of_operators():
    roots, envs = zip(*(operator_case(*case) for case in CASES))
    return dict(zip(CASES, values(roots, envs)))


@pytest.mark.parametrize(("op", "types"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)))
def test_each_operator_means_what_the_interpreter_says(op, types):
    check(*operator_case(op, types), values_of_operators()[op, types])


def test_integer_powers_and_powers_of_two():
    x, env = var("x"), {"x": np.arange(-40, 41)}
    roots = [build("pow", x, lit(n)) for n in range(5)]
    for n in (1, 2, 8, 64, 5, -4, 0):
        roots += [x // n, x % n]
    for root, got in zip(roots, values(roots, [env] * len(roots)), strict=True):
        check(root, env, got)


def test_random_is_the_same_bits_everywhere():
    root = make("random", (var("x"), var("y"), lit(7)), None, FLOAT)
    env = {"x": INTS[:, None], "y": INTS[None, :]}
    want = evaluate(root, env)
    np.testing.assert_array_equal(values([root], [env])[0], want)


def test_jnp_lookups_clamp_their_index():
    tables = {"t": np.arange(6).reshape(2, 3) * 10}
    root = lookup("t", (var("x"), var("y")))
    env = {"x": INTS[:, None], "y": INTS[None, :]}
    want = evaluate(root, env, tables)
    got = jax.jit(lambda t: expr_jnp.evaluate(root, env, {"t": t}, int64=False, float64=False))(tables["t"])
    np.testing.assert_array_equal(np.asarray(got), want)


def test_sixty_four_bits():
    with jax.enable_x64(True):
        x, y = var("x"), var("y", FLOAT)
        env = {"x": np.array([2**40, -(2**40)]), "y": np.array([0.1, 0.7])}
        ints, floats = values([(x << 3) + x // 7, build("sin", y)], [env, env], wide=True)
        np.testing.assert_array_equal(ints, evaluate((x << 3) + x // 7, env))
        np.testing.assert_allclose(floats, np.sin(env["y"]), rtol=1e-14)
