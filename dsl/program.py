"""Reads one whole text: declarations, definitions, and the mask and score mod they lead to.

>>> read("causal & window(w)", kind="mask", params={"w": 256}).mask
q >= k & abs(q - k) < w
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, Literal, get_args

import numpy as np

from frisket.grammar import load

from . import ir, library
from .check import Checker, elaborate
from .errors import MaskSyntaxError, ParameterError, Span, TextProblem, keyword, nearest
from .ir import Expr
from .library import Definition, define
from .operators import BUILT_IN, RESERVED
from .parse import Node, parse
from .types import BOOL, FLOAT, INT, Type, axes

Kind = Literal["mask", "score", "weight", "divide"]
ROOTS = get_args(Kind)
Scalar = bool | int | float
ELEMENTS = {"int": INT, "float": FLOAT, "bool": BOOL}
FACTS = frozenset({"sorted"})


@dataclass(frozen=True)
class Declared:
    """One `param` line: `param doc: sorted int[Q_LEN]`."""

    rank: int
    type: Type
    fact: str | None = None
    axes: tuple[str, ...] = ()  # as written: sizes, numbers, or `_`
    most: int | None = None  # the largest magnitude of its Ints, where the one who made the expression knows it


@dataclass(frozen=True)
class Parsed:
    """The content of a text. `expr` is the lone expression of a text read without a kind."""

    source: str
    name: str
    mask: Expr | None
    score: Expr | None
    expr: Expr | None
    defaults: dict[str, Scalar]
    declared: dict[str, Declared]
    notes: list[str] = field(default_factory=list)
    sites: list[tuple[Span, Expr]] = field(default_factory=list)  # sub-expressions, outermost first
    needs: Mapping[Expr, str] = field(default_factory=dict)  # conditions on parameters, each with an advice
    changed: frozenset[str] = frozenset()  # warnings of library entries whose meaning has changed
    shown: Mapping[str, Expr] = field(default_factory=dict)  # the expressions with calls of the library, by kind
    weight: Expr | None = None
    divide: Expr | None = None


def parse_expression(text: str, params: Mapping[str, Any] | None = None) -> Expr:
    """The Expr of a text of any type: the inverse of `show`."""
    parsed = read(text, params=params or {})
    e = parsed.expr if parsed.expr is not None else parsed.mask if parsed.mask is not None else parsed.score
    assert e is not None
    return e


def read(text: str, *, kind: Kind | None = None, params: Mapping[str, Any] | None = None, name: str = "mask") -> Parsed:
    """Read a program. `kind` says what a lone expression is; values in `params` give names their types."""
    params = params or {}
    if not isinstance(text, str):
        raise ParameterError(f"a mask is text, not {type(text).__name__}")
    check_names(params)
    reader = _StatementReader(text, name)
    roots = reader.statements(parse(text, name), kind)
    known = {n: (d.rank, d.type) for n, d in reader.declared.items()}
    for n, value in params.items():
        known[n] = _agreed(n, type_of(n, value), reader.declared.get(n))
    reader.clash(params)
    checker = Checker(text, name, known=known, definitions=reader.definitions)
    early = list(reader.problems)
    try:
        shown = elaborate(checker, roots)
    except MaskSyntaxError as error:
        # errors of declarations and of expressions are one report
        raise MaskSyntaxError(error.source, [*early, *error.problems], error.name) from None
    if early:
        raise MaskSyntaxError(checker.text, early, checker.name)
    exprs = {kind: ir.expanded(e) for kind, e in shown.items()}
    if unused := [n for n in params if n not in checker.used]:
        raise ParameterError(_unused(unused, checker))
    hides = "here and hides the library's"
    notes = [
        *(f"`{n}` is defined {hides} `{n}`" for n in reader.definitions if n in library.definitions()),
        *(f"`{n}` is a parameter {hides} `{n}`" for n in known if n in library.definitions()),
    ]
    lone = exprs.get("expr")
    sites = [(s, ir.expanded(e)) for s, e in sorted(checker.sites, key=lambda s: (s[0].start, -s[0].stop))]
    return Parsed(
        source=text, name=name, mask=exprs.get("mask"), score=exprs.get("score"), expr=lone, defaults=reader.defaults,
        declared=reader.declared, notes=notes, sites=sites, needs=dict(checker.needs),
        changed=frozenset(checker.changed_meanings), shown=shown,
        weight=exprs.get("weight"), divide=exprs.get("divide"),
    )  # fmt: skip


def _unused(unused: list[str], checker: Checker) -> str:
    names = ", ".join(f"`{n}`" for n in unused)
    verb = "is" if len(unused) == 1 else "are"
    if unused[0] in checker.passed:
        definition, param = checker.passed[unused[0]]
        return (
            f"`{unused[0]}` is given and has no effect: the text passes it to `{definition.name}`, which does not use "
            f"its parameter `{param}`\n  use `{param}` in `def {definition.signature} = ...`, or remove both"
        )
    # a name with a dot is a parameter of a definition without a call
    near = nearest(unused[0], [n for n in checker.used if n not in checker.known and "." not in n])
    remedy = f"; the text says `{near}`: give it as {near}=..." if near else "; remove it"
    return f"{names} {verb} given but not used{remedy}"


# -- values ---------------------------------------------------------------------------------------


def check_names(params: Iterable[str]) -> None:
    for n in params:
        if not isinstance(n, str) or not n.isidentifier() or not n.isascii() or n in load().words:
            raise ParameterError(f"{n!r} is not a name of the language")
        if n in RESERVED:
            raise ParameterError(f"`{n}` is reserved; choose another name, for example `{n}_`")


def entries_of(value: Any) -> Any:
    """The entries of a torch tensor as a numpy array, which shares its memory where it can; other values as they are.
    bfloat16 and float8, which numpy lacks, become float32."""
    torch = sys.modules.get("torch")  # importing torch takes seconds, and a tensor exists only if it is imported
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    value = unwrapped(value)
    with outside_transforms():
        # zeros that autograd keeps no memory for, and tensors with the bit of -x or of a conjugate, have no numpy array
        value = (value.clone() if value._is_zerotensor() else value).detach().cpu().resolve_neg().resolve_conj()
        narrow = str(value.dtype).startswith(("torch.bfloat16", "torch.float8"))
        return (value.float() if narrow else value).numpy()


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Suspend torch.func.grad and its like, which wrap the result of each operation in a tensor without memory."""
    torch = sys.modules.get("torch")
    if torch is None or torch._C._functorch.maybe_current_level() is None:
        yield
    else:
        with torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack():
            yield


