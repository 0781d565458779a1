"""flex_attention, with torch's arguments and results; and its place in modules that have imported torch's.

>>> import types, sys
>>> from torch.nn.attention import flex_attention as torch_flex
>>> library = sys.modules["library"] = types.ModuleType("library")
>>> library.attend = torch_flex.flex_attention  # as `from torch.nn.attention.flex_attention import ...` does
>>> with install() as installed:
...     "library.attend" in installed.changed, library.attend.__module__
(True, 'frisket.runtime.flex.attention')
>>> library.attend.__module__
'torch.nn.attention.flex_attention'
>>> del sys.modules["library"]
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, FlexKernelOptions, noop_mask
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask
from torch.utils._pytree import SUPPORTED_NODES

from frisket.dsl.errors import ParameterError
from frisket.grammar.memo import cached_on
from frisket.runtime.calls.arrays import in_graph, version_of
from frisket.runtime.machine.parameters import learns
from frisket.runtime.torch.jagged import Ragged, closed_all, opened

from . import create
from . import score_mod as score_mods
from .block_mask import BlockMask
from .checks import ArrayError, alike, check_arrays, check_block_mask, check_device, options_of, read
from .tensor_mask import LISTS, columns_of, kinds_of


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: TorchBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = ...,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: None = None,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: TorchBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = ...,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: TorchBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: FlexKernelOptions | None = None,
    return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: TorchBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """`flex_attention(query, key, value, score_mod, block_mask)`: torch's flex_attention, run by frisket.

    >>> import torch
    >>> from frisket.flex import create_block_mask, flex_attention
    >>> q = torch.randn(1, 2, 64, 16, requires_grad=True)
    >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 64, 64, device="cpu")
    >>> flex_attention(q, q, q, lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx), causal).shape
    torch.Size([1, 2, 64, 16])

    query (B, Hq, L, E), key (B, Hkv, S, E), value (B, Hkv, S, Ev); out (B, Hq, L, Ev). The batch of key and value may
    be 1, and with `enable_gqa` query head h reads their head h // (Hq // Hkv). `score_mod(score, b, h, q_idx, kv_idx)`
    changes scores in float32; `block_mask` says what is visible; `scale` is 1 / sqrt(E) unless given. `return_lse`
    gives (out, lse). `return_aux=AuxRequest(lse=True, max_scores=True)` gives (out, AuxOutput): float32 (B, Hq, L), the
    natural log of the sum that the softmax divides by, and the largest visible score, without a gradient. A query that
    sees no key has out 0 and lse -inf.

    Gradients flow to query, key, value, a learned `scale`, and every Float tensor that score_mod captured, on CPUs too.
    Traces are kept: a score_mod of the same code and numbers is not traced again, also with other captured tensors.

    Raises `ShapeError` (a ValueError) where shapes, or the mask's lengths, B and H do not fit; `ScoreModError` for a
    function that is no score_mod. `GatherError` (an IndexError) where it reads outside a table at a visible position,
    below 0 too; `KernelOptionError` for options that are unknown, impossible, or false of the mask. See docs/flex.md.
    """
    if return_lse and return_aux is not None:
        raise ParameterError("return_lse and return_aux are both given\n  return_aux=AuxRequest(lse=True) has both")
    if not isinstance(return_aux, AuxRequest | None):
        text = f"return_aux is {return_aux!r}\n  it says what else to return: AuxRequest(lse=True, max_scores=True)"
        raise ParameterError(text)
    # a kernel takes the scale as a number, which has no gradient: one that learns becomes part of the score mod
    if isinstance(scale, Tensor) and (in_graph(scale) or learns(scale)) and not scale.ndim:
        score_mod, scale = _scaled(scale, score_mod), 1.0
    top = return_aux is not None and return_aux.max_scores
    rows = top or return_lse or (return_aux is not None and return_aux.lse)
    args = FlexArgs(query, key, value, score_mod, block_mask, scale, enable_gqa, kernel_options, top, rows)
    results: tuple[Tensor, Any, Any] = compiled(args) if torch.compiler.is_dynamo_compiling() else attend(args)
    out, lse, largest = results
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, largest if return_aux.max_scores else None)
    return (out, lse) if return_lse else out


def _scaled(scale: Tensor, score_mod: Callable[..., Any] | None) -> Callable[..., Any]:
    """A score mod of scores times a factor that learns, or that is a value of the current graph."""

    def scaled(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return score * scale if score_mod is None else score_mod(score * scale, b, h, q_idx, kv_idx)

    return scaled


class FlexArgs(NamedTuple):
    """The arguments of a call of flex_attention: with `top` the max is returned, without `rows` lse and max may be None
    in a graph."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Any
    block_mask: Any
    scale: float | None
    gqa: bool
    kernel_options: Any
    top: bool
    rows: bool


