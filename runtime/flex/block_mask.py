"""BlockMask: torch's class with the mask inside. Its lists are made when they are first read.

It is a pytree of torch: its lists and the tensors of its mask are leaves, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs
from torch.utils import _pytree as pytree

from frisket.dsl import ir
from frisket.dsl.show import show
from frisket.grammar.memo import cached_on
from frisket.lowering.analysis.tiles import PARTIAL
from frisket.lowering.plan import Problem, Sizes
from frisket.runtime.calls.arrays import version_of
from frisket.runtime.export.tile_lists import exact_lists
from frisket.runtime.machine.caller import outside
from frisket.runtime.masks.layout import Layout, score_lookups
from frisket.runtime.masks.mask import Mask, MaskLike

from . import derived, tensor_mask
from .checks import ListError, check_lookups, pair
from .tensor_mask import LISTS, TENSORS, Lists, TensorMask

Block = int | tuple[int, int]
Pair = tuple[int, int]
Batch = tuple[int, ...]  # B and H, or one of them, or neither
Mod = TensorMask | None


class BlockMask(theirs.BlockMask):
    """Tiles of keys that each tile of queries reads, and the mask that says so.

    >>> from frisket.flex import create_block_mask
    >>> block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cpu")
    >>> block_mask
    BlockMask(shape=(1, 1, 512, 512), BLOCK_SIZE=(128, 128), sparsity=37.50%, mask='q >= k')
    >>> block_mask.kv_num_blocks, block_mask.full_kv_num_blocks
    (tensor([[[1, 1, 1, 1]]], dtype=torch.int32), tensor([[[0, 1, 2, 3]]], dtype=torch.int32))
    >>> block_mask[:, :, 1:3].mask
    Mask('q + 128 >= k')
    >>> block_mask.sparsity(), block_mask.to_dense()[0, 0, :2].tolist(), block_mask.to("cpu") == block_mask
    (37.5, [[1, 0, 0, 0], [1, 1, 0, 0]], True)
    >>> print(block_mask.to_string().splitlines()[1])
    ▒▒
    >>> BlockMask.from_kv_blocks(block_mask.kv_num_blocks, block_mask.kv_indices).shape
    (1, 1, 512, 512)
    >>> block_mask.check_lookups()  # IndexError where a visible position reads outside a table
    >>> block_mask.lay_out() is block_mask  # its lists are made now, before torch.compile traces a step
    True

    A subclass of torch's BlockMask, with the same attributes, shapes and numbers. A mask made by `create_block_mask`
    holds an expression. Its lists are made from the expression when they are first read, in time that grows with the
    border of the mask. `mask` is that expression as a `frisket.Mask`, at any length:
    `create_block_mask(block_mask.mask, B, H, longer, longer)` and `block_mask.mask.layout(...)` do not trace again.

    Captured tensors are not copied: change one in place, and lists, `mask` and attention follow at the next use. (In
    torch the lists stay, and mask_mod changes.)

    Slicing, `_adjust` and `to` keep the mask: `block_mask[:, :, 1:3].mask_mod` counts queries from the first of the
    part, `seq_lengths` is the length of the part, and `to` moves captured tensors too. Masks of one shape combine with
    `& | ~`. Masks with the same expression and values are equal. They hash, and pickle with lambdas too.
    """

    dq_kv_order_spt: bool | None
    _fn: Callable[..., Any] | None  # the user's own mask_mod
    _user_lists: Lists | None  # the user's own lists

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None,
        q_indices: Tensor | None,
        full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None,
        BLOCK_SIZE: Block = (128, 128),
        mask_mod: MaskLike = theirs.noop_mask,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        """Make a mask from lists of tiles, like torch's: a position is visible in a full tile, and in a partial one
        where `mask_mod` shows it. `from_kv_blocks` makes the lists of columns."""
        by_rows = kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices
        by_columns = q_num_blocks, q_indices, full_q_num_blocks, full_q_indices
        orders = dq_write_order, dq_write_order_full, dq_kv_order
        lists: Lists = dict(zip(TENSORS, (*by_rows, *by_columns, *orders), strict=True))
        lengths, block = pair(seq_lengths, "seq_lengths", 0), pair(BLOCK_SIZE, "BLOCK_SIZE")
        tensor_mask.check_lists(lists, lengths[1], block[1])
        if dq_write_order_full is not None and dq_write_order is None:
            raise ListError("dq_write_order_full requires dq_write_order")
        mod, fn, text = forms_of(mask_mod)
        self._begin(mod, lengths, block, tuple(kv_indices.shape[:-2]), kv_indices.device, text)
        self.dq_kv_order_spt, self._orders = dq_kv_order_spt, dq_write_order is not None
        self._separate_full, self._columns = full_kv_indices is not None, q_indices is not None
        self._user_lists, self._fn = lists, fn
        self._check_cover(lengths)

    def _begin(self, mod: Mod, lengths: Pair, block: Pair, batch: Batch, device: Any, text: str | None) -> None:
        self._traced = mod  # what mask_mod says; all of the mask unless there are lists of the user's
        self._text = mod.text if text is None and mod is not None else text
        self._fn = self._user_lists = None
        self._lengths, self._block, self._batch, self._device = lengths, block, batch, torch.device(device)
        self._separate_full = self._columns = True  # full tiles in separate lists; lists of columns at all
        self._orders, self.dq_kv_order_spt = False, None
        self._results: dict[str, Any] = {}  # what was laid out, from tensors of these versions
        self._versions: Any = None

    @classmethod
    def of(
        cls, mod: Mod, lengths: Pair, block: Pair, batch: Batch, device: Any, like: Any = None, text: str | None = None
    ) -> BlockMask:
        """A mask by its expression alone, with the options of another."""
        mask = cls.__new__(cls)  # `__init__` needs lists, and checks them
        mask._begin(mod, lengths, block, batch, device, text)
        if like is not None:
            mask._separate_full, mask._columns = like._separate_full, like._columns
            mask._orders, mask.dq_kv_order_spt = like._orders, like.dq_kv_order_spt
        return mask

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: Block = 128,
        mask_mod: MaskLike | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> BlockMask:
        """A mask from lists of tiles. `kv_num_blocks` int32 [B, H, rows] says how many tiles of keys a row of query
        tiles reads. `kv_indices` int32 [B, H, rows, columns] lists them, in its first entries. `full_*` are the same
        for tiles in which every position is visible. B or H is 1, or left out, where all entries or heads are alike.

        `seq_lengths` are rows and columns of whole tiles unless given, in tokens; where they are given, lists may be as
        short as the longest row needs. Raises `ListError` (a RuntimeError and an AssertionError, as torch raises) for
        lists that do not fit together, a tile listed twice, and a column that does not exist. The last two are checked
        where the lists are on the host.
        """
        lists: Lists = dict.fromkeys(TENSORS)
        lists |= {"kv_num_blocks": kv_num_blocks, "kv_indices": kv_indices}
        lists |= {"full_kv_num_blocks": full_kv_num_blocks, "full_kv_indices": full_kv_indices}
        lists |= {"dq_write_order": dq_write_order, "dq_write_order_full": dq_write_order_full}
        block = pair(BLOCK_SIZE, "BLOCK_SIZE")
        kv_len = None if seq_lengths is None else pair(seq_lengths, "seq_lengths", 0)[1]
        tensor_mask.check_lists(lists, kv_len, block[1])
        if dq_kv_order is not None and not isinstance(dq_kv_order, bool | Tensor):
            raise ListError(f"dq_kv_order must be a bool, Tensor, or None, not {type(dq_kv_order).__name__}")
        lists["dq_kv_order"] = dq_kv_order if isinstance(dq_kv_order, Tensor) else None
        columns = tensor_mask.columns_of(lists, kv_len, block[1])
        if seq_lengths is None:
            seq_lengths = kv_indices.shape[-2] * block[0], columns * block[1]
        lists = tensor_mask.with_columns(lists, columns, kv_len, block[1]) if compute_q_blocks else lists
        spt = dq_kv_order if isinstance(dq_kv_order, bool) else None
        mod = theirs.noop_mask if mask_mod is None else mask_mod
        return cls(seq_lengths, **lists, BLOCK_SIZE=block, mask_mod=mod, dq_kv_order_spt=spt)  # type: ignore[arg-type]

    # -- the mask ---------------------------------------------------------------------------------

    @property
    def _mod(self) -> TensorMask:
        """The mask_mod as an expression. Where the mask was made in a graph, it is traced when somebody asks for it."""
        if self._traced is None:
            what = self._fn if self._text is None else self._text
            assert what is not None
            self._traced = tensor_mask.tensor_mask_of(what)
            self._text = self._traced.text
        return self._traced

    @property
    def tensor_mask(self) -> TensorMask:
        """The whole mask, over the user's own tensors."""
        # no lists that a user could have written to, so no versions to compare
        if self._user_lists is None and "lists" not in self._results:
            return self._mod
        results = self._now()
        if self._user_lists is None:  # lists that were written to have become the user's in `_now`
            return self._mod
        if "tensor_mask" not in results:
            results["tensor_mask"] = self._mod.within(self._kinds(), self._batch, self._block)
        return results["tensor_mask"]  # type: ignore[no-any-return]

    @property
    @outside
    def mask(self) -> Mask:
        """The mask as a `frisket.Mask`, with copies of its tensors as they are now."""
        results = self._now()
        if "mask" not in results:
            results["mask"] = self.tensor_mask.mask()
        return results["mask"]  # type: ignore[no-any-return]

    @property
    @outside
    def formula(self) -> Mask:
        """The mask with its tensors left open: nothing is copied. Their values are `tensors`, by the same names."""
        return self.tensor_mask.formula

    @property
    @outside
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the mask reads: the user's own."""
        return self.tensor_mask.tensors

    @property
    @outside
    def layout(self) -> Layout:
        """The mask's tiles, counted, drawn and explained: `frisket.Layout`. `IndexError` where the mask shows a
        position at which it reads outside a table."""
        results = self._now()
        if "layout" not in results:
            self.check_lookups()
            results["layout"] = self.mask.layout(*self._lengths, *self._heads, block=self._block)
        return results["layout"]  # type: ignore[no-any-return]

    @outside
    def check_lookups(self) -> None:
        """Raise `GatherError` where the mask shows a position at which it reads outside a table."""
        results = self._now()
        # mostly decided by shapes, without a look at values
        if "checked" not in results and not self.tensor_mask.plainly_inside(self._sizes):
            lookups = score_lookups(self.mask, None, Problem.of(*self._lengths, *self._heads), 1 << 28)
            # `packed` says how to name a position inside a sequence
            check_lookups(lookups, words=cached_on(self.tensor_mask, "words", lambda: None))
        results["checked"] = True

    def _now(self) -> dict[str, Any]:
        """Remembered results, cleared if a tensor has changed. Lists that the user wrote to are kept as given."""
        lists = self._results.get("lists")
        if lists is not None and (now := _versions(lists)) != self._results.setdefault("written", now):
            self._hold(lists)
        versions = (self._mod.versions, () if self._user_lists is None else _versions(self._user_lists))
        if self._versions != versions:
            if self._user_lists is not None:
                tensor_mask.check_lists(self._user_lists, self._lengths[1], self._block[1])
            if self._versions is not None:  # None at first: lists of `unflatten` and `to` are not stale
                self._results.clear()
            self._versions = versions
        return self._results

    @property  # written by __setattr__
    def mask_mod(self) -> Callable[..., Any]:  # type: ignore[override]
        """The user's function; of a mask that was written or changed, one made from it, in torch (its text is
        `mask_mod.source`). Assigning another keeps the lists, as torch does."""
        if self._fn is not None:
            return self._fn
        if torch.compiler.is_dynamo_compiling():
            if self._traced is None:
                return derived.function_of(self._text)  # type: ignore[arg-type]
            self._prepared()
            return self._results["mask_mod"]  # type: ignore[no-any-return]  # for `cast` Dynamo forgets where it is from
        results = self._now()
        if "mask_mod" not in results:
            reach = dict(zip("bhqk", self._sizes, strict=True))
            if self._user_lists is None:  # of a mask for every batch entry, or head
                reach = {n: m for n, m in reach.items() if n in "qk" or m > 1}
            title = show(self._mod.expr, self._mod.values)
            results["mask_mod"] = self._mod.callable(reach, self._sizes, title, self.device)
        return results["mask_mod"]  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        # torch 2.11 ignores the setters of properties in a graph, and calls __setattr__
        if name == "mask_mod":
            # of the mask_mod before it changes: torch, too, leaves the lists as they are
            lists, (mod, fn, text) = self._tensors(), forms_of(value)
            self._hold(lists)
            self._traced, self._fn, self._text = mod, fn, text if mod is None else mod.text
        elif name == "seq_lengths":
            self._put_seq_lengths(value)
        elif name in TENSORS:
            self._hold({**self._tensors(), name: value})
        else:
            object.__setattr__(self, name, value)

    # -- the lists --------------------------------------------------------------------------------

    def lay_out(self) -> BlockMask:
        """Make the lists and `mask_mod` before a graph of torch reads them, and return the mask. Needed only where
        torch's compiled functions get new masks at every step, which would be traced while a graph is made."""
        if torch.compiler.is_dynamo_compiling():
            self._tensors()
        else:
            self._prepared()
        return self

    def _prepared(self) -> None:
        if self._fn is None:
            _ = self.mask_mod
        self._tensors()

    _prepared._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while a graph is made, not in it

    def _tensors(self) -> Lists:
        if self._user_lists is not None:
            return self._user_lists
        if torch.compiler.is_dynamo_compiling():
            if self._traced is not None:
                self._prepared()
            elif "lists" not in self._results:
                self._results["lists"] = derived.laid_out(self)
            return self._results["lists"]  # type: ignore[no-any-return]
        results = self._now()
        if self._user_lists is not None:
            return self._user_lists
        if "lists" not in results and 0 in self._lengths:
            results["lists"] = derived.lists_of(self._kinds(), self._separate_full, self._columns)
        if "lists" not in results:
            sides = exact_lists(self.layout, self.device, separate=self._separate_full)
            pairs = [x for one in sides for x in (one.count, one.index)]
            names = LISTS if self._separate_full else [n for n in LISTS if "full" not in n]
            # B and H of the mask, also where all entries or heads are alike
            wide = {n: x.expand(*self._batch, *x.shape[2:]).contiguous() for n, x in zip(names, pairs, strict=True)}
            lists: Lists = {**dict.fromkeys(TENSORS), **wide}
            if not self._columns:
                lists |= dict.fromkeys(LISTS[4:])
            results["lists"] = tensor_mask.with_orders(lists, self.dq_kv_order_spt) if self._orders else lists
        results.setdefault("written", _versions(results["lists"]))
        return cast(Lists, results["lists"])

    def _hold(self, lists: Lists) -> None:
        """Take these lists as the mask's tiles, whatever the mask says outside of them."""
        self._user_lists, self._results, self._versions = lists, {}, None

    @property  # written by __setattr__
    def seq_lengths(self) -> tuple[int, int]:  # type: ignore[override]
        """(queries, keys), in tokens."""
        return self._lengths

    def _put_seq_lengths(self, value: tuple[int, int]) -> None:
        lengths = pair(value, "seq_lengths", 0)
        self._check_cover(lengths)
        if torch.compiler.is_dynamo_compiling() and self._user_lists is None:  # what is prepared has other lengths
            self._traced, self._fn, self._text = None, self.mask_mod, None
        self._lengths, self._results, self._versions = lengths, {}, None

    def _check_cover(self, lengths: tuple[int, int]) -> None:
        if self._user_lists is None:
            return
        index, columns = self._user_lists["kv_indices"], self._user_lists["q_indices"]
        assert index is not None
        # without lists of columns any number of keys is covered
        listed = (index.shape[-2], 1 << 62 if columns is None else columns.shape[-2])
        for name, n, tiles, size in zip(("queries", "keys"), lengths, listed, self._block, strict=True):
            if n > tiles * size:
                text = f"seq_lengths has {n} {name}, the lists have {tiles} tiles of {size}\n"
                text += f"  there is nothing to say of what is beyond {tiles * size}: lay out the mask_mod itself, "
                raise ListError(f"{text}with create_block_mask")

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:  # type: ignore[override]  # noqa: N802 (torch's name)
        """(queries, keys) of a tile, in tokens."""
        return self._block

    @property
    def device(self) -> torch.device:
        """The device of the lists."""
        index = (self._user_lists or self._results.get("lists") or {}).get("kv_indices")
        return self._device if index is None else index.device

    @property
    def _heads(self) -> tuple[int, int]:
        batch, heads = (1, 1, *self._batch)[-2:]
        return batch, heads

    @property
    def _sizes(self) -> Sizes:
        return (*self._heads, *self._lengths)

    # -- what it says -----------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, Q_LEN, KV_LEN)."""
        return (*self._batch, *self._lengths)

    @outside
    def sparsity(self) -> float:
        """The percentage of tiles that are not computed, 0 to 100.

        torch 2.14 counts tiles too. Up to 2.13 it counts positions, and those beyond the end of the last tile too. For
        100 queries and keys in tiles of 128 it then reports -63.84 percent.
        """
        if self._user_lists is None:
            return 100 * (1 - self.layout.density)
        kinds = self._kinds()
        return 100 * (1 - int((kinds > 0).sum()) / kinds.numel())

    def _kinds(self) -> Tensor:
        """uint8 [B, H, rows, columns] of tiles: 0 empty, 1 partial, 2 full."""
        if self._user_lists is not None or torch.compiler.is_dynamo_compiling():
            lists = self._tensors()
            return tensor_mask.kinds_of(lists, tensor_mask.columns_of(lists, self._lengths[1], self._block[1]))
        kinds = torch.from_numpy(self.layout.kinds())
        # a full tile is a partial one where there are no lists of full ones
        return (kinds if self._separate_full else kinds.clamp(max=PARTIAL)).to(self.device)

    def to_dense(self) -> Tensor:
        """int32 [B, H, rows, columns] of tiles: 1 where a tile is read."""
        return (self._kinds() > 0).to(torch.int32)

    @outside
    def to_string(self, grid_size: int | tuple[int, int] | None = (20, 20), limit: int = 4) -> str:
        """A picture of the tiles for each batch entry and head, at most `limit` of them, of at most `grid_size`
        (rows, columns) cells; None or -1 draws every tile. A cell is `██` where every tile in it is full, `▒▒` where
        every one is read and some are partial, `░░` where some are read, blank where none is. (torch draws full and
        partial tiles alike.)"""
        return tensor_mask.tile_string(self._kinds(), grid_size, limit)

    @outside
    def __str__(self) -> str:
        head = f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,"
        return f"{head}\n{self.to_string().rstrip()}\n{tensor_mask.LEGEND}\n)"

    @outside
    def __repr__(self) -> str:
        text = show(self._mod.expr, self._mod.values)
        lists = "" if self._user_lists is None else ", in the tiles listed"
        message = f"BlockMask(shape={self.shape}, BLOCK_SIZE={self._block}, sparsity={self.sparsity():.2f}%, "
        return f"{message}mask={text if len(text) <= 60 else text[:57] + '...'!r}{lists})"

    # -- others from it ---------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> BlockMask:
        """The mask of some batch entries, heads and rows of tiles: `block_mask[b, h, rows]`, each an int (the axis
        stays, of length 1), a slice, or a tensor of ints or bools.

        The mask is kept: positions count from the first query of what was picked, and `seq_lengths` says how many
        there are. Rows may be picked in any order; queries that would lie beyond the end are hidden.
        Raises `PickError`, an IndexError.
        """
        return derived.part(self, index)

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The mask of the first queries and keys, or of longer lengths if it has no lists of the user's."""
        return derived.crop(self, pair((new_q_len, new_kv_len), "lengths", 0))

    def to(self, device: Any) -> BlockMask:
        """A copy on another device, with captured tensors."""
        return derived.on_device(self, torch.device(device))

    def __and__(self, other: Any) -> BlockMask:
        return derived.joined("and", self, other)

    def __or__(self, other: Any) -> BlockMask:
        return derived.joined("or", self, other)

    def __invert__(self) -> BlockMask:
        if torch.compiler.is_dynamo_compiling():
            return derived.inverted(self)
        mask = self.tensor_mask
        turned = replace(mask, expr=ir.build("not", mask.expr))
        return self.of(turned, self._lengths, self._block, self._batch, self.device, self)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self.mask, self.shape, self._block, self._separate_full, self._user_lists is None

    @outside
    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, BlockMask) else NotImplemented

    @outside
    def __hash__(self) -> int:
        return hash(self._identity)

    @outside
    def __reduce__(self) -> tuple[Any, ...]:
        self._now()  # lists that were written to become the user's, and so part of the pickle
        # detached: deepcopy refuses tensors that a graph computed
        values = {n: x.detach() if isinstance(x, Tensor) else x for n, x in self._mod.values.items()}
        # a lambda has no name that pickle finds, and results are made again
        bare = {n: x for n, x in self.__dict__.items() if n not in ("_traced", "_fn", "_results", "_versions")}
        return derived.restored, (type(self), Mask(self._mod.expr), values, bare)


