"""The front ends: a program as a Python function over numpy, torch and JAX, beside its text.

The function is written from the tree of the generator. What depends on no position, table or captured number is
written as its value, by the generator's evaluator: Python computes it before any front end sees it, and `5 // 0` is an
error there. Library masks are written out, since Python has none of them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from outside.programs import Case, Node, value

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.evaluate import evaluate, unroll
from frisket.lowering.simplify import canonical, simplify

from .problem import Problem, problem_of

FRONTS = ("numpy", "torch", "jax")
LIBRARY = {
    "causal": "({q} >= {k})",
    "window": "(abs({q} - {k}) < {0})",
    "sinks": "({k} < {0})",
    "prefix": "({k} < {0})",
    "sliding": "(({q} - {k} >= -{1}) & ({q} - {k} <= {0}))",
    "chunked": "({q} // {0} == {k} // {0})",
    "dilated": "((abs({q} - {k}) <= {0}) & (({q} - {k}) % {1} == 0))",
    "strided": "(({q} >= {k}) & (({q} - {k} < {0}) | (({q} - {k}) % {0} == 0)))",
    "block_causal": "({q} // {0} >= {k} // {0})",
}
SIGNS = {
    "and": "&", "or": "|", "xor": "^", "bitand": "&", "bitor": "|", "bitxor": "^",
    **{op: op for op in "< <= > >= == != + - * // % << >>".split()},
}  # fmt: skip
FUNCTIONS = {  # another way to write an operator, where all three front ends have the name
    "and": "logical_and", "or": "logical_or", "xor": "logical_xor", "not": "logical_not", "<": "less",
    "<=": "less_equal", ">": "greater", ">=": "greater_equal", "!=": "not_equal", "bitand": "bitwise_and",
    "bitor": "bitwise_or", "bitxor": "bitwise_xor", "abs": "abs", "//": "floor_divide", "%": "remainder",
}  # fmt: skip
JOIN = {"any": " | ", "all": " & ", "sum": " + "}
MODULES = {"numpy": "np", "torch": "torch", "jax": "jnp"}
Written = Any  # the text of a value that Python does not know, or the value itself


class Writer:
    """The body of a function for one front end."""

    def __init__(self, case: Case, front: str) -> None:
        self.case, self.front, self.module = case, front, MODULES[front]
        self.draw = random.Random(f"{front} {case.seed}")
        sizes = {"B": case.batch, "H": case.heads, "Q_LEN": case.q_len, "KV_LEN": case.kv_len}
        scalars = {**case.defaults, **case.scalars}
        known = scalars if front == "numpy" else {n: n for n in scalars}  # 0-d arrays are captured
        self.env: dict[str, Any] = {**{n: n for n in "bhqk"}, **sizes, **known}

    def text(self) -> str:
        found = self(self.case.mask, self.env)
        return found if isinstance(found, str) else str(bool(found))

    def __call__(self, n: Node, env: dict[str, Any]) -> Written:
        if n.op == "number":
            return n.held
        if n.op == "name":
            found = env[n.held]
            return found(env["q"], env["k"]) if callable(found) else found
        if n.op == "reduce":
            return self.reduced(n, env)
        if n.op == "at":
            return self(n.args[0], {**env, "q": self(n.args[1], env), "k": self(n.args[2], env)})
        if n.op == "call" and n.held in self.case.definitions:
            params, body = self.case.definitions[n.held]

            def given(x: Node) -> Any:  # read where the body reads it
                return lambda q, k: self(x, {**env, "q": q, "k": k})

            return self(body, {**env, **{p: given(x) for p, x in zip(params, n.args, strict=True)}})
        if n.op == "call":
            return LIBRARY[n.held].format(*(self(x, env) for x in n.args), q=env["q"], k=env["k"])
        args = [self(x, env) for x in n.args]
        if n.op == "lookup" and (self.front != "numpy" or any(isinstance(x, str) for x in args)):
            return f"{n.held}[{', '.join(map(str, args))}]"
        if not any(isinstance(x, str) for x in args):
            names = {str(i): np.asarray(x)[()] for i, x in enumerate(args)}
            whole = replace(n, args=tuple(Node("name", held=name) for name in names))
            return np.asarray(value(whole, names, self.case)).item()
        return self.operator(n, args)

    def reduced(self, n: Node, env: dict[str, Any]) -> Written:
        """`torch.stack([...]).any()`, in numpy a chain of operators."""
        kind, low, high = n.held
        parts = [self(n.args[0], {**env, "j": j}) for j in range(low, high)]
        if not any(isinstance(x, str) for x in parts):
            return {"any": any, "all": all, "sum": sum}[kind](parts)
        if self.front == "numpy":
            return f"({JOIN[kind].join(map(str, parts))})"
        return f"{self.module}.{kind}({self.module}.stack([{', '.join(map(self.array, parts))}]))"

    def array(self, x: Written) -> str:
        """A value where a framework's function takes arrays alone."""
        if isinstance(x, str) or self.front == "numpy":
            return str(x)
        if self.front == "torch":
            return f"torch.tensor({x})"
        return f"jnp.{'bool_' if isinstance(x, bool) else 'int32'}({x})"

    def operator(self, n: Node, args: list[Written]) -> str:
        other = self.draw.random() < 0.3
        if n.op == "chain":
            a, b, c = args
            return f"(({a} {n.held[0]} {b}) & ({b} {n.held[1]} {c}))"
        if n.op in ("min", "max"):
            x, y = map(self.array, args)
            return f"{self.module}.{n.op}imum({x}, {y})"
        if n.op == "clamp":
            x, low, high = args
            return f"{self.module}.{'clamp' if self.front == 'torch' else 'clip'}({x}, {low}, {high})"
        if n.op == "if":
            return f"{self.module}.where({', '.join(map(self.array, args))})"
        if other and n.op in FUNCTIONS:
            return f"{self.module}.{FUNCTIONS[n.op]}({', '.join(map(self.array, args))})"
        if n.op in SIGNS:
            return f"({args[0]} {SIGNS[n.op]} {args[1]})"
        return {"not": "(~{})", "negative": "(-{})", "abs": "abs({})"}[n.op].format(*args)


