"""BlockMask as a pytree of torch: its lists and the tensors of its mask are leaves, in this order."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from .block_mask import BlockMask
from .tensor_mask import TensorMask
from .tile_tensors import TENSORS, Lists

OPTIONS = ("_lengths", "_block", "_batch", "_device", "_separate_full", "_columns", "_orders", "dq_kv_order_spt")


def flatten(mask: BlockMask) -> tuple[list[Any], tuple[Any, ...]]:
    keyed, context = flatten_with_keys(mask)
    return [x for _, x in keyed], context


def flatten_with_keys(mask: BlockMask) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    lists = {n: x for n, x in mask._tensors().items() if x is not None}
    tensors, numbers = mask._mod.tensors, mask._mod.numbers
    options = tuple(getattr(mask, n) for n in OPTIONS)
    context = (
        mask._mod.expr, tuple((n, type(x), x) for n, x in numbers.items()), tuple(tensors), tuple(lists),
        mask._user_lists is not None, mask._text, *options,
    )  # fmt: skip
    return [(pytree.GetAttrKey(n), x) for n, x in {**lists, **tensors}.items()], context


def unflatten(leaves: Any, context: tuple[Any, ...]) -> BlockMask:
    expr, numbers, tensors, names, has_lists, text, *options = context
    leaves = list(leaves)
    values = {**{n: x for n, _, x in numbers}, **dict(zip(tensors, leaves[len(names) :], strict=True))}
    lengths, block, batch, device, *_ = options
    # Dynamo reads this, so nothing is made of the values here
    mask = BlockMask.of(TensorMask(expr, values), lengths, block, batch, device, text=text)
    for name, value in zip(OPTIONS, options, strict=True):
        setattr(mask, name, value)
    lists: Lists = {**dict.fromkeys(TENSORS), **dict(zip(names, leaves[: len(names)], strict=True))}
    if has_lists:
        mask._user_lists = lists
    else:
        mask._results = {"lists": lists}
    return mask


pytree.register_pytree_node(
    BlockMask, flatten, unflatten, serialized_type_name="frisket.flex.BlockMask",
    flatten_with_keys_fn=flatten_with_keys,
)  # fmt: skip
