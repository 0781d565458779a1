"""causal
softcap(50)"""

import cutlass.cute as cute


def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=()):
    return q_idx >= kv_idx


def score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=()):
    return cute.math.tanh(score * 0.02, fastmath=True) * 50.0


def score_mod_bwd(grad, score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=()):
    x0 = cute.math.tanh(score * 0.02, fastmath=True)
    return grad * (1.0 - x0 * x0)
