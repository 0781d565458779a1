"""What transformers says of a mask, as text of the language and the tables it reads.

>>> from transformers.masking_utils import sliding_window_causal_mask_function
>>> read(sliding_window_causal_mask_function(256))
('((true & (k > (q - 256))) & (k <= q))', {})

transformers builds a mask out of Python closures over positions. Here they are called once, on `Term`s, which write
down what is computed with them; so they are inside `torch.compile`, which sees nothing of it but texts, and the tensors
that become tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.ir import Expr, clauses, conj, lookup, substitute, var
from frisket.lowering.aten_expr import distance_only
from frisket.lowering.simplify import simplify
from frisket.runtime.mask import Mask, mask

B, Q, K = var("b"), var("q"), var("k")
CAUSAL = Q >= K
POSITIONS = ("b", "h", "q", "k")


class Term:
    """A text in place of a number that a mask function computes with; tensors beside it become tables."""

    device = None  # mask functions move results there

    def __init__(self, text: str, tables: list[Tensor]) -> None:
        self.text, self.tables = text, tables

    def joined(self, left: Any, sign: str, right: Any) -> Term:
        return Term(f"({said(left, self.tables)} {sign} {said(right, self.tables)})", self.tables)

    # fmt: off
    def __add__(self, x: Any) -> Term: return self.joined(self, "+", x)
    def __radd__(self, x: Any) -> Term: return self.joined(x, "+", self)
    def __sub__(self, x: Any) -> Term: return self.joined(self, "-", x)
    def __rsub__(self, x: Any) -> Term: return self.joined(x, "-", self)
    def __mul__(self, x: Any) -> Term: return self.joined(self, "*", x)
    def __rmul__(self, x: Any) -> Term: return self.joined(x, "*", self)
    def __floordiv__(self, x: Any) -> Term: return self.joined(self, "//", x)
    def __mod__(self, x: Any) -> Term: return self.joined(self, "%", x)
    def __lt__(self, x: Any) -> Term: return self.joined(self, "<", x)
    def __le__(self, x: Any) -> Term: return self.joined(self, "<=", x)
    def __gt__(self, x: Any) -> Term: return self.joined(self, ">", x)
    def __ge__(self, x: Any) -> Term: return self.joined(self, ">=", x)
    def __eq__(self, x: object) -> Term: return self.joined(self, "==", x)  # type: ignore[override]
    def __ne__(self, x: object) -> Term: return self.joined(self, "!=", x)  # type: ignore[override]
    def __and__(self, x: Any) -> Term: return self.joined(self, "&", x)
    def __rand__(self, x: Any) -> Term: return self.joined(x, "&", self)
    def __or__(self, x: Any) -> Term: return self.joined(self, "|", x)
    def __ror__(self, x: Any) -> Term: return self.joined(x, "|", self)
    def __xor__(self, x: Any) -> Term: return self.joined(self, "^", x)
    def __invert__(self) -> Term: return Term(f"(~{self.text})", self.tables)
    def __neg__(self) -> Term: return Term(f"(-{self.text})", self.tables)
    def __abs__(self) -> Term: return Term(f"abs({self.text})", self.tables)
    def to(self, *_: Any, **__: Any) -> Term: return self
    def new_ones(self, *_: Any, **__: Any) -> Term: return Term("true", self.tables)
    def new_zeros(self, *_: Any, **__: Any) -> Term: return Term("false", self.tables)
    # fmt: on

    def __bool__(self) -> bool:
        raise TypeError("a mask function asks whether a position is true, and positions have no values here")

    __hash__ = None  # type: ignore[assignment]  # nothing is equal to another


def said(x: Any, tables: list[Tensor]) -> str:
    if isinstance(x, Term):
        return x.text
    if isinstance(x, Tensor):
        return named(x, tables)
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, (int, float)):
        return f"({x!r})" if x < 0 else repr(x)
    raise TypeError(f"a mask function computes with {x!r}")


def named(table: Tensor, tables: list[Tensor]) -> str:
    """The name of a table: t0, t1, ..."""
    for i, known in enumerate(tables):
        if known is table:
            return f"t{i}"
    tables.append(table)
    return f"t{len(tables) - 1}"


class Lookups(TorchFunctionMode):
    """Reads `table[b, q]`, with terms for positions, as text."""

    def __init__(self, tables: list[Tensor]) -> None:
        super().__init__()
        self.tables = tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Term) for i in index):
                if len(index) != table.ndim:
                    raise TypeError(f"a tensor of {table.ndim} axes is read with {len(index)} indices")
                inside = ", ".join([said(i, self.tables) for i in index])
                return Term(f"{named(table, self.tables)}[{inside}]", self.tables)
        return func(*args, **(kwargs or {}))


def read(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The text of a mask function of transformers, and its tables by name."""
    tables: list[Tensor] = []
    positions = [Term(name, tables) for name in POSITIONS]
    if torch.compiler.is_compiling():
        with Lookups(tables):
            found = function(*positions)
        return said(found, tables), {f"t{i}": x for i, x in enumerate(tables)}
    try:
        with Lookups(tables):
            found = function(*positions)
        return said(found, tables), {f"t{i}": x for i, x in enumerate(tables)}
    except TypeError:  # a function of torch, or more: frisket's reader of torch callables knows those, or says why not
        made = mask(function)
        return str(made), dict(made.params)


