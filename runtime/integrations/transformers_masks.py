"""Symbolic masks for models of transformers: `symbolic` makes one where transformers asks for a mask.

Texts and tables stand for the mask functions of the model, for documents packed in a row and for padding. Plans are
made of them. An array is made only where a model computes with its mask.

>>> from transformers.masking_utils import sliding_window_causal_mask_function
>>> read(sliding_window_causal_mask_function(256))
('((true & (k > (q - 256))) & (k <= q))', {})

transformers builds a mask out of Python closures over positions. Here they are called once, on `TextTerm`s, which write
down what is computed with them. So they are inside `torch.compile`, which sees nothing of it but texts, and the tensors
that become tables.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.ir import Expr, clauses, conj, lookup, substitute, var
from frisket.dsl.transfer import distance_only
from frisket.grammar.memo import memo
from frisket.lowering.simplify import simplify
from frisket.runtime.machine.parameters import learns
from frisket.runtime.masks.mask import Mask, mask

B, Q, K = var("b"), var("q"), var("k")
CAUSAL = Q >= K
BOOLS: set[type] = set()  # configs of models that work under sdpa, and so compute with masks of Bools


def expect_bools(config: Any) -> None:
    """Remember that models with this kind of config compute with masks of Bools."""
    BOOLS.add(type(config))


# -- texts ------------------------------------------------------------------------------------------------------------

Of = ParamSpec("Of")
Found = TypeVar("Found")


def constant(function: Callable[Of, Found]) -> Callable[Of, Found]:
    """A function computed once for equal arguments, and in a graph of torch a constant that Dynamo does not enter."""
    cached = memo(256)(function)

    def call(*args: Of.args, **kwargs: Of.kwargs) -> Found:
        return cached(*args, **kwargs)

    call.__doc__ = function.__doc__
    return torch.compiler.assume_constant_result(call)  # type: ignore[no-any-return, no-untyped-call]


def joined(texts: list[str], sign: str) -> str:
    """Several texts as one; declarations of their parameters, a line each, come first."""
    lines = [text.split("\n") for text in texts]
    heads = [line for each in lines for line in each[:-1]]
    return "\n".join([*heads, sign.join([f"({each[-1]})" for each in lines])]) if texts else ""


@constant
def parted(text: str, local: bool) -> tuple[str, str]:
    """Two texts of a model's mask: inside one document, and which tokens share a document.

    `local`: the positions read from a table along with document numbers are those within documents, as transformers
    makes them. They count tokens, so a mask of distances is the same in the positions of the row, which need no table.
    """
    expr = simplify(mask(text).expr)
    documents = [c for c in clauses(expr) if _same(c)]
    rest = conj(*(c for c in clauses(expr) if not _same(c)))
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
    """A mask that the attention of a model receives: texts, tables, and where queries and keys lie in the row.

    It stands where models expect an array [batch, 1, q_len, kv_len]. A model that only hands it on never makes that
    array; one that computes with it (an indexer, a mask with keys appended) gets what it gets under sdpa.
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
    chosen: str = ""  # keys that the model has chosen by itself, for each query
    make: Callable[[], Tensor] | None = field(default=None, repr=False)  # transformers' own array of it
    dtype: torch.dtype = torch.float32
    cached: dict[Any, Any] = field(default_factory=dict, repr=False)  # plans, by attention

    ndim = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.q_len, self.kv_len

    def contiguous(self) -> SymbolicMask:
        return self  # there is no array to lay out again

    def to(self, *_: Any, **__: Any) -> SymbolicMask:
        return self

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    # -- for models that compute with it

    def array(self) -> Tensor:
        """The mask as transformers' own array [batch, 1, q_len, kv_len].

        Bools for models that have sdpa; for others what eager attention adds to scores, 0 and the dtype's least."""
        if self.make is None:
            text = "this model computes with its attention mask, and under attn_implementation='frisket' that is no "
            raise ParameterError(f"{text}array\n  load it with attn_implementation='eager', or 'sdpa'")
        if "array" not in self.cached:  # one array for all layers
            self.cached["array"] = self.make()
        return self.cached["array"]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):  # a question makes no array
            raise AttributeError(f"a mask has no {name!r}")
        return getattr(self.array(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # functions of torch that a model calls on its mask
        return func(*_arrays(args), **_arrays(kwargs or {}))

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
        return joined([x for x in (structure, self.documents, left, right, self.chosen) if x and x != "true"], " & ")

    def read_by(self, *texts: str) -> dict[str, Any]:
        """The tables that these texts read."""
        names = {n for text in texts for n in names_in(text)}
        return {n: x for n, x in self.tables.items() if n in names}


def _of_array(name: str) -> Callable[..., Any]:
    compute = getattr(operator, name)
    return lambda self, *x: compute(self.array(), *x)


for _name in "getitem add sub mul lt le gt ge eq ne and or invert".split():
    setattr(SymbolicMask, f"__{_name}__", _of_array(f"__{_name}__"))
for _name in "add mul and or".split():  # which commute
    setattr(SymbolicMask, f"__r{_name}__", getattr(SymbolicMask, f"__{_name}__"))
SymbolicMask.__rsub__ = lambda self, x: x - self.array()  # type: ignore[attr-defined]


def _arrays(x: Any) -> Any:
    """The arguments of a function of torch, with arrays in place of symbolic masks."""
    if isinstance(x, SymbolicMask):
        return x.array()
    if isinstance(x, tuple | list):
        return type(x)([_arrays(i) for i in x])
    return {n: _arrays(i) for n, i in x.items()} if isinstance(x, dict) else x


EXTENDED = {"deepseek_v4"}  # models that append keys and, where the mask is a Tensor, their columns: else they are lost


def symbolic(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    use_vmap: bool = False,
    dtype: Any = torch.float32,
    config: Any = None,
    device: Any = "cpu",
    **_: Any,
) -> SymbolicMask | Tensor:
    """The mask function that `register` gives transformers: takes what its own take. It is never None, where all is
    seen neither: some models call causal what is not, and their attention would take None for that."""
    if isinstance(attention_mask, SymbolicMask):  # made before, by `generate`
        return attention_mask
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    mask_function = mask_function or causal_mask_function
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache counts on in place before its attention runs

    bools = type(config) in BOOLS

    def make() -> Tensor:
        if getattr(config, "frisket_mask", None) is not None:
            message = "config.frisket_mask is set, and this model computes with its own attention mask: leave it out"
            raise ParameterError(message)
        how: dict[str, Any] = {"mask_function": mask_function, "attention_mask": attention_mask, "dtype": dtype}
        how |= {"use_vmap": use_vmap, "device": device, "q_offset": q_offset, "kv_offset": kv_offset}
        how |= {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "allow_is_causal_skip": False}
        return (sdpa_mask if bools else eager_mask)(**how)  # type: ignore[return-value]

    if getattr(config, "model_type", None) in EXTENDED:
        return make()
    text, tables = read(mask_function)
    structure, documents = parted(text, not use_vmap)  # use_vmap: functions of other people are part of it
    padding, more = padded(attention_mask, kv_offset + kv_length)
    sizes, kind = (batch_size, q_length, kv_length, q_offset, kv_offset), torch.bool if bools else dtype
    return SymbolicMask(structure, *sizes, documents, padding, "", {**tables, **more}, make=make, dtype=kind)


def padded(real: Tensor | None, stop: int) -> tuple[tuple[str, str], dict[str, Any]]:
    """Texts for which keys before `stop` are no padding, left and right of the tokens, and what they read. Tokens that
    lie side by side are two numbers a row, which stay the same from step to step of `generate`."""
    if real is None:
        return ("", ""), {}
    have = real.shape[-1]
    # a graph has no values, and those on a device would be waited for
    if torch.compiler.is_compiling() or not real.is_cpu:
        return ("real[b, k]", ""), {"real": _filled(real, stop)}
    if have >= stop and bool(real.all()):  # every key is a token
        return ("", ""), {}
    count, first = real.sum(-1), real.int().argmax(-1)  # argmax takes no Bools
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


def _kind(array: Tensor) -> str:
    return f"{str(array.dtype).removeprefix('torch.')}{list(array.shape)}"


def dense(array: Tensor, q: Tensor, k: Tensor) -> SymbolicMask:
    """A mask [batch or 1, heads or 1, q_len, kv_len] that a call brings. Bools are looked up, and so are Floats that
    are 0 or no more than the least of their dtype; other Floats are added to scores. Ints, which eager attention adds
    and sdpa refuses, are an error."""
    (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
    want = batch, heads, q_len, kv_len
    if array.ndim != 4 or any(n not in (1, m) for n, m in zip(array.shape, want)):
        text = f"attention_mask is {_kind(array)}, and this attention is [batch, heads, q_len, kv_len] = {list(want)}\n"
        text += "  give an axis its length there, or 1; or a 2-D attention_mask, 0 where tokens are padding"
        raise ShapeError(text)
    if not array.is_floating_point() and array.dtype != torch.bool:
        text = f"attention_mask is {_kind(array)}; with 4 axes it is Bools, True where a key is visible, or Floats "
        raise ParameterError(f"{text}that are added to scores, 0 where a key is visible")
    index = ", ".join([x if n > 1 else "0" for x, n in zip(POSITIONS, array.shape)])
    if array.is_floating_point() and array.is_cpu and not torch.compiler.is_compiling() and not learns(array):
        hidden = array <= torch.finfo(array.dtype).min
        if bool((hidden | (array == 0)).all()):
            array = ~hidden
    text, tables = f"attention_mask[{index}]", {"attention_mask": array}
    if array.is_floating_point():
        return SymbolicMask("", batch, q_len, kv_len, bias=text, tables=tables)
    return SymbolicMask(text, batch, q_len, kv_len, tables=tables)


def chosen(mask: SymbolicMask, indices: Tensor, size: int, heads: int) -> SymbolicMask:
    """A mask of which a query sees those keys that a model has chosen for it. `indices` are [batch, groups of heads,
    q_len, n] blocks of `size` keys, negative where there are fewer."""
    blocks = -(-mask.kv_len // size)
    places = torch.where(indices < 0, blocks, indices).long()  # those that are none fall behind the last
    table = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    table = table.scatter(-1, places, True)
    group = "0" if indices.shape[1] == 1 else f"h // {heads // indices.shape[1]}"
    key = "k - k_start" if size == 1 else f"(k - k_start) // {size}"
    _, _, q_start, k_start = mask.origin
    more = {"chosen": table, "q_start": q_start, "k_start": k_start}
    # plans belong to the mask without these keys
    return replace(mask, chosen=f"chosen[b, {group}, q - q_start, {key}]", tables={**mask.tables, **more}, cached={})


POSITIONS = ("b", "h", "q", "k")


class TextTerm:
    """A text in place of a number that a mask function computes with; other tensors become tables."""

    device = None  # mask functions move results there

    def __init__(self, text: str, tables: list[Tensor]) -> None:
        self.text, self.tables = text, tables

    def joined(self, left: Any, sign: str, right: Any) -> TextTerm:
        return TextTerm(f"({term_text(left, self.tables)} {sign} {term_text(right, self.tables)})", self.tables)

    # fmt: off
    def __invert__(self) -> TextTerm: return TextTerm(f"(~{self.text})", self.tables)
    def __neg__(self) -> TextTerm: return TextTerm(f"(-{self.text})", self.tables)
    def __abs__(self) -> TextTerm: return TextTerm(f"abs({self.text})", self.tables)
    def to(self, *_: Any, **__: Any) -> TextTerm: return self
    def new_ones(self, *_: Any, **__: Any) -> TextTerm: return TextTerm("true", self.tables)
    def new_zeros(self, *_: Any, **__: Any) -> TextTerm: return TextTerm("false", self.tables)
    # fmt: on

    def __bool__(self) -> bool:
        raise TypeError("a mask function asks whether a position is true, and positions have no values here")

    __hash__ = None  # type: ignore[assignment]  # nothing is equal to another


def _binary(sign: str, reflected: bool) -> Callable[[TextTerm, Any], TextTerm]:
    return lambda self, x: self.joined(x, sign, self) if reflected else self.joined(self, sign, x)


SIGNS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|"}  # these also with the term on the right
for _name, _sign in SIGNS.items():
    setattr(TextTerm, f"__r{_name}__", _binary(_sign, True))
SIGNS |= {"floordiv": "//", "mod": "%", "xor": "^", "eq": "==", "ne": "!="}
SIGNS |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _sign in SIGNS.items():
    setattr(TextTerm, f"__{_name}__", _binary(_sign, False))


def term_text(x: Any, tables: list[Tensor]) -> str:
    if isinstance(x, TextTerm):
        return x.text
    if isinstance(x, Tensor):
        return named(x, tables)
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, (int, float)):
        return f"({x!r})" if x < 0 else repr(x)  # a sign behind an operator needs parentheses
    raise TypeError(f"a mask function computes with {x!r}")


def named(table: Tensor, tables: list[Tensor]) -> str:
    """The name of a table: t0, t1, ..."""
    for i, known in enumerate(tables):
        if known is table:  # `==` would compare entries
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
            if any(isinstance(i, TextTerm) for i in index):
                if len(index) != table.ndim:
                    raise TypeError(f"a tensor of {table.ndim} axes is read with {len(index)} indices")
                inside = ", ".join([term_text(i, self.tables) for i in index])
                return TextTerm(f"{named(table, self.tables)}[{inside}]", self.tables)
        return func(*args, **(kwargs or {}))


def read(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The text of a mask function of transformers, and its tables by name."""
    tables: list[Tensor] = []
    positions = [TextTerm(name, tables) for name in POSITIONS]
    if torch.compiler.is_compiling():
        with Lookups(tables):
            term = function(*positions)
        return term_text(term, tables), {f"t{i}": x for i, x in enumerate(tables)}
    try:
        with Lookups(tables):
            term = function(*positions)
        return term_text(term, tables), {f"t{i}": x for i, x in enumerate(tables)}
    except TypeError:  # a function of torch, or more: frisket's reader of torch callables knows those, or says why not
        parsed = mask(function)
        return str(parsed), dict(parsed.params)