def front_of(case: Case) -> Problem:
    return replace(problem_of(case), functions={name: Writer(case, name).text() for name in FRONTS})


def function(name: str, body: str, p: Problem) -> Any:
    """The function that a user of a front end writes: tables and numbers are captured."""
    if name == "numpy":
        return eval(f"lambda b, h, q, k: {body}", {"np": np, **p.bound})
    if name == "torch":
        import torch

        held = {n: torch.tensor(x) for n, x in numbers(p).items()}
        return eval(f"lambda b, h, q, k: {body}", {"torch": torch, **held})
    import jax.numpy as jnp

    return eval(f"lambda b, h, q, k: {body}", {"jnp": jnp, **{n: jnp.asarray(x) for n, x in numbers(p).items()}})


def numbers(p: Problem) -> dict[str, Any]:
    """Values by name, defaults of the text among them."""
    return dict(fk.mask(p.text, **p.bound).params)


def front(p: Problem) -> str:
    """What each front end reads: the dense mask of the evaluator, and the canonical form of the text."""
    m = fk.mask(p.text, **p.bound)
    for name, body in p.functions.items():
        read = fk.mask(function(name, body, p))
        found = read.dense(*p.lengths, **p.where)
        assert (found == p.seen).all(), f"{name}, dense: {np.argwhere(found != p.seen)[0]}"
        if all(e.op != "wrap" for e in ir.walk(read.expr)):  # integers of functions may wrap where a text is exact
            assert form(read, p) is form(m, p), f"{name}, canonical: {read}"
    return str(m)


def form(m: Any, p: Problem) -> ir.Expr:
    """The canonical form, with numbers for scalars, sizes and entries of tables, and with reductions written out."""
    sizes = dict(zip(ir.SIZES, p.seen.shape, strict=True))
    moves = {ir.var(n): ir.lit(x) for n, x in sizes.items()}
    moves |= {n: ir.lit(np.asarray(m.params[n.name]).item()) for n in ir.walk(m.expr) if n.op == "param"}
    e = simplify(unroll(ir.substitute(m.expr, moves)))
    while entries := [n for n in ir.walk(e) if n.op == "lookup" and all(x.op == "lit" for x in n.args)]:
        e = simplify(ir.substitute(e, {n: ir.lit(evaluate(n, {}, m.params).item()) for n in entries}))
    return canonical(e).expr
