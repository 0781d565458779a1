"""Block-sparse attention whose blocks are chosen by scores, for torch and JAX.

>>> import frisket as fk, torch
>>> from frisket import select
>>> q, k, v = torch.randn(3, 1, 4, 512, 32)  # [batch, heads, length, head_dim]
>>> map = select.blocks(q, k, block=64, keep=3, always="sinks(1) | window(64)")
>>> map.shape, map.sum(-1)[0, 0].tolist()
(torch.Size([1, 4, 8, 8]), [1, 2, 3, 3, 3, 3, 3, 3])
>>> fk.attention(q, k, v, "causal & topk_tiles(map, 64)", map=map).shape
torch.Size([1, 4, 512, 32])

`pooled` makes one query or key of each block, `scores` compares them, `choose` takes blocks by any scores. `blocks`
does all three. `moba`, `nsa`, `quest`, `lightning`, `antidiagonal` and `vertical_slash` choose as their papers do.
Choices are Bool tables, which the mask of a call reads. They stay on their device: the choice reads none on the host.

Arrays are [batch, heads, length, head_dim] in torch and [batch, length, heads, head_dim] in JAX, unless `axes` is
"bhsd" or "bshd". Tables are [batch, heads, queries, keys] in both, in blocks or in tokens. Heads may be grouped (GQA).
No gradient passes through a choice; `scores` has gradients, for losses on scores and for gates in a score mod.
"""

from frisket.runtime.select.blocks import blocks, choose, pooled, scores
from frisket.runtime.select.papers import antidiagonal, lightning, moba, nsa, quest, vertical_slash

__all__ = [
    "antidiagonal",
    "blocks",
    "choose",
    "lightning",
    "moba",
    "nsa",
    "pooled",
    "quest",
    "scores",
    "vertical_slash",
]