# -- texts ------------------------------------------------------------------------------------------------------------

Of = ParamSpec("Of")
Found = TypeVar("Found")


def constant(function: Callable[Of, Found]) -> Callable[Of, Found]:
    """The same, worked out once for equal arguments, and in a graph of torch a constant that Dynamo does not enter."""
    kept = lru_cache(maxsize=256)(function)

    def call(*args: Of.args, **kwargs: Of.kwargs) -> Found:
        return kept(*args, **kwargs)  # type: ignore[arg-type]

    call.__doc__ = function.__doc__
    return torch.compiler.assume_constant_result(call)  # type: ignore[no-any-return, no-untyped-call]


def joined(texts: list[str], sign: str) -> str:
    """Several texts as one; declarations of their parameters, a line each, come first."""
    lines = [text.split("\n") for text in texts]
    heads = [line for each in lines for line in each[:-1]]
    return "\n".join([*heads, sign.join([f"({each[-1]})" for each in lines])]) if texts else ""


@constant
def parted(text: str, local: bool) -> tuple[str, str]:
    """What a model's mask says of one document, and which tokens are of one document: two texts.

    `local`: the positions that are read from a table beside the numbers of documents are those within documents, as
    transformers makes them. They count tokens, so a mask of distances is the same in the positions of the row, which
    need no table.
    """
    found = simplify(mask(text).expr)
    documents = [c for c in clauses(found) if _same(c)]
    rest = conj(*(c for c in clauses(found) if not _same(c)))
    if local and documents:
        rest = _by_distance(rest)
    return str(Mask(rest)), str(Mask(conj(*documents))) if documents else ""


def _same(clause: Expr) -> bool:
    """Whether it says `t[b, q] == t[b, k]`."""
    if clause.op != "eq" or any(x.op != "lookup" for x in clause.args):
        return False
    one, other = clause.args
    return one.name == other.name and {one.args, other.args} == {(B, Q), (B, K)}


def _by_distance(e: Expr) -> Expr:
    for n in Mask(e).unbound:
        plain = substitute(e, {lookup(n, (B, Q)): Q, lookup(n, (B, K)): K})
        if plain is not e and distance_only(plain):
            return simplify(plain)
    return e


@constant
def names_in(text: str) -> tuple[str, ...]:
    """The parameters that a mask reads."""
    return mask(text).unbound if text else ()


@constant
def is_causal(text: str) -> bool:
    """Whether it is plain that no key after the query is seen."""
    return CAUSAL in clauses(simplify(mask(text).expr))


