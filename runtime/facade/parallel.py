"""Context parallel attention: a sequence over ranks, under any mask. `attend` calls the functions of torch or of JAX.

>>> import frisket as fk
>>> fk.parallel.deal("causal", 1024, ranks=4).imbalance
1.0
"""

from __future__ import annotations

from typing import Any

from frisket.dsl.errors import ParameterError
from frisket.runtime.attention.ordered import OrderedAttention
from frisket.runtime.calls.arrays import framework_of, like_jax
from frisket.runtime.parallel.deal import Deal, Step, Variant, deal, steps

__all__ = ["Deal", "Step", "attend", "deal", "steps"]


def attend(att: Any, q: Any, k: Any, v: Any, *, deal: Deal, variant: Variant = "ring", **more: Any) -> Any:
    """`fk.parallel.attend(att, q, k, v, deal=deal)`: `att` over a sequence whose tokens are split over ranks.

    >>> import jax, jax.numpy as jnp, frisket as fk
    >>> mesh = jax.make_mesh((1,), ("sp",))  # one device here; more split the tokens
    >>> d, q = fk.parallel.deal("causal", 256, ranks=1), jnp.ones((1, 256, 2, 16))
    >>> fk.parallel.attend(fk.compile("causal"), q, q, q, deal=d, mesh=mesh).shape
    (1, 256, 2, 16)

    q, k and v are this rank's shards, as `deal.permute` lays them out. They are torch [batch, heads, shard, dim] in the
    ranks of a process group, JAX [batch, shard, heads, dim] inside `jax.shard_map`. The result is this rank's shard of
    the attention. `torch_ring.attend` and `jax_ring.attend` say what else each takes.
    """
    if isinstance(att, OrderedAttention):
        text = "the attention has reorder=, and a rank holds a part of a sequence\n"
        text += "  put all tokens in order first: order.apply(x), a deal of order.moved, and "
        raise ParameterError(f"{text}frisket.compile(mask).at(**order.coordinates)")
    att, frameworks = att.now(more) if att.rereads else att, {*map(framework_of, (q, k, v))}
    if frameworks == {"jax", "numpy"}:
        q, k, v = (like_jax(x, q, k, v) for x in (q, k, v))
    framework = framework_of(q)
    if framework == "torch":
        from frisket.runtime.parallel import torch_ring  # a program may have one framework installed

        return torch_ring.attend(att, q, k, v, deal=deal, variant=variant, **more)
    if framework == "jax":
        from frisket.runtime.parallel import jax_ring

        return jax_ring.attend(att, q, k, v, deal=deal, variant=variant, **more)
    raise ParameterError(f"q is a {type(q).__name__}; context parallel takes arrays of torch or JAX")
