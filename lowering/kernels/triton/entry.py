"""Entries of Triton kernels for JAX: results come behind all other arguments, and arrays are compact.

A kernel says what it reads by the names of its parameters: pointers, strides, lengths, and values such as origins and
slots. Its entry takes arrays, lengths, and results, in this order; it works the strides out, where their factors tell
the compiler what divides them, and loads values from two vectors, so that they are operands and never a part of what
is compiled.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from frisket.dsl.ir import SIZES
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering.kernels.text import Page
from frisket.lowering.plan import LoopPlan

from .parameters import arguments
from .writer import Dims

LENGTHS = ("heads", "q_len", "kv_len", "records", "splits", "pool", "share", "batches", "queries", "pack")
ORIGINS = ("b_origin", "h_origin", "q_origin", "k_origin")
STRIDE = re.compile(r"stride_([qkvog])([bhsd])")
PAIRS = "tl.cast({}, tl.pointer_type(tl.int64), bitcast=True)"  # 64 bits in two int32, as JAX has them


@dataclass(frozen=True)
class Form:
    """The properties of a call on which the text of its entries depends, beside the plan: head sizes, whether
    `q_origin` and `k_origin` are vectors, the arrays that are pairs of int32, and the strides of tables that 16
    divides."""

    dims: Dims
    per_batch: bool = False
    pairs: frozenset[str] = frozenset()
    aligned: frozenset[str] = frozenset()


@dataclass(frozen=True)
class JaxEntry:
    """The text of an entry, and its arguments: `arrays` and `results` by the kernel's names, `whole` and `real` the
    contents of the vectors of values."""

    name: str
    text: str
    arrays: tuple[str, ...]
    lengths: tuple[str, ...]
    results: tuple[str, ...]
    constants: tuple[str, ...]
    whole: tuple[str, ...]
    real: tuple[str, ...]


def parameters(source: str) -> dict[str, dict[str, bool]]:
    """The kernels of a module's text, each with its parameters: whether they are constants of the compiler."""
    return {
        node.name: {a.arg: a.annotation is not None for a in node.args.args}
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("attention_")
    }


def entry(kernel: str, named: dict[str, bool], plan: LoopPlan, form: Form, results: Sequence[str]) -> JaxEntry:
    """The entry to a kernel with these parameters; the kernel writes `results`."""
    known = arguments(plan)
    slots = {known[s.name].name: s.type for s in plan.slots}
    tables = [known[t.name] for t in plan.every_table]
    sizes = [n for t in tables for n in t.sizes if n in named]
    steps = {n: t.sizes[i + 1 :] for t in tables for i, n in enumerate(t.strides)}
    vectors = {"q_origin", "k_origin"} if form.per_batch else set()
    constants = tuple(n for n, constant in named.items() if constant)
    lengths = (*(n for n in ("scale", *LENGTHS) if n in named), *sizes)
    values = [n for n in named if n in (*ORIGINS, *SIZES, *slots) and n not in vectors]
    whole = tuple(n for n in values if slots.get(n) is not FLOAT)
    real = tuple(n for n in values if slots.get(n) is FLOAT)
    rest = {*constants, *lengths, *values, *results, *steps}
    arrays = tuple(n for n in named if n not in rest and not STRIDE.fullmatch(n))

    def given(n: str) -> str:
        if found := STRIDE.fullmatch(n):
            return _stride(found[1], found[2], form.dims, plan.page)
        if n in steps:
            text = " * ".join(f"tl.cast({x}, tl.int64)" if i else x for i, x in enumerate(steps[n])) or "1"
            return f"({text}) // 16 * 16" if n in form.aligned else text
        if n in real:
            return f"tl.load(Real + {real.index(n)})"
        if n in whole:
            load = f"tl.load(Whole + {whole.index(n)})"
            return f"{load} != 0" if slots.get(n) is BOOL else load
        if n in form.pairs:
            return PAIRS.format(n)
        if n in lengths:  # jax-triton makes a constant of every 1
            return f"tl.cast({n}, tl.{'float32' if n == 'scale' else 'int32'})"
        return n

    page, name = Page(), f"{kernel}_from_jax"
    page.line("@triton.jit")
    with page.block(f"def {name}(", "):"):
        vectors_of_values = ("Whole",) * bool(whole) + ("Real",) * bool(real)
        for group in ((*arrays, *vectors_of_values), lengths, results, [f"{n}: tl.constexpr" for n in constants]):
            if group:
                page.line(", ".join(group) + ",")
    head = Page()
    with head.block(str(page).rstrip()):
        if whole and plan.int64:
            head.line(f"Whole = {PAIRS.format('Whole')}")
        with head.block(f"{kernel}(", ")"):
            head.line(*(f"{n}={given(n)}," for n in named))
    return JaxEntry(name, str(head), arrays, lengths, tuple(results), constants, whole, real)


def _stride(letter: str, axis: str, dims: Dims, page: int) -> str:
    """The strides of a compact [batch, length, heads, dim], or of keys [pages, tokens of a `page`, heads, dim]."""
    dim = dims.head_dim if letter in "qk" else dims.v_dim
    keys = letter in "kv"
    heads = f"heads // {dims.group}" if keys and dims.group > 1 else "heads"
    step = f"{heads} * {dim}"
    length = str(page) if keys and page else "kv_len" if keys else "q_len"
    return {"b": f"tl.cast({length}, tl.int64) * ({step})", "h": str(dim), "s": step, "d": "1"}[axis]