# -- what attention gets ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SymbolicMask:
    """What the attention of a model gets for a mask: texts, tables, and where queries and keys lie in the row.

    It stands where models expect an array [batch, 1, q_len, kv_len], and has what they ask of that.
    """

    structure: str  # causal, windows, chunks: what the model says, and `frisket_mask` replaces
    batch: int
    q_len: int
    kv_len: int
    q_offset: Any = 0  # where the queries begin in the row: an int, or a tensor of torch
    kv_offset: int = 0
    documents: str = ""  # which tokens are of one document, where some are packed
    padding: tuple[str, str] = ("", "")  # which keys are none: from the left, and to the right
    bias: str = ""  # what is added to scores, where a call brings a dense mask of floats
    tables: dict[str, Any] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)  # plans, by attention

    ndim = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.q_len, self.kv_len

    def contiguous(self) -> SymbolicMask:
        return self

    def to(self, *_: Any, **__: Any) -> SymbolicMask:
        return self

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def __getitem__(self, index: Any) -> Any:
        raise ParameterError(
            "this model computes with its attention mask, and under attn_implementation='frisket' that is no array\n"
            "  load it with attn_implementation='eager', or 'sdpa'"
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = __getitem__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.__getitem__(args[0], func)  # functions of torch are computing too

    @property
    def origin(self) -> tuple[int, int, Any, int]:
        """(b, h, q, k) where the arrays begin. Outside of graphs a tensor's number is read, once."""
        if isinstance(self.q_offset, Tensor) and not torch.compiler.is_compiling():
            self.q_offset = int(self.q_offset)
        return 0, 0, self.q_offset, self.kv_offset

    def text(self, structure: str) -> str:
        """The mask with `structure` in place of the model's."""
        left, right = self.padding
        if right and is_causal(structure) and min(self.tables["stop"]) >= self.origin[2] + self.q_len:
            right = ""  # what is beyond the queries no causal mask sees
        return joined([x for x in (structure, self.documents, left, right) if x and x != "true"], " & ")

    def read_by(self, *texts: str) -> dict[str, Any]:
        """The tables that these texts read."""
        names = {n for text in texts for n in names_in(text)}
        return {n: x for n, x in self.tables.items() if n in names}


def symbolic(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None, attention_mask: Any = None, use_vmap: bool = False,
    allow_is_bidirectional_skip: bool = False, local_size: int | None = None, **_: Any,
) -> SymbolicMask | None:  # fmt: skip
    """The mask function that `register` gives transformers: takes what its own take. None where all is seen and the
    model allows that: some then give their attention a tensor of biases in its place."""
    if isinstance(attention_mask, SymbolicMask):  # made before, by `generate`
        return attention_mask
    if mask_function is None:
        from transformers.masking_utils import causal_mask_function

        mask_function = causal_mask_function
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache counts on in place before its attention runs
    text, tables = read(mask_function)
    structure, documents = parted(text, not use_vmap)  # use_vmap: functions of other people are part of it
    padding, more = padded(attention_mask, kv_offset + kv_length)
    if allow_is_bidirectional_skip and (structure, documents, padding) == ("true", "", ("", "")):
        return None
    return SymbolicMask(
        structure, batch_size, q_length, kv_length, q_offset, kv_offset, documents, padding, "", {**tables, **more}
    )


def padded(real: Tensor | None, stop: int) -> tuple[tuple[str, str], dict[str, Any]]:
    """Texts for which keys before `stop` are no padding, left and right of the tokens, and what they read. Tokens that
    lie side by side are two numbers a row, which stay the same from step to step of `generate`."""
    if real is None:
        return ("", ""), {}
    have = real.shape[-1]
    if torch.compiler.is_compiling() or not real.is_cpu:
        return ("real[b, k]", ""), {"real": _filled(real, stop)}
    if have >= stop and bool(real.all()):
        return ("", ""), {}
    count, first = real.sum(-1), real.int().argmax(-1)
    last = torch.where(count > 0, have - real.int().flip(-1).argmax(-1), first)
    if not torch.equal(last - first, count):
        return ("real[b, k]", ""), {"real": _filled(real, stop)}
    starts, stops = first.tolist(), last.tolist()
    left = {"start": starts} if any(starts) else {}
    right = {"stop": stops} if min(stops) < stop else {}
    return ("k >= start[b]" if left else "", "k < stop[b]" if right else ""), {**left, **right}


def _filled(real: Tensor, stop: int) -> Tensor:
    """Keys that have no place in it are padding: those a static cache has not reached."""
    missing = stop - real.shape[-1]
    return torch.nn.functional.pad(real, (0, missing)) if missing > 0 else real


def dense(given: Tensor, q: Tensor, k: Tensor) -> SymbolicMask:
    """A mask [batch or 1, heads or 1, q_len, kv_len] that a call brings: Bools are looked up, and so are Floats that
    are 0 or no more than the least of their dtype; other Floats are added to scores."""
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
    want = batch, heads, q_len, kv_len
    if given.ndim != 4 or any(n not in (1, m) for n, m in zip(given.shape, want)):
        raise ShapeError(
            f"attention_mask is {str(given.dtype).removeprefix('torch.')}{list(given.shape)}, and this attention is "
            f"[batch, heads, q_len, kv_len] = {list(want)}\n  give an axis its length there, or 1; or a 2-D "
            "attention_mask, 0 where tokens are padding"
        )
    index = ", ".join([x if n > 1 else "0" for x, n in zip(POSITIONS, given.shape)])
    if given.is_floating_point() and given.is_cpu and not torch.compiler.is_compiling() and not given.requires_grad:
        hidden = given <= torch.finfo(given.dtype).min
        if bool((hidden | (given == 0)).all()):
            given = ~hidden
    text, tables = f"attention_mask[{index}]", {"attention_mask": given}
    if given.is_floating_point():
        return SymbolicMask("", batch, q_len, kv_len, bias=text, tables=tables)
    return SymbolicMask(text if given.dtype == torch.bool else f"{text} != 0", batch, q_len, kv_len, tables=tables)