def unwrapped(value: Any) -> Any:
    """The tensor with memory in what torch.func.grad and its like made of it; other values as they are."""
    torch = sys.modules.get("torch")
    levels = torch._C._functorch if torch and isinstance(value, torch.Tensor) else None
    while levels and levels.is_functorch_wrapped_tensor(value):  # transforms nest, a wrapper for each
        if levels.is_batchedtensor(value):
            raise ParameterError(
                "a tensor that torch.vmap maps has no entries to read\n"
                "  give it to the call, under a name of the mask or the score mod: att(q, k, v, name=tensor)\n"
                "  in forward mode, call the attention for one entry after another"
            )
        value = levels.get_unwrapped(value)
    return value


def type_of(name: str, value: Any) -> tuple[int, Type]:
    """(rank, type) of a Python number or an array; rank 0 is a scalar."""
    if isinstance(value, bool | np.bool_):  # bool first: True is an int of Python
        return 0, BOOL
    if isinstance(value, int | np.integer):
        if not -(2**63) <= int(value) < 2**63:
            raise ParameterError(f"`{name}` is {value}, which does not fit 64 bits")
        return 0, INT
    if isinstance(value, float | np.floating):
        return 0, FLOAT
    kind = value.dtype.kind if isinstance(value, np.ndarray) else ""
    if not isinstance(value, np.ndarray) or kind not in "biuf":
        what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        hint = keyword(name)
        remedy = f"; {hint}" if hint else "; give a number, or an array of bool, int or float"
        raise ParameterError(f"`{name}` is {what}{remedy}")
    return value.ndim, {"b": BOOL, "f": FLOAT}.get(kind, INT)


def _agreed(name: str, inferred: tuple[int, Type], declared: Declared | None) -> tuple[int, Type]:
    """The declared type of a name whose value can be read as that type: an Int as a Float."""
    if declared is None:
        return inferred
    if inferred[0] != declared.rank:
        raise ParameterError(f"`{name}` is declared with {declared.rank} axes, the value has {inferred[0]}")
    if inferred[1] is declared.type or (inferred[1], declared.type) == (INT, FLOAT):
        return declared.rank, declared.type
    raise ParameterError(
        f"`{name}` is declared {declared.type}, the value is {inferred[1]}; nothing is rounded or cast: "
        f"give {declared.type}, or declare `param {name}: {inferred[1].value.lower()}{axes(inferred[0])}`"
    )


# -- statements -----------------------------------------------------------------------------------


