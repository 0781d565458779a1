"""flex_attention in a graph of torch: torch.compile, torch.export, torch.func.

Dynamo reads a score_mod where it is called, so numbers it captured are guarded and tensors are inputs of the
graph. What is then called has the score_mod as a graph of torch over those inputs. The call leaves `frisket::attend`
in its place, which holds the expression of that graph as a text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._dynamo.variables import higher_order_ops as dynamo
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import noop_mask
from torch.utils._python_dispatch import _disable_current_modes

from frisket.dsl import ir
from frisket.dsl.from_python.symbol import Symbol
from frisket.dsl.from_python.trace import Kind, trace
from frisket.runtime.calls.options import CallArgs, Options
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.masks.mask import Mask, ScoreMod, only, program
from frisket.runtime.torch import graph as torch_library
from frisket.runtime.torch.jagged import Ragged
from frisket.runtime.torch.spec import spec_of

from .checks import options_of, read
from .score_mod import confined, local_in_graph, traced, without_clashes
from .tensor_mask import TensorMask

if TYPE_CHECKING:
    from .block_mask import BlockMask


def unchanged(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """The score mod that is none."""
    return score


Qkv = tuple[Tensor, Tensor, Tensor]
Mod = TensorMask | None
Outputs = tuple[Tensor, Tensor | None, Tensor | None]  # (out, lse, max)


class FlexAttentionOp(HigherOrderOperator):
    """A call of flex_attention, as Dynamo writes it: score_mod and mask_mod are graphs, what they captured is last."""

    def __call__(self, *arguments: Any) -> Any:
        """Whatever mode is on sees the operator that this is in the end, and nothing of this one."""
        query, key, value, score_mod, masks, _, request, *captured = arguments
        score_values, mask_values = captured or ((), ())
        mod = over_graph(score_mod, score_values, "score")
        if request["text"] is not None:
            visible = TensorMask(program(request["text"]).mask.expr, request["values"])  # type: ignore[union-attr]
        else:
            visible = over_graph(masks[-1], mask_values, "mask")
        if (kinds := request["tiles"]) is not None:
            visible = visible.within(kinds, tuple(kinds.shape[:-2]), tuple(map(_fixed, request["block"])))
        if request["ragged"] is not None:
            ragged = Ragged(*(*request["ragged"], request["pattern"]))
            visible, mod = confined(visible, ragged), local_in_graph(mod, ragged)
        kernel = {n: _fixed(x) for n, x in request["kernel"].items()}
        options = options_of(_fixed(request["scale"]), request["gqa"], read(kernel), query.device.type)
        return operator((query, key, value), mod, visible, options, request["top"], request["rows"])


class BlockMaskOp(HigherOrderOperator):
    """The tiles of a mask that a graph made, as Dynamo writes it: arguments as those of `FlexAttentionOp`."""

    def __call__(self, *arguments: Any) -> Any:
        query, _, _, _, masks, _, request, *captured = arguments
        visible = over_graph(masks[-1], captured[-1] if captured else (), "mask")
        if request["text"] is not None:
            visible = TensorMask(program(request["text"]).mask.expr, {})  # type: ignore[union-attr]
        # numbers are part of the program, tensors and open sizes are inputs of the operator
        numbers = {n: x for n, x in visible.values.items() if isinstance(x, bool | int | float)}
        free = {n: x for n, x in visible.values.items() if n not in numbers}
        mask_program = CallProgram(Mask(visible.expr, only(numbers, visible.expr)), None)
        spec = spec_of(mask_program, Options(), free)
        return (torch_library.written_tiles(spec, query, request["sizes"], request["block"], free),)


def tiles(mask: BlockMask) -> Tensor:
    """uint8 [B, H, rows, columns] of the tiles of a mask made in the current graph: 0 empty, 1 partial, 2 full."""
    like = torch.empty(0, device=mask._device)  # says the device, and is not read
    heads = (1, 1, *mask._batch)[-2:]
    request = {"text": mask._text, "sizes": (*mask._lengths, *heads), "block": mask._block}
    mask_mod = noop_mask if mask._text is not None else mask._fn
    (kinds,) = laid_out(like, like, like, unchanged, (mask_mod,), None, request)
    return kinds  # type: ignore[no-any-return]


# cacheable: torch's caches on disk take graphs with it
call = FlexAttentionOp("frisket_flex_attention", cacheable=True)  # type: ignore[no-untyped-call]
laid_out = BlockMaskOp("frisket_block_mask", cacheable=True)  # type: ignore[no-untyped-call]


class CallVariable(dynamo.FlexAttentionHigherOrderVariable):
    """The variable of Dynamo for `FlexAttentionOp` and `BlockMaskOp`. One record of side effects is kept across a call.

    Dynamo goes on with a copy of that record, and objects it knows look into the old one. Attributes of a mask that are
    set after the call would be lost."""

    def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        record = tx.output.side_effects
        variable = super()._call_function(tx, args, kwargs)
        if record is not tx.output.side_effects:
            vars(record).update(vars(tx.output.side_effects))
            tx.output.side_effects = record
        return variable


# Dynamo has no public way to add one
for _one in (call, laid_out):
    dynamo._hop_name_to_variable_class[_one.__name__] = CallVariable


def _fixed(x: Any) -> Any:
    """A number of the graph that is open becomes what it is now: another one is another graph."""
    return int(x) if isinstance(x, torch.SymInt) else float(x) if isinstance(x, torch.SymFloat) else x


def over_graph(graph: Any, values: tuple[Any, ...], kind: Kind) -> TensorMask:
    """The mask or score that a graph computes, over `values`: the tensors and integers that are the last of its inputs.
    Open sizes of tensors stay open if only the ends of lookups depend on them."""
    mod = _read(graph, values, kind, lambda n: n if isinstance(n, int) else n.node.hint)
    if any(not isinstance(n, int) for x in values if isinstance(x, Tensor) for n in x.shape):
        # differs where the expression depends on the size
        longer = _read(graph, values, kind, lambda n: n if isinstance(n, int) else n.node.hint + 1)
        if longer.expr is not mod.expr:
            return _read(graph, values, kind, int)  # a guard of the graph: another size is another one
    return mod


def _read(graph: Any, values: tuple[Any, ...], kind: Kind, size: Callable[[Any], int]) -> TensorMask:
    names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    captured = dict(zip(names[len(names) - len(values) :], values, strict=True))

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return graph(score, b, h, q, k, *inputs.values())

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return graph(b, h, q, k, *inputs.values())

    with _disable_current_modes():  # constants that the function makes are to have values
        inputs = {n: _stand_in(n, x, size) for n, x in captured.items()}
        if kind == "score":
            mod = traced(score_mod, valueless=True)[0]
        else:
            shown = trace(mask_mod, "mask", valueless=True, by_place=True)
            mod = TensorMask(shown.expr, shown.tables)
    by_stand_in = {id(x): captured[n] for n, x in inputs.items()}
    tables = {n: by_stand_in[id(x)] for n, x in mod.values.items()}
    return TensorMask(mod.expr, {**only(captured, mod.expr), **tables})


def _stand_in(name: str, x: Any, size: Callable[[Any], int]) -> Any:
    """A tensor without values, of this dtype and shape, or a number without one."""
    if not isinstance(x, Tensor):
        return Symbol(ir.param(name))
    shape = [size(n) for n in x.shape]
    return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)


def operator(qkv: Qkv, mod: Mod, visible: Mod, options: Options, top: bool, rows: bool = True) -> Outputs:
    """(out, lse, max) by an operator of frisket; without `rows`, lse and max may be None."""
    if mod is not None:
        mod = without_clashes(mod, visible)[0]
    values = {n: x for one in (visible, mod) if one is not None for n, x in one.values.items()}
    numbers = {n: x for n, x in values.items() if isinstance(x, bool | int | float)}
    mask = None if visible is None else Mask(visible.expr, only(numbers, visible.expr))
    program = CallProgram(mask, None if mod is None else ScoreMod(mod.expr, only(numbers, mod.expr)))
    free = {n: x for n, x in values.items() if n not in numbers}
    spec = spec_of(program, options, free)
    return torch_library.written(spec, 0.0, options.backend, CallArgs(*qkv, top=top), None, free, rows)