Results = tuple[Tensor, Tensor | None, Tensor | None]  # (out, lse, max)


def _arranged(args: FlexArgs) -> tuple[Tensor, Tensor, Tensor, Ragged | None]:
    """query, key and value, checked, of one dtype and one batch, and the sequences that they hold packed."""
    (query, key, value), ragged = args[:3], None
    if isinstance(query, Tensor) and query.is_nested:
        (query, key, value), ragged = opened(query, key, value, score_mods.NAMES, ArrayError)
        score_mods.check_total(args.block_mask, query, key)
    check_arrays(query, key, value, args.gqa)
    query, key, value = alike(query, key, value)
    if args.block_mask is not None:
        check_block_mask(args.block_mask, query, key)
    if key.shape[0] != query.shape[0]:
        # `expand` is a view: one batch entry serves all without a copy
        key, value = key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)
    return query, key, value, ragged


def _returned(results: Results, args: FlexArgs, dtype: torch.dtype, ragged: Ragged | None) -> Results:
    """Results of a query in `dtype`, to which `alike` may have widened it, as the caller's: in its dtype, nested."""
    if dtype != args.query.dtype:
        results = results[0].to(args.query.dtype), results[1], results[2]
    return results if ragged is None else closed_all(results, args.query)


def compiled(args: FlexArgs) -> Results:
    """(out, lse, max) in a graph. Traced by Dynamo, so plain Python."""
    from .graph import call, unchanged  # imports torch._dynamo, which few programs need

    query, key, value, ragged = _arranged(args)
    _, _, _, score_mod, block_mask, scale, gqa, kernel_options, top, rows = args
    request: dict[str, Any] = {"scale": scale, "gqa": gqa, "top": top, "rows": rows or ragged is not None}
    request |= {"kernel": dict(kernel_options or {}), "text": None, "values": {}, "tiles": None, "block": None}
    request["ragged"] = None if ragged is None else ragged.tensors
    request["pattern"] = None if ragged is None else ragged.pattern
    # the operator has always a mask function: this one where a text, or no mask, says everything
    mask_mod = noop_mask
    if block_mask is not None:
        ours = isinstance(block_mask, BlockMask)
        if ours and block_mask._text is not None:
            request["text"] = block_mask._text
            request["values"] = {} if block_mask._traced is None else dict(block_mask._traced.values)
        else:
            mask_mod = block_mask.mask_mod
        if not ours or block_mask._user_lists is not None:
            lists = {n: getattr(block_mask, n) for n in LISTS[:4]}  # kinds_of reads the lists by rows alone
            kinds = kinds_of(lists, columns_of(lists, block_mask.seq_lengths[1], block_mask.BLOCK_SIZE[1]))
            request["tiles"], request["block"] = kinds, block_mask.BLOCK_SIZE
    # `or` would not do: torch 2.11 cannot ask a nested function for its truth in a graph
    score = unchanged if score_mod is None else score_mod
    return _returned(call(query, key, value, score, (mask_mod,), None, request), args, query.dtype, ragged)


def attend(args: FlexArgs) -> Results:
    """(out, lse, max) of a call in eager mode."""
    query, key, value, ragged = _arranged(args)
    _, _, _, score_mod, block_mask, scale, gqa, kernel_options, top, _ = args
    words = None
    if block_mask is not None:
        block_mask = block_mask if isinstance(block_mask, BlockMask) else _ours(block_mask)
        check_device(block_mask, query)
    requests = read(kernel_options)
    options = options_of(scale, gqa, requests, query.device.type)
    visible = None if block_mask is None else block_mask.tensor_mask
    if ragged is not None:
        visible = score_mods.visible_inside(visible, ragged)
    watched = in_graph(query, key, value)
    # in a graph it is traced without values, below
    mod, tensors = (None, {}) if watched or score_mod is None else score_mods.scored(score_mod)
    if watched or in_graph(query, *tensors.values()):  # what score_mod captured may be in a graph that query is not in
        from .graph import operator

        score = None if score_mod is None else score_mods.traced(score_mod, valueless=True)[0]
        score = score if score is None or ragged is None else score_mods.local_in_graph(score, ragged)
        results: Results = operator((query, key, value), score, visible, options, top)
    else:
        if mod is not None and ragged is not None:
            mod, names = score_mods.local(mod, ragged)
            tensors = {**tensors, **score_mods.values_of(names, ragged)}
            words = partial(score_mods.in_sequences, names, ragged)
        pair = score_mods.pair_of(mod, visible, options, tensors)
        pair.check(query, key, tensors, requests, block_mask, words)
        results = pair(query, key, value, tensors, top)
    return _returned(results, args, query.dtype, ragged)


