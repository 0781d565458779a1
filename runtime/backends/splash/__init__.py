"""JAX's splash attention on TPUs; elsewhere Pallas' interpreter runs it. Its gradients are generated kernels'.

`arguments` says what would be called, `forward` calls it.

A window is a `LocalMask` whose offset puts the last query at the last key; documents and valid keys are segment ids:
tokens of equal ids see each other. Scores are not scaled, so q is, before the call: in 16 bits that is exact for powers
of two alone. lse is the natural log. A query without keys has no result there, so it is refused. Source: the docstrings
of `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from frisket.lowering.engines.flags import Flags
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.base import Backend, Executors, Interpreter, absent
from frisket.runtime.backends.engines import LACKS, OTHER_MASKS
from frisket.runtime.backends.pallas_tpu import interpreted

if TYPE_CHECKING:
    from frisket.runtime.backends.engines.proof import EngineCall

Array = Any
LANES = 128
TILES = (512, 256, LANES)
ALIBI = "{flags}: splash attention has no ALiBi"
EMPTY_ROWS = "{flags}: some query sees no key, and splash attention has no result for it"


@dataclass(frozen=True, eq=False)
class SplashArguments:
    """The arguments of splash attention besides q, k and v. These are a window of the whole call, None where all is
    visible, and segment ids int32 [batch, length] of queries and keys, or None."""

    shape: tuple[int, int]
    window: tuple[int | None, int | None] | None
    offset: int
    segments: tuple[NDArray[np.int32], NDArray[np.int32]] | None
    softcap: float | None
    scale: float


def arguments(flags: Flags, call: EngineCall) -> SplashArguments | str:
    """The arguments of a call, or why splash attention does not compute it."""
    g = call.geometry
    scale = g.scale * flags.factor
    if flags.slopes is not None:
        return ALIBI.format(flags=flags)
    if flags.queries is not None or flags.empty_rows(g):
        return EMPTY_ROWS.format(flags=flags)
    if not all(isinstance(x, int | None) for x in (flags.left, flags.right)):
        return f"{flags}: splash attention has one window for all batch entries"
    if g.q_len % LANES or g.kv_len % LANES:
        return f"lengths are whole tiles of {LANES} there, not {g.q_len} and {g.kv_len}"
    if call.dtype.endswith("16") and math.frexp(scale)[0] != 0.5:  # frexp has 0.5 for powers of two alone
        return f"it scales q beforehand, which rounds {call.dtype} where the scale, {scale:g}, is no power of two"
    windowed = flags.left is not None or flags.right is not None
    window: Any = (flags.left, flags.right) if windowed else None
    if flags.documents is None:
        return SplashArguments((g.q_len, g.kv_len), window, g.kv_len - g.q_len, _valid(flags, g), flags.softcap, scale)
    if windowed and not (flags.documents[0] == flags.documents[1]).all():
        return f"{flags}: splash attention has one window for the call, and these documents need a window each"
    segments = _ids(flags.documents[0], g.batch, g.q_len), _ids(flags.documents[1], g.batch, g.kv_len)
    return SplashArguments((g.q_len, g.kv_len), window, 0, segments, flags.softcap, scale)


def _ids(corners: NDArray[np.int32], batch: int, length: int) -> NDArray[np.int32]:
    """The document of every token of the packed batch."""
    documents = np.searchsorted(corners, np.arange(batch * length), side="right") - 1
    return documents.astype(np.int32).reshape(batch, length)


def _valid(flags: Flags, g: Geometry) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """Segment ids that hide keys: 0 is seen by every query, 1 by none."""
    if flags.keys is None:
        return None
    start, stop = (np.reshape(x, (-1, 1)) for x in flags.keys)
    at = np.arange(g.kv_len)
    hidden = np.broadcast_to((at < start) | (at >= stop), (g.batch, g.kv_len))
    return np.zeros((g.batch, g.q_len), np.int32), hidden.astype(np.int32)


def forward(a: SplashArguments, q: Array, k: Array, v: Array, platform: str) -> tuple[Array, Array]:
    """(out [batch, q_len, heads, v_dim], lse [batch, heads, q_len])."""
    import jax
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    heads = q.shape[2]
    mask = splash.FullMask(a.shape) if a.window is None else splash.LocalMask(a.shape, a.window, a.offset)
    block_q, block_k = (next(t for t in TILES if n % t == 0) for n in a.shape)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads), head_shards=1, q_seq_shards=1, save_residuals=True,
        attn_logits_soft_cap=a.softcap, interpret=platform != "tpu",
        block_sizes=splash.BlockSizes(block_q=block_q, block_kv=block_k),
    )  # fmt: skip
    q = (q * a.scale).astype(q.dtype)
    arrays = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    if a.segments is None:
        out, (lse,) = jax.vmap(kernel)(*arrays)
    else:
        ids = splash.SegmentIds(*(jax.numpy.asarray(x) for x in a.segments))
        out, (lse,) = jax.vmap(kernel)(*arrays, ids)
    return out.transpose(0, 2, 1, 3).astype(v.dtype), lse


Backend(
    name="splash",
    kernels="JAX's splash attention for TPUs, of masks that it knows, by name alone",
    language="splash",
    reason=lambda framework: absent("jax", "jax"),
    missing=str,
    how=", in Pallas' interpreter where there is no TPU",
    engine=arguments,
    executors={"jax": Executors(__name__)},
    order=78,
    platforms=("tpu",),
    interpreter=Interpreter("Pallas'", 0.0005, interpreted),
    features={
        "float64": "splash attention takes float32 and halves; cast q, k and v, or take backend='xla'",
        **LACKS,
        "max": "backend {name!r} does not do the largest score of each row; leave out the backend",
        "distance penalties": ALIBI,
        "other masks": OTHER_MASKS,
        "origins by batch entry": LACKS["device tables"],
        "empty rows": EMPTY_ROWS,
    },
).register()
