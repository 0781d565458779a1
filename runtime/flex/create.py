"""Masks as flex_attention takes them: create_block_mask, create_nested_block_mask, create_mask, and_masks, or_masks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks as torch_and_masks  # torch's, even where replaced there
from torch.nn.attention.flex_attention import create_mask as torch_create_mask
from torch.nn.attention.flex_attention import or_masks as torch_or_masks

from frisket.dsl import ir
from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.ir import Expr
from frisket.dsl.types import BOOL
from frisket.lowering.plan import Sizes
from frisket.runtime.machine.caller import leave
from frisket.runtime.masks.mask import Mask, MaskLike, ScoreLike, ScoreMod, program

from .block_mask import Block, BlockMask, forms_of
from .checks import MaskModError, count_of, is_count, pair
from .derived import packed_in_graph
from .score_mod import packed
from .tensor_mask import TensorMask, of_bound, of_function, only_read, ordered, tensor_mask_of


def create_block_mask(
    mask_mod: MaskLike | TensorMask,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: Block = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """`create_block_mask(lambda b, h, q, k: q >= k, None, None, 4096, 4096)`: a mask, to be laid out in tiles.

    >>> create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cpu").sparsity()
    37.5

    `mask_mod` is a torch function of (b, h, q_idx, kv_idx), a text, or a `frisket.Mask`. It is read once, as an
    expression; no position is evaluated here, and nothing is copied. B and H are the numbers of batch entries and
    heads; None stands for any number, with the same mask. Lengths and BLOCK_SIZE, one number or (queries, keys), are in
    tokens. `device` is where the lists will be: the accelerator, if there is one, unless given. With
    `separate_full_blocks=False` full tiles are among the partial ones, and `compute_dq_write_order` adds
    `dq_write_order`, from the first column of keys or (`dq_kv_order`) from the last. `_compile` has no effect.

    Raises `MaskModError`, also an AssertionError, RuntimeError and ValueError, for a function that is no
    mask: a score mod, a function that returns numbers, `and` or `if` on a position. Raises `ShapeError`, a ValueError,
    for lengths and counts that are not positive. Raises `GatherError`, an IndexError, where the mask shows a position
    at which it reads outside a table, below 0 too. That is at once if its tables are on the host, else when it is laid
    out.
    """
    if _compile and not torch.compiler.is_dynamo_compiling():
        message = "_compile has no effect: the mask is never evaluated on every position"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
    if not isinstance(dq_kv_order, bool):
        message = f"dq_kv_order must be a bool when using create_block_mask, not {type(dq_kv_order).__name__}\n"
        raise ParameterError(f"{message}  BlockMask.from_kv_blocks takes a tensor")
    mod, fn, text = forms_of(mask_mod)
    lengths = pair((Q_LEN, KV_LEN), "(Q_LEN, KV_LEN)", 0)
    mask = BlockMask.of(mod, lengths, pair(BLOCK_SIZE, "BLOCK_SIZE"), _heads(B, H), _device(device), text=text)
    # mask_mod is then written for these lengths and this device
    mask._fn = None if isinstance(mask_mod, Joined) else fn
    mask._separate_full = separate_full_blocks
    if compute_dq_write_order:
        mask._orders, mask.dq_kv_order_spt = True, dq_kv_order
    if torch.compiler.is_compiling():  # nothing has values to look at
        return mask
    if mod is not None and all(x.is_cpu for x in mod.tensors.values()):  # values on a device are not waited for
        mask.check_lookups()
    return mask


def create_mask(
    mod_fn: MaskLike | ScoreLike, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None
) -> Tensor:
    """`create_mask("causal", None, None, 4, 4)`: every position, bool [B, H, Q_LEN, KV_LEN] on `device`.

    >>> create_mask("causal", None, None, 2, 2, "cpu")[0, 0]
    tensor([[ True, False],
            [ True,  True]])

    `mod_fn` is a mask or a score mod: a function, a text, or an object of frisket. A score mod shows a position if a
    score of 0 does not become -inf. Memory is in the square of the length, so use it to look at small masks.
    """
    if torch.compiler.is_dynamo_compiling():
        if callable(mod_fn):
            return torch_create_mask(mod_fn, B, H, Q_LEN, KV_LEN, _device(device))
        return leave(create_mask, mod_fn, B, H, Q_LEN, KV_LEN, device)  # type: ignore[no-any-return]
    mod = _shown(mod_fn)
    sizes: Sizes = (*_heads(B, H), *pair((Q_LEN, KV_LEN), "(Q_LEN, KV_LEN)", 0))
    where = _device(device)
    mask_mod = mod.callable(dict(zip("bhqk", sizes, strict=True)), sizes, "", where)
    axes = (torch.arange(n, device=where) for n in sizes)
    places = (x.view([-1 if i == axis else 1 for i in range(4)]) for axis, x in enumerate(axes))
    shown: Tensor = mask_mod(*places)
    return shown.expand(sizes).contiguous()


def _shown(what: Any) -> TensorMask:
    """The positions that a mask shows, or a score mod alone."""
    if isinstance(what, str):
        parts = program(what)
        what = parts.mask if parts.mask is not None else parts.score
    if isinstance(what, ScoreMod) or (isinstance(what, Expr) and what.type is not BOOL):
        mod = of_bound(what if isinstance(what, ScoreMod) else ScoreMod(what))
    elif callable(what) and not isinstance(what, Joined):  # a `Joined` is callable, too
        mod = of_function(what, None)
    else:
        mod = tensor_mask_of(what)
    if mod.expr.type is BOOL:
        return mod
    score = ir.substitute(mod.expr, {ir.SCORE: ir.lit(0.0)})
    return only_read(ir.build("ne", score, ir.NEG_INF), mod.values)


def and_masks(*mask_mods: MaskLike) -> Callable[..., Any]:
    """`and_masks(causal, window)`: a mask_mod that shows what all of them show; without masks, everything.

    >>> create_mask(and_masks("causal", "k < 1"), None, None, 2, 2, "cpu")[0, 0].tolist()
    [[True, False], [True, False]]

    Each is a function, a text or a `frisket.Mask`; anything else is a RuntimeError.
    """
    return _joined("and", mask_mods)


def or_masks(*mask_mods: MaskLike) -> Callable[..., Any]:
    """`or_masks(causal, "k < 64")`: a mask_mod that shows what any of them shows; without masks, nothing.

    >>> create_mask(or_masks("causal", "k < 2"), None, None, 2, 2, "cpu")[0, 0].tolist()
    [[True, True], [True, True]]
    """
    return _joined("or", mask_mods)


def _joined(op: str, mask_mods: tuple[Any, ...]) -> Callable[..., Any]:
    for one in mask_mods:
        if not callable(one) and not isinstance(one, str | Expr | Mask):
            text = f"{op}_masks of {type(one).__name__}: {one!r}\n  all inputs are mask_mods: functions of (b, h, "
            raise MaskModError(f"{text}q_idx, kv_idx), texts, or frisket.Mask")
    if all(map(callable, mask_mods)):
        return (torch_and_masks if op == "and" else torch_or_masks)(*mask_mods)
    if torch.compiler.is_dynamo_compiling():
        return leave(_joined, op, mask_mods)  # type: ignore[no-any-return]
    return Joined(reduce(lambda x, y: x.join(op, y), map(tensor_mask_of, mask_mods)))


class Joined:
    """A mask_mod made of texts and masks: `create_block_mask` reads its expression, torch and people call it."""

    def __init__(self, mask: TensorMask) -> None:
        self.tensor_mask = mask
        self._functions: dict[Any, Callable[..., Any]] = {}

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key = q_idx.device, self.tensor_mask.versions
        if key not in self._functions:
            if sized := sorted(ir.uses(self.tensor_mask.expr) & set(ir.SIZES)):
                text = f"this mask reads `{sized[0]}`, which a mask_mod is not told\n  give it to create_block_mask"
                raise MaskModError(text)
            far = 1 << 31
            # one entry: older versions of its tensors do not return
            self._functions = {key: self.tensor_mask.callable({}, (far, far, far, far), "", q_idx.device)}
        return self._functions[key](b, h, q_idx, kv_idx)  # type: ignore[no-any-return]


def create_nested_block_mask(
    mask_mod: MaskLike,
    B: int | None,
    H: int | None,
    q_nt: Tensor,
    kv_nt: Tensor | None = None,
    BLOCK_SIZE: Block = 128,
    _compile: bool = False,
) -> BlockMask:
    """`create_nested_block_mask(causal, 1, 1, query)`: a mask over the packed sequences of a jagged nested tensor.

    >>> q = torch.nested.nested_tensor([torch.ones(n, 2, 16) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    >>> create_nested_block_mask("causal", 1, 1, q).shape
    (1, 1, 8, 8)

    `q_nt` [sequences, heads, j, head_dim], in any order of axes, gives the lengths of the sequences; `kv_nt` those of
    the keys, for cross attention (the queries' own, unless given). The mask is over the packed tokens, sum(S) of them.
    `mask_mod` receives the number of the sequence as b and positions inside it, and `Q_LEN` and `KV_LEN` of a text are
    its lengths. A token sees its own sequence alone. Tokens in the holes of a tensor with `lengths` see nothing.

    Raises `ShapeError`, a ValueError, for tensors that are not jagged, that hold different numbers of sequences or
    are on different devices; the rest as `create_block_mask`.
    """
    kv_nt = q_nt if kv_nt is None else kv_nt
    for name, x in (("q_nt", q_nt), ("kv_nt", kv_nt)):
        if not isinstance(x, Tensor) or x.layout is not torch.jagged:
            what = f"of layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{name} is {what}\n  it is torch.nested.nested_tensor(..., layout=torch.jagged)")
    if q_nt.device != kv_nt.device:
        raise ShapeError(f"q_nt is on {q_nt.device}, kv_nt on {kv_nt.device}\n  expected to be on the same device")
    if q_nt.shape[0] != kv_nt.shape[0]:
        text = f"q_nt holds {q_nt.shape[0]} sequences, kv_nt {kv_nt.shape[0]}\n  each query sequence has its keys"
        raise ShapeError(text)
    if torch.compiler.is_dynamo_compiling():
        # `packed_in_graph` reads offsets alone, and holes are in the lengths
        if not callable(mask_mod) or any(x.lengths() is not None for x in (q_nt, kv_nt)):  # type: ignore[attr-defined]
            return leave(create_nested_block_mask, mask_mod, B, H, q_nt, kv_nt, BLOCK_SIZE)  # type: ignore[no-any-return]
        lengths = _total(q_nt), _total(kv_nt)
        fn = packed_in_graph(mask_mod, q_nt.offsets(), kv_nt.offsets(), *lengths)  # type: ignore[attr-defined]
        return create_block_mask(fn, B, H, *lengths, q_nt.device, BLOCK_SIZE)
    mask = packed(tensor_mask_of(mask_mod), q_nt, kv_nt)
    return create_block_mask(mask, B, H, _total(q_nt), _total(kv_nt), q_nt.device, BLOCK_SIZE, _compile)


def _create_sparse_block_from_block_mask(
    block_mask: tuple[Tensor, Tensor | None],
    mask_mod: MaskLike | None,
    seq_lengths: tuple[int, int],
    Q_BLOCK_SIZE: int = 128,
    KV_BLOCK_SIZE: int = 128,
) -> BlockMask:
    """torch's private function: a mask from [B, H, rows, columns] of tiles, 1 where a tile is partial, or full."""
    count, index = ordered(block_mask[0])
    full: tuple[Tensor | None, Tensor | None] = (None, None) if block_mask[1] is None else ordered(block_mask[1])
    return BlockMask.from_kv_blocks(count, index, *full, (Q_BLOCK_SIZE, KV_BLOCK_SIZE), mask_mod, seq_lengths)


def _create_empty_block_mask(query: Tensor, key: Tensor) -> BlockMask:
    """torch's private function: a mask of one tile that fits every length, and shows everything."""
    one, zero = (f((1, 1, 1, 1), dtype=torch.int32, device=query.device) for f in (torch.ones, torch.zeros))
    # the size by which `check_block_mask` knows a mask without lengths
    return BlockMask.from_kv_blocks(one[0], zero, BLOCK_SIZE=1 << 30, seq_lengths=(1, 1))


def _total(nested: Tensor) -> int:
    """Tokens of all sequences."""
    # values have no axis of sequences
    return nested.values().shape[nested._ragged_idx - 1]  # type: ignore[attr-defined]


def _heads(batch: Any, heads: Any) -> tuple[int, int]:
    batch, heads = count_of(batch), count_of(heads)
    for name, n in (("B", batch), ("H", heads)):
        if n is not None and not is_count(n):
            raise ShapeError(f"{name} is {n!r}\n  it is how many there are, or None where all are alike")
    return int(batch or 1), int(heads or 1)


def _device(device: Any) -> torch.device:
    return _accelerator() if device is None else torch.device(device)


def _accelerator() -> torch.device:
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


_accelerator._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while a graph is made, not in it