def _ours(theirs: TorchBlockMask) -> BlockMask:
    """torch's BlockMask as one of ours: a position is visible in a full tile, and in a partial one where mask_mod shows
    it. Kept with it, until an attribute is replaced or mask_mod reads something else."""
    # an object equals only itself: without a state no mask is used again
    fields, (mod_state, tensors) = vars(theirs), score_mods.state_of(theirs.mask_mod) or (object(), [])
    versions = ((id(x), version_of(x) if isinstance(x, Tensor) else 0) for x in fields.values())
    state = mod_state, *map(id, tensors), *versions
    masks: dict[Any, tuple[BlockMask, Any]] = cached_on(theirs, "ours", dict)
    if state not in masks:
        masks.clear()  # an older state would keep its lists and tensors alive
        masks[state] = BlockMask(**fields), (*fields.values(), *tensors)  # live as long: no other object has their id
    return masks[state][0]


# -- in the place of torch's ----------------------------------------------------------------------------

CREATE = """create_block_mask create_nested_block_mask create_mask and_masks or_masks
_create_sparse_block_from_block_mask _create_empty_block_mask""".split()
# what differs from torch's; the other names of frisket.flex are torch's own objects
OURS: dict[str, Any] = {"flex_attention": flex_attention, "BlockMask": BlockMask}
OURS |= {name: getattr(create, name) for name in CREATE}
OWN_ATTRIBUTES: Any = object.__getattribute__  # lazy objects have another, which imports
TORCH: dict[str, Any] = {name: getattr(torch_flex, name) for name in OURS if hasattr(torch_flex, name)}


@dataclass
class Installed:
    """The places that `install` changed; `undo`, or the end of a `with` block, puts torch's functions back.

    >>> import frisket.flex
    >>> with frisket.flex.install() as installed:
    ...     "torch.nn.attention.flex_attention.flex_attention" in installed.changed
    True

    `changed` has the places that held torch's functions and hold frisket's, such as `library.layers.attend`, and the
    names of these functions. `left` are places that still hold torch's.
    """

    changed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    _assigned: list[tuple[Callable[[Any], Any], str]] = field(default_factory=list, repr=False)
    _node: Any = field(default=None, repr=False)

    def undo(self) -> None:
        """Put torch's functions back. Modules that were imported in the meantime keep frisket's.

        >>> import frisket.flex
        >>> installed = frisket.flex.install()
        >>> installed.undo()
        """
        while self._assigned:
            assign, name = self._assigned.pop()
            assign(TORCH[name])
        if self._node is not None:
            SUPPORTED_NODES[BlockMask], self._node = self._node, None

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"frisket.flex is in {len(self.changed)} places that held torch's flex_attention:", *self.changed]
        return "\n  ".join(lines) + "".join(f"\ntorch's is still in {place}" for place in self.left)