class _StatementReader:
    """The statements of a text, sorted into declarations, definitions and roots."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.problems: dict[TextProblem, None] = {}
        self.declared: dict[str, Declared] = {}
        self.defaults: dict[str, Scalar] = {}
        self.definitions: dict[str, dict[int, Definition]] = {}
        self.where: dict[str, Span] = {}

    def report(self, at: Any, message: str, remedy: str = "") -> None:
        self.problems[TextProblem(message, Span(at.start, at.stop), remedy)] = None

    def statements(self, program: Node, kind: Kind | None) -> dict[str, Node]:
        roots: dict[str, Node] = {}
        for s in program.args:
            if s.kind == "define":
                self.define(s)
            elif s.kind == "param":
                self.param(s)
            else:
                self.root(s, kind, roots)
        if "divide" in roots and kind != "divide" and "weight" not in roots:
            remedy = "add `weight = exp(score)`, which is the softmax before it is divided"
            self.report(roots["divide"], "there is a `divide` and no `weight`", remedy)
        if not roots and not self.problems:  # a statement with an error is no root: its error says enough
            end = len(self.text.rstrip())
            message, remedy = "there is no mask and no score here", "end with an expression, or `mask = ...`"
            raise MaskSyntaxError(self.text, [TextProblem(message, Span(end, end), remedy)], self.name)
        return roots

    def root(self, s: Node, kind: Kind | None, roots: dict[str, Node]) -> None:
        what = s.value.text if s.kind == "assign" else kind or "expr"
        if s.kind == "assign" and what not in ROOTS:
            left, right = s.value.text, self.text[s.args[0].start : s.args[0].stop]
            remedy = "" if left in RESERVED else f"; to define, write `def {left} = {right}`"
            message = "only `mask`, `score`, `weight` and `divide` are assigned to"
            self.report(s.value, message, f"to compare, write `==`{remedy}")
        elif what in roots or (roots and "expr" in (what, *roots)):
            self.report(s, "there is already an expression above", "join them with `&`, or name one with `def`")
        else:
            roots[what] = s.args[0]

    def define(self, s: Node) -> None:
        name, params = s.value.text, [p.text for p in s.args[0]]
        if name in RESERVED or name in BUILT_IN:
            what = "a built-in function" if name in BUILT_IN else "reserved"
            self.report(s.value, f"`{name}` is {what}", "choose another name")
            return
        for p in s.args[0]:
            if p.text in (*ir.COORDINATES, *ir.SIZES, "score"):
                self.report(p, f"`{p.text}` is reserved", "choose another name")
        if len(set(params)) < len(params):
            self.report(s, f"`{name}` has two parameters of one name", "rename one")
        overloads = self.definitions.setdefault(name, {})
        if len(params) in overloads or name in self.declared:
            self.report(s.value, f"`{name}` is defined twice", "rename or remove one")
        overloads[len(params)] = define(s, self.text)
        self.where.setdefault(name, Span(s.value.start, s.value.stop))

    def param(self, s: Node) -> None:
        name, (type_, default) = s.value.text, s.args
        fact, element = type_.value
        if name in RESERVED:
            self.report(s.value, f"`{name}` is reserved", "choose another name")
        elif name in self.declared or name in self.definitions:
            self.report(s.value, f"`{name}` is defined twice", "rename or remove one")
        elif element.text not in ELEMENTS or (fact is not None and fact.text not in FACTS):
            self.report(type_, "this is not a type", "types are `int`, `float`, `bool`, `sorted int[n]`, `float[n, m]`")
        elif fact is not None and (len(type_.args) != 1 or element.text != "int"):
            self.report(type_, "only a table of Ints with one axis is sorted", f"write `sorted int[{ir.SIZES[2]}]`")
        else:
            sizes = tuple(self.text[a.start : a.stop] for a in type_.args)
            declared = Declared(len(sizes), ELEMENTS[element.text], fact and fact.text, sizes)
            self.declared[name] = declared
            if default is not None:
                self.default(name, declared, default)

    def default(self, name: str, declared: Declared, node: Node) -> None:
        value = constant(node)
        fits = value is not None and declared.rank == 0
        if fits:
            inferred = type_of(name, value)[1]
            fits = inferred is declared.type or (inferred, declared.type) == (INT, FLOAT)
        if not fits or value is None:
            remedy = "write a literal of the declared type" if declared.rank == 0 else "tables have no default"
            self.report(node, f"the default of `{name}` is not {declared.type}", remedy)
            return
        self.defaults[name] = float(value) if declared.type is FLOAT else value

    def clash(self, params: Mapping[str, Any]) -> None:
        for n in params:
            if n in self.definitions:
                self.report(self.where[n], f"`{n}` is defined here and given as a parameter", "rename one of them")


def constant(node: Node) -> Scalar | None:
    """The value of a literal: `4`, `-0.5`, `true`, `-inf`."""
    if node.kind == "number" and (isinstance(node.value, float) or -(2**63) <= node.value < 2**63):
        return node.value  # type: ignore[no-any-return]
    if node.kind == "negative" and node.args[0].value == "inf":
        return -inf
    words: dict[str, Scalar] = {"true": True, "false": False, "True": True, "False": False, "inf": inf, "nan": nan}
    return words.get(node.value) if node.kind == "name" else None
