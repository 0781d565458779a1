"""causal & window(w) & same(doc)
s0 = w
t0 = doc"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


def entry(table, *index):
    """What a table holds at an index; past its ends, what it holds there."""
    at = tuple(cutlass.max(cutlass.min(i[0], n - 1), 0) for i, n in zip(index, table.shape))
    found = cute.make_rmem_tensor(1, table.element_type)
    found[0] = table[at]
    return found.load()


def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=()):
    t0 = aux_tensors[0]
    s0 = cute.full(q_idx.shape, aux_scalars[0], Int32)
    return (q_idx >= kv_idx) & (q_idx - kv_idx < s0) & (entry(t0, q_idx) == entry(t0, kv_idx))
