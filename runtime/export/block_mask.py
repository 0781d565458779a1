"""torch's `BlockMask`: lists bit for bit those of `create_block_mask`, and a `mask_mod` made from the mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.dsl.errors import ExportError
from frisket.dsl.ir import SIZES, Expr, free_names, lit, lookup, param, renamed, substitute, var
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, Type
from frisket.lowering.kernels.torch_mask_mod import mask_mod
from frisket.lowering.plan import Sizes, make_plan
from frisket.lowering.simplify import simplify
from frisket.runtime.layouts.tiling import Tiling
from frisket.runtime.machine.extras import extras
from frisket.runtime.machine.generated import load

from .tile_lists import Lists, both_ways

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def to_block_mask(layout: Tiling, device: Any = "cpu", separate_full_blocks: bool = True) -> BlockMask:
    """torch's `BlockMask`, as `create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, BLOCK_SIZE=block)` makes it.

    >>> import frisket as fk
    >>> block_mask = fk.mask("causal & window(256)").layout(1024, 1024).to_block_mask()
    >>> block_mask.kv_num_blocks
    tensor([[[1, 1, 2, 2, 2, 2, 2, 2]]], dtype=torch.int32)

    With `separate_full_blocks=False` full tiles are among the partial ones and there are no full lists, as there.
    Shapes are [B, H, rows] and [B, H, rows, columns] of tiles, int32 on `device`; B is 1 unless the mask tells
    batch entries apart, H unless heads (`create_block_mask` does so where it is given None). Positions of a crop
    count from its first; `mask_mod` adds the origin. Its source is `block_mask.mask_mod.source`.

    Raises `ExportError` for a layout that is not exact (its lists would differ) and for lists beyond 8 GiB.
    """
    with extras():
        from torch.nn.attention.flex_attention import BlockMask

    lists = exact_lists(layout, device, apart=separate_full_blocks)
    none = Lists(None, None)
    partial, full, partial_q, full_q = lists if separate_full_blocks else (lists[0], none, lists[1], none)
    return BlockMask(
        seq_lengths=(layout.q_len, layout.kv_len),
        kv_num_blocks=partial.count, kv_indices=partial.index,
        full_kv_num_blocks=full.count, full_kv_indices=full.index,
        q_num_blocks=partial_q.count, q_indices=partial_q.index,
        full_q_num_blocks=full_q.count, full_q_indices=full_q.index,
        BLOCK_SIZE=(int(layout.block[0]), int(layout.block[1])), mask_mod=mask_mod_of(layout, device),
    )  # fmt: skip


def exact_lists(layout: Tiling, device: Any, *, apart: bool) -> list[Lists]:
    """Lists of partial and of full tiles, by rows and then by columns; of all together unless `apart`."""
    if not layout.exact:
        raise ExportError(
            f"tiles were left undecided when the budget was spent (exact is False), so the lists would not be those of "
            f"create_block_mask: {layout.counts.partial:,} tiles are partial or not known\n"
            "  ask for layout(..., exact=True), a smaller crop or larger tiles; to_fa4() and to_bsr() take it as it is"
        )
    return both_ways(layout, device, "rest", "BlockMask", apart=apart)


def mask_mod_of(layout: Tiling, device: Any = "cpu") -> Callable[..., Any]:
    """`mask_mod(b, h, q_idx, kv_idx)` on torch tensors, in positions of the crop, its tables on `device`.

    The text is in its attribute `source` and where `inspect.getsource` looks.
    """
    e, tables = _local(layout)
    reach = dict(zip("bhqk", (layout.batch, layout.heads, layout.q_len, layout.kv_len), strict=True))
    return written(e, tables, reach, layout.sizes, show(layout.written), device)


def written(
    e: Expr, tables: Mapping[str, Any], reach: Mapping[str, int], sizes: Sizes, title: str, device: Any,
    own: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """The `mask_mod` of an Expr whose parameters and sizes are literals. `reach` are what its positions stay below,
    `sizes` the same of the whole problem; `own` are tensors to look into, where torch can, in place of copies."""
    import torch

    arrays = {n: np.asarray(t) for n, t in tables.items()}
    limits: dict[str, float] = dict(zip("bhqk", (max(s, 1) for s in sizes), strict=True))
    limits |= {n: max(abs(int(t.max())), abs(int(t.min()))) for n, t in arrays.items() if t.dtype.kind in "iu"}
    plan = make_plan(e, None, limits=limits)
    assert plan.mask is not None
    literal = {param(s.name, s.type): lit(s.value) for s in plan.slots if s.value is not None}
    wanted = {t.name: t.source + {"": "", "segment": "_of", "segment below": "_below"}[t.derived] for t in plan.tables}
    as_they_are = {
        wanted[t.name]: x for t in plan.tables if not t.derived and (x := (own or {}).get(t.source)) is not None
    }
    mask = renamed(simplify(substitute(plan.mask, literal)), wanted)
    read = {wanted[n]: np.asarray(t) for n, t in plan.table_values(arrays).items()}
    kinds = free_names(mask)[1]
    read = {n: read[n] for n in kinds}  # the simplifier may have dropped some
    source = mask_mod(mask, {n: t.shape for n, t in read.items()}, reach=reach, int64=plan.int64, title=title)
    arguments = (_tensor(torch, t, kinds[n][1], device, as_they_are.get(n)) for n, t in read.items())
    made = load(source, importable=True, torch=torch, math=math)["make"](*arguments)
    made.source = source
    return made  # type: ignore[no-any-return]


def _local(layout: Tiling) -> tuple[Expr, dict[str, Any]]:
    """The mask in positions of the crop, with sizes and parameters written in."""
    tables: dict[str, Any] = {n: t.array for n, t in layout.tables.items()}
    values: dict[Expr, Expr] = {var(n): lit(int(s)) for n, s in zip(SIZES, layout.sizes, strict=True)}
    scalars, _ = free_names(layout.mask)
    values |= {param(n, t): lit(np.asarray(layout.params[n]).item()) for n, t in scalars.items()}
    for name, start in zip("bhqk", layout.origin, strict=True):
        if np.ndim(start):
            tables[f"{name}_start"] = np.asarray(start)
            values[var(name)] = var(name) + lookup(f"{name}_start", (var("b"),))
        elif start:
            values[var(name)] = var(name) + int(start)
    return simplify(substitute(layout.mask, values)), tables


def _tensor(torch: Any, table: Any, type: Type, device: Any, own: Any = None) -> Any:
    """A table as torch can index and compare it: bool, int32, int64 or float64."""
    small = table.dtype.itemsize < 4 or table.dtype == np.int32
    dtype = {BOOL: np.bool_, FLOAT: np.float64}.get(type, np.int32 if small else np.int64)
    if own is not None and str(own.dtype) == f"torch.{np.dtype(dtype).name}":
        return own.to(device)
    return torch.from_numpy(np.array(table, dtype)).to(device)
