"""Every operator as a Triton kernel over a grid of awkward values, against the interpreter of the language."""

from __future__ import annotations

import numpy as np

from frisket.dsl import ir
from frisket.dsl.evaluate import OPERATORS, evaluate
from frisket.dsl.ir import build, lit, param
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.language import Text
from frisket.lowering.kernels.text import Page
from frisket.lowering.kernels.triton import expr as expr_triton

NAN, INF = float("nan"), float("inf")
INTS = [-100, -7, -3, -2, -1, 0, 1, 2, 3, 5, 31, 32, 40, 63, 64, 1000]
FLOATS = [-INF, -90.5, -7.0, -1.5, -1.0, -0.3, -1e-4, -0.0, 0.0, 1e-6, 0.2, 0.5, 1.0, 2.5, 3.0, 70.25, 1e10, INF, NAN]
BOOLS = [False, True]
VALUES = {INT: INTS, FLOAT: FLOATS, BOOL: BOOLS}
DTYPE = {INT: np.int32, FLOAT: np.float32, BOOL: np.int8}


def _arguments():
    for op in OPERATORS:
        if op == "random":
            yield op, (INT, INT, INT)
            continue
        for types in [(INT,), (FLOAT,), (BOOL,), (INT, INT), (FLOAT, FLOAT), (BOOL, BOOL), (BOOL, INT, INT),
                      (BOOL, FLOAT, FLOAT), (BOOL, BOOL, BOOL)]:  # fmt: skip
            unary = op in ("neg abs sign bitnot not int float floor isfinite".split() + list(ir.FLOAT_FUNCTIONS))
            arity = 1 if unary else 3 if op == "where" else 2
            if len(types) == arity and ir.result_type(op, types) is not None and (op, types) != ("pow", (INT, INT)):
                yield op, types


def leaf(place: int, type):
    return param({INT: "xyz", FLOAT: "uvw", BOOL: "rst"}[type][place], type)


def _expressions():
    for op, types in _arguments():
        leaves = [leaf(i, t) for i, t in enumerate(types)]
        e = ir.random(*leaves) if op == "random" else build(op, *leaves)
        yield f"{op} {' '.join(map(str, types))}", e
    x, y, u = leaf(0, INT), leaf(1, INT), leaf(0, FLOAT)
    for n in (1, 2, 3, 8, 12):
        yield f"x // {n}", x // n
        yield f"x % {n}", x % n
        yield f"x // -{n}", x // -n
    for n in (0, 3, 31, 40, 63, 64):
        yield f"x >> {n}", x >> n
        yield f"x << {n} small", (x - x) << n
    for n in (8, 31, 32):
        yield f"wrap to {n} bits", build("wrap", x * 73856093 - (y << 9), lit(n))
    yield "x ** 3", x**3
    yield "x ** 0", x**0 + x
    yield "u ** 2.0", u**2.0
    yield "u ** -1.5", u**-1.5
    yield "precedence", (x - (y - x)) * -(x + y) + (x & (y | 3)) - ~(x ^ y)
    yield "comparisons", build("eq", x < y, build("or", y < 3, build("not", x > y)))
    yield "shared", build("where", x * y + 1 > 3, x * y + 1, x * y)
    yield "literals", build("where", x < y, lit(INF), lit(-INF))
    yield "tiny", u * 1e-40
    yield "random literal", ir.random(lit(-5), x, lit(2**31))


EXPRESSIONS = dict(_expressions())


def free(*roots):
    return list(dict.fromkeys(n for n in ir.walk(*roots) if n.op == "param"))


def module(roots, int64: bool) -> str:
    """A kernel that evaluates the roots elementwise, each to an array of its own."""
    numbers = iter(range(999))

    def own(node, args):
        return Text(node.name) if node.op == "param" else expr_triton.operator(node, args)

    language = expr_triton.language(int64=int64)
    roots = [expr.machine(e) for e in roots]
    made = expr.printed(roots, language, own, lambda node, level: f"v{next(numbers)}")
    inputs = free(*roots)
    after = {INT: ".to(tl.int64)" if int64 else "", FLOAT: "", BOOL: " != 0"}
    page = Page()
    outs = [f"Out{i}" for i in range(len(roots))]
    page.line("import triton", "import triton.language as tl", "", 'INFINITY = tl.constexpr(float("inf"))')
    kernel = Page()
    arguments = ", ".join([*(p.name.upper() for p in inputs), *outs])
    with kernel.block(f"@triton.jit\ndef attention_forward({arguments}, N: tl.constexpr):"):
        kernel.line("i = tl.arange(0, N)")
        kernel.line(*(f"{p.name} = tl.load({p.name.upper()} + i){after[p.type]}" for p in inputs))
        kernel.line(*(f"{line.name} = {line.text}" for line in made.lines))
        for out, root in zip(outs, roots):
            kernel.line(f"tl.store({out} + i, tl.broadcast_to({made.values[root]}, [N]))")
    return f"{page}{expr_triton.prelude(str(kernel), language)}\n\n{kernel}"


def check(name: str, int64: bool) -> None:
    import torch

    from frisket.runtime.machine.modules import load_from_file

    e = EXPRESSIONS[name]
    inputs = free(e)
    grid = np.meshgrid(*(np.array(VALUES[p.type], DTYPE[p.type]) for p in inputs or [leaf(0, INT)]), indexing="ij")
    n = 1 << (grid[0].size - 1).bit_length()
    arrays = [np.resize(g.reshape(-1), n) for g in grid]
    if name.startswith("shl"):
        arrays[0] = np.where((arrays[1] < 0) | (arrays[1] > 20), 0, arrays[0])  # the planner keeps Ints in their width
    out = torch.zeros(n, dtype={INT: torch.int64, FLOAT: torch.float32, BOOL: torch.bool}[e.type])
    kernel = load_from_file(module([e], int64)).attention_forward
    kernel[(1,)](*(torch.from_numpy(a) for a in arrays if inputs), out, n)
    env = {p.name: a.astype({INT: np.int64, FLOAT: np.float64, BOOL: bool}[p.type]) for p, a in zip(inputs, arrays)}
    want = np.broadcast_to(evaluate(e, env), n)
    if e.type is INT and any(p.type is FLOAT for p in inputs):  # the largest float32 that fits
        most = 2.0**62 if int64 else 2147483520
        want = np.clip(want, -most, most)
    with np.errstate(all="ignore"):
        loose = 2e-5 if "**" in name or name.startswith("pow") else 5e-6  # pow goes through exp2
        np.testing.assert_allclose(out.numpy(), want.astype(out.numpy().dtype), rtol=loose, atol=1e-30)