def install() -> Installed:
    """`frisket.flex.install()`: libraries that import torch's flex_attention get frisket's, already imported ones too.

    >>> from frisket.flex import install
    >>> import torch.nn.attention.flex_attention as torch_flex
    >>> with install():
    ...     torch_flex.create_block_mask("causal", None, None, 512, 512, "cpu").sparsity()
    37.5

    Assigns the names of `torch.nn.attention.flex_attention` that differ from torch's. Then it replaces the old objects
    in all imported modules: in attributes of modules, classes and their objects, in dicts and lists. It looks into
    `functools.partial` and functions with closures, such as `torch.compile(create_block_mask)`. The order of imports
    does not matter. Masks made before are of torch's class, and no instances of frisket's `BlockMask`: call it first.

    While it is installed, a mask is one leaf of torch's pytrees, as torch's own is, and no input of `torch.export`.

    Returns an `Installed`, which says what changed and undoes it. A UserWarning names what still holds a function of
    torch and cannot be changed, such as an `lru_cache` or a default argument.
    """
    done, seen = Installed(), set[int]()
    names = {id(x): name for name, x in TORCH.items()}

    def replace(place: str, holder: Any) -> None:
        seen.add(id(holder))
        is_module, is_class = (issubclass(type(holder), x) for x in (ModuleType, type))
        for at, key, value, put in _slots(holder):
            kind = type(value)  # isinstance would have lazy objects import what they stand for
            if (name := names.get(id(value))) is not None:
                put(key, OURS[name])
                done.changed[place + at.format(key)] = name
                done._assigned.append((partial(put, key), name))
            elif id(value) in seen:
                continue
            elif kind in (FunctionType, partial, staticmethod, classmethod):
                replace(place + at.format(key), value)
            elif is_module or is_class:  # dicts, lists and objects are searched where modules and classes have them
                owner = value if issubclass(kind, type) else kind
                if kind in (dict, list) or owner.__module__ == (holder.__name__ if is_module else holder.__module__):
                    replace(place + at.format(key), value)

    done._node = SUPPORTED_NODES.pop(BlockMask, None)  # a leaf, as torch's class is
    for name, module in list(sys.modules.items()):
        # sys.modules may hold None, and frisket calls torch's functions itself
        if isinstance(module, ModuleType) and name.partition(".")[0] != "frisket":
            replace(name, module)
    done.left = _left()
    if done.left:
        text = f"torch's flex_attention is still in {', '.join(done.left)}\n"
        warnings.warn(f"{text}  call frisket.flex.install() before these are made", stacklevel=2)
    return done


def _slots(holder: Any) -> Iterator[tuple[str, Any, Any, Callable[[Any, Any], Any]]]:
    """The places inside an object: how each is written, its key, its value, and a function that assigns another."""
    kind = type(holder)
    if issubclass(kind, ModuleType | type):
        put = partial(setattr, holder)
        yield from ((".{}", key, x, put) for key, x in list(vars(holder).items()))
    elif kind in (dict, list):
        items = holder.items() if kind is dict else enumerate(holder)
        yield from (("[{!r}]", key, x, holder.__setitem__) for key, x in list(items))
    elif kind in (staticmethod, classmethod):
        yield "", None, holder.__func__, lambda _, x: holder.__init__(x)  # the object stays, other modules hold it
    elif kind is partial:
        yield "", None, holder.func, lambda _, x: holder.__setstate__((x, holder.args, holder.keywords, vars(holder)))
        yield from _slots(holder.keywords)
    elif kind is FunctionType:
        for cell in holder.__closure__ or ():
            try:
                yield "", "cell_contents", cell.cell_contents, partial(setattr, cell)
            except ValueError:  # a variable without a value yet
                continue
        for names in (vars(holder), holder.__kwdefaults__ or {}):
            yield from (("", *rest) for _, *rest in _slots(names))
    elif kind.__getattribute__ is OWN_ATTRIBUTES and hasattr(holder, "__dict__"):
        yield from _slots(vars(holder))


def _left() -> list[str]:
    """Places outside of frisket that still refer to a function of torch, and objects of torch's class."""
    functions = tuple([x for x in TORCH.values() if isinstance(x, FunctionType)])  # a tuple is not copied by a call
    mask = TORCH["BlockMask"]
    left = {_place(x, functions) for x in gc.get_referrers(*functions) if x is not TORCH and x is not functions}
    left |= {f"{x.__module__}.{x.__qualname__}" for x in mask.__subclasses__()}
    left = {x for x in left if x and not x.startswith("frisket.")}
    masks = sum(type(x) is mask for x in gc.get_referrers(mask))
    return sorted(left) + ([f"{masks} masks of torch's class"] if masks else [])


def _place(x: Any, of: tuple[Any, ...]) -> str:
    """The module, class, function or object that leads to an object which refers to one of these; "" for a frame."""
    level, below = (x,), of
    for _ in range(4):
        for one in level:
            if isinstance(one, FrameType):
                return ""
            if isinstance(one, dict) and "__spec__" in one:  # the namespace of a module
                return next((f"{one['__name__']}.{key}" for key, y in one.items() if any(y is z for z in below)), "")
            kind = one if isinstance(one, FunctionType | type) else type(one)
            if kind.__module__ not in ("builtins", "functools", torch_flex.__name__):  # wrappers have torch's name
                return f"{kind.__module__}.{kind.__qualname__}"
        if len(level) > 4:  # each of them is looked for in every object of the program
            break
        level, below = tuple([y for y in gc.get_referrers(*level) if y is not level and y is not below]), level
    return f"a {type(x).__name__}"