def forms_of(mask_mod: Any) -> tuple[TensorMask | None, Callable[..., Any] | None, str | None]:
    """A mask_mod as an expression, a function and a text, as far as there is one. In a graph nothing is traced."""
    if torch.compiler.is_dynamo_compiling():
        return None, *derived.function_or_text(mask_mod)
    mod = tensor_mask.tensor_mask_of(mask_mod)
    return mod, mask_mod if callable(mask_mod) else None, mod.text


def _versions(lists: Lists) -> list[Any]:
    """The lists by rows, which say what is visible, as they are now."""
    return [version_of(x) for n in LISTS[:4] if (x := lists[n]) is not None]


def _attribute(name: str) -> property:
    def get(self: BlockMask) -> Tensor | None:
        return self._tensors()[name]

    return property(get, doc=f"As torch's `BlockMask.{name}`.")


# properties that lay out at the first read: torch's class assigns tensors in `__init__`
for _name in TENSORS:
    setattr(BlockMask, _name, _attribute(_name))


# -- a pytree of torch ----------------------------------------------------------------------------------

OPTIONS = ("_lengths", "_block", "_batch", "_device", "_separate_full", "_columns", "_orders", "dq_kv_order_spt")


def flatten(mask: BlockMask) -> tuple[list[Any], tuple[Any, ...]]:
    keyed, context = flatten_with_keys(mask)
    return [x for _, x in keyed], context


def flatten_with_keys(mask: BlockMask) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    lists = {n: x for n, x in mask._tensors().items() if x is not None}
    tensors, numbers = mask._mod.tensors, mask._mod.numbers
    options = tuple(getattr(mask, n) for n in OPTIONS)
    kinds = tuple((n, type(x), x) for n, x in numbers.items())  # 1, 1.0 and True are equal, and not one program
    mod = mask._mod.expr, kinds, tuple(tensors), tuple(lists)
    context = (*mod, mask._user_lists is not None, mask._text, *options)
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


_SAVED: dict[str, Any] = {"serialized_type_name": "frisket.flex.BlockMask", "flatten_with_keys_fn": flatten_with_keys}
pytree.register_pytree_node(BlockMask, flatten, unflatten, **_SAVED)
