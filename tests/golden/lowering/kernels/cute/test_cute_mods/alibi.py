"""causal
alibi(slope)
t0 = slope"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def entry(table, *index):
    """What a table holds at an index; past its ends, what it holds there."""
    at = tuple(cutlass.max(cutlass.min(i[0], n - 1), 0) for i, n in zip(index, table.shape))
    found = cute.make_rmem_tensor(1, table.element_type)
    found[0] = table[at]
    return found.load()


def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=()):
    return q_idx >= kv_idx


def score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=()):
    t0 = aux_tensors[0]
    return score + entry(t0, h) * (kv_idx - q_idx).to(Float32)


def score_mod_bwd(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=()):
    return grad
