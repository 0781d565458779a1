"""Formats of other systems, read back to dense masks as their documentation says, and nothing more."""

from __future__ import annotations

import numpy as np

from frisket.lowering.analysis.layout import AnalysedMask, bind
from frisket.lowering.analysis.table import Table
from frisket.lowering.simplify import ProgramExprs, prepare
from frisket.runtime.masks.layout import Layout
from support.lowering import brute


def laid_out(case) -> tuple[Layout, np.ndarray]:
    """The layout of a case, and the dense mask, bool [batch, heads, q_len, kv_len]."""
    mask = prepare(ProgramExprs(bind(case.mask, case.tables))).visible
    tables = {n: Table(t) for n, t in case.tables.items()}
    layout = Layout(AnalysedMask(mask, case.mask, case.params, tables), case.problem, case.block)
    return layout, brute.dense(case.mask, case.q_len, case.kv_len, **case.options)


def packed(dense: np.ndarray) -> np.ndarray:
    """Batch entries one after another on the diagonal, of the first head: [batch * q_len, batch * kv_len]."""
    batch, _, q_len, kv_len = dense.shape
    out = np.zeros((batch * q_len, batch * kv_len), bool)
    for b in range(batch):
        out[b * q_len : (b + 1) * q_len, b * kv_len : (b + 1) * kv_len] = dense[b, 0]
    return out


def flashmask(indices: np.ndarray, causal: bool, q_len: int) -> np.ndarray:
    """Paddle's startend_row_indices [batch, heads, kv_len, 1, 2 or 4]: rows of each key column that are masked."""
    batch, heads, kv_len, n = indices.shape
    seen = np.ones((batch, heads, q_len, kv_len), bool)
    for b, h, j in np.ndindex(batch, heads, kv_len):
        column, c = seen[b, h, :, j], indices[b, h, j]
        if causal:
            column[:j] = False
            column[c[0] : (c[1] if n == 2 else None)] = False
        elif n == 2:
            column[c[0] :] = False
            column[: c[1]] = False
        else:
            column[c[0] : c[1]] = False
            column[c[2] : c[3]] = False
    return seen


def varlen(found, total_q: int, total_k: int) -> np.ndarray:
    """FlashAttention's cu_seqlens, causal and window_size, aligned to the bottom right of each document."""
    seen = np.zeros((total_q, total_k), bool)
    left, right = found.window_size
    for i in range(len(found.cu_seqlens_q) - 1):
        (q0, q1), (k0, k1) = found.cu_seqlens_q[i : i + 2], found.cu_seqlens_k[i : i + 2]
        for q in range(q0, q1):
            for k in range(k0, k1):
                ahead = (k - k0) - (q - q0 + (k1 - k0) - (q1 - q0))
                far = (found.causal and ahead > 0) or (left >= 0 and -ahead > left) or (right >= 0 and ahead > right)
                seen[q, k] = not far
    return seen


def slices(found, total_q: int, total_k: int) -> np.ndarray:
    """MagiAttention's q_ranges, k_ranges, attn_type_map: how many slices show each position."""
    seen = np.zeros((total_q, total_k), int)
    for (q0, q1), (k0, k1), kind in zip(found.q_ranges, found.k_ranges, found.attn_type_map, strict=True):
        u, v = np.ogrid[: q1 - q0, : k1 - k0]
        bottom_right, top_left = v <= u + (k1 - k0) - (q1 - q0), v >= u
        seen[q0:q1, k0:k1] += {0: True, 1: bottom_right, 2: top_left, 3: bottom_right & top_left}[int(kind)]
    return seen


def bsr(rows, shape: tuple[int, int]) -> np.ndarray:
    """CSR of tiles with their data, as scipy.sparse.bsr_matrix has them."""
    out, (bq, bk), data = np.zeros(shape, bool), rows.block, rows.data()
    for i in range(len(rows.indptr) - 1):
        for at in range(rows.indptr[i], rows.indptr[i + 1]):
            j = rows.indices[at]
            out[i * bq : (i + 1) * bq, j * bk : (j + 1) * bk] = data[at]
    return out


def lists(count: np.ndarray, index: np.ndarray, columns: int) -> np.ndarray:
    """Ordered tile lists [..., rows], [..., rows, capacity] to a bool map [..., rows, columns]."""
    out = np.zeros((*count.shape, columns), bool)
    for at in np.ndindex(count.shape):
        out[at][index[at][: count[at]]] = True
    return out


def splash(info, block, heads: int, q_len: int, kv_len: int, dkv: bool = False) -> np.ndarray:
    """Walk MaskInfo as splash attention's kernel does: fetch `data_next`, mask by `partial_mask_blocks`."""
    kinds = info.block_mask
    masks, n, m = kinds.shape
    bq, bk = block
    seen = np.zeros((heads, q_len, kv_len), int)
    for h in range(heads):
        for i, j in np.ndindex(n, m):
            at = (h if masks > 1 else 0, i, j)
            if not kinds[at]:
                continue
            fetched = int(info.data_next[at])
            row, column = (fetched, j) if dkv else (i, fetched)
            elements = np.ones((bq, bk), bool)
            if kinds[at] == 1:
                elements = info.partial_mask_blocks[info.mask_next[at]]
                elements = elements.T if dkv else elements
            seen[h, row * bq : (row + 1) * bq, column * bk : (column + 1) * bk] += elements
    return seen


LISTS = [
    f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
]  # fmt: skip


def same_lists(ours, theirs, name=""):
    """Two BlockMasks of torch agree bit for bit."""
    for field in LISTS:
        a, b = getattr(ours, field), getattr(theirs, field)
        if a is None or b is None:
            assert a is b, (name, field)
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (name, field)
        assert a.equal(b), (name, field)
    assert (ours.seq_lengths, ours.BLOCK_SIZE, ours.shape) == (theirs.seq_lengths, theirs.BLOCK_SIZE, theirs.shape)
