"""Features: the list of what a call may need of a kernel, and for each kind of kernel the reasons why it lacks some.

`FEATURES` names and describes them. A table such as `GLUON` has the reason for each that kernels lack; a feature
without a reason works. The record of a backend has the table as `features`. The choice of a backend, errors, `frisket
doctor` and docs/backends.md are derived from it. A test holds every claim to what the backend does. Limits that depend
on lengths and contents of tables are no features: the code of a backend has them.

>>> missing(TRITON, dtype="float64")
'the Triton kernel takes float32, float16 or bfloat16, not float64; float64 runs on the CPU backends (aten, xla)'
>>> missing(TRITON, dtype="float16")
''
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from frisket.lowering.dtypes import FP8

if TYPE_CHECKING:
    from frisket.lowering.plan import LoopPlan

Features = Mapping[str, str]  # feature -> why it is missing; a reason may name `dtype` and attributes of `arrays`
FEATURES = {
    "lse": "the log of each row's sum of weights, as a result",
    "max": "the largest score of each row, as a result",
    "sinks": "a logit for each head that has no value",
    "dropout": "weights dropped by seed and position",
    "weights": "weights of pairs that are no softmax",
    "score mods": "scores changed by a formula of score and positions",
    "distance penalties": "scores less a slope times the distance, ALiBi",
    "windows": "masks that hide keys far to the left",
    "documents": "masks of documents packed into one sequence",
    "other masks": "masks that are no window, documents or prefix of keys",
    "empty rows": "queries that see no key",
    "equal bits in any batch": "rows whose bits no batch, chunk, padding or kind of cache changes, `invariant=True`",
    "64-bit integers": "masks and score mods whose integers leave 32 bits",
    "pair lookups": "tables read by query and key together, other than by their distance or as a plane",
    "float16": "arrays of float16",
    "bfloat16": "arrays of bfloat16",
    "float32": "arrays of float32",
    "float64": "arrays of float64",
    FP8: "q, k and v of float8_e4m3fn, with a scale for each head or block of tokens (experimental)",
    "grouped heads": "query heads that share a key head",
    "unequal head sizes": "values whose head size differs from that of keys",
    "head sizes not in eights": "head sizes that are no multiple of 8",
    "head sizes over 256": "head sizes over 256",
    "origins by batch entry": "a place in the whole problem for each batch entry",
    "8-bit caches": "keys and values of int8 or float8, with scales of keys",
    "value scales": "a scale for each stored value",
    "paged caches": "keys and values in pages of a pool",
    "paged caches of float16": "pages of float16",
    "other page sizes": "pages that are no 16, 32, 64 or multiple of 128 tokens",
    "unwritten keys": "hidden keys of a cache that may hold NaN",
    "device tables": "tables of the mask that are on a GPU or traced",
    "traced arrays": "q, k and v traced by jax.jit",
    "vmap": "calls under torch.func.vmap or jax.vmap",
    "orders": "tokens in another order than that of the mask",
    "backward": "gradients of q, k and v",
    "lse cotangents": "gradients that flow in through lse",
    "gradients by query": "gradients of values that the score mod reads by head or query",
    "gradients by key": "gradients of values that the score mod reads by key",
    "gradients by distance": "gradients of values that the score mod reads by q - k",
    "gradients by pair": "gradients of values that the score mod reads by query and key",
}
# of `Gradient.over`
OVER = {"head": "query", "row": "query", "column": "key", "diagonal": "distance", "scatter": "pair"}
GRADIENTS = ("backward", "lse cotangents", *dict.fromkeys(f"gradients by {over}" for over in OVER.values()))
STORED = ("8-bit caches", "value scales", "paged caches", "unwritten keys")


def missing(
    features: Features,
    plan: LoopPlan | None = None,
    arrays: Any = None,
    dtype: str = "",
    needed: Collection[str] = (),
    **words: Any,
) -> str:
    """The first reason of a table that concerns a call of this plan on arrays (a Geometry, or Dims of kernels), or "".
    `needed` names more features of the call, and `words` are for the text."""
    wide = 0 if arrays is None else next((n for n in (arrays.head_dim, arrays.v_dim) if n > 256), 0)
    there = {dtype: True} | dict.fromkeys(needed, True)
    if plan is not None:
        there |= {"dropout": plan.keep_mask is not None, "64-bit integers": plan.int64, "weights": plan.weighted}
        there |= {"value scales": plan.value_scale is not None and dtype != FP8, "paged caches": plan.pages is not None}
        there |= {"unwritten keys": plan.unwritten, "paged caches of float16": bool(plan.pages) and dtype == "float16"}
    if arrays is not None:
        there |= {"8-bit caches": bool(arrays.kv_dtype), "head sizes over 256": wide > 0}
        there |= {"head sizes not in eights": bool(arrays.head_dim % 8 or arrays.v_dim % 8)}
        words |= {"wide": wide, "side": "head" if wide == arrays.head_dim else "value"}
    why = next((why for name, why in features.items() if why and there.get(name)), "")
    return why.format(dtype=dtype, arrays=arrays, plan=plan, **words)


# -- kinds of kernels, the reasons in the order in which they are looked for --------------------------

ONLY_HOPPER: Features = {
    FP8: (
        "q of {dtype} is for Hopper alone, backend='gluon'; cast q to bfloat16: k and v may stay {dtype}, with a "
        "scale for each token and head"
    )
}
NO_ORDER: Features = {
    "equal bits in any batch": (
        "invariant=True takes kernels with one order of sums for each row, which are those of 'cpp' and 'triton'; "
        "leave out the backend, or invariant"
    ),
}
DENSE: Features = {
    **NO_ORDER,
    "traced arrays": "backend 'dense' reads the values of q, k and v, which JAX traces here: call it outside of jit",
    "device tables": (
        "the dense reference needs values and this plan's tables are traced; take a backend that runs "
        "under jax.jit, such as 'xla'"
    ),
}
XLA: Features = {
    **ONLY_HOPPER,
    **NO_ORDER,
    "64-bit integers": (  # unless `jax_enable_x64` is set
        "an index of this mask may leave 32 bits and JAX has 64-bit integers switched off; "
        'set jax.config.update("jax_enable_x64", True) or shrink the numbers in the mask'
    ),
}
ATEN: Features = {**ONLY_HOPPER, **NO_ORDER}
TRITON: Features = {
    "float64": (
        "the Triton kernel takes float32, float16 or bfloat16, not {dtype}; "
        "float64 runs on the CPU backends (aten, xla)"
    ),
    **ONLY_HOPPER,
}
_SOFTMAX = "kernels for Hopper and Blackwell weigh pairs by the softmax alone"
_EQUAL = "the Gluon kernel takes keys and values in the dtype of the queries"
GLUON: Features = {
    **NO_ORDER,
    "weights": _SOFTMAX,
    "float32": "the Gluon kernel takes float16 and bfloat16: warp groups have no exact products of float32",
    "8-bit caches": _EQUAL,
    "value scales": _EQUAL,
    "head sizes over 256": (
        "the Gluon kernel takes head dims up to 256, whose sums fit into registers or tensor memory"
    ),
    "head sizes not in eights": (
        "the Gluon kernel takes head dims that are multiples of 8: TMA loads rows that begin at multiples of 16 bytes"
    ),
}
GLUON_BACKWARD: Features = {  # of the fused backward; gradients that it lacks are Triton's
    **GLUON,
    "dropout": "the fused Gluon backward drops no weights",
    "unequal head sizes": "the fused Gluon backward takes keys and values of one head size",
    "64-bit integers": "the fused Gluon backward computes in integers of 32 bits: registers hold no others",
}
CUTE: Features = {
    name: f"FlashAttention's mask and score mods {why}"
    for name, why in {
        "dropout": "drop no weights: FlashAttention 4 has no dropout",
        "weights": "are those of a softmax",
        "value scales": "scale no stored keys and values",
        "paged caches": "read no pages: an entry of a recycled page may be NaN, and FlashAttention 4 adds 0 times that",
        "unwritten keys": (
            "take no keys that may hold anything: FlashAttention 4 adds 0 times a hidden value, which may be NaN"
        ),
        "64-bit integers": "compute in integers of 32 bits, and these may be larger",
    }.items()
}
FLASH: Features = {
    **ONLY_HOPPER,
    **NO_ORDER,
    **{
        dtype: f"FlashAttention 4 takes float16 and bfloat16; cast q, k and v, or {instead}"
        for dtype, instead in {"float32": "take backend='triton'", "float64": "move them to the CPU"}.items()
    },
    "head sizes not in eights": (
        "FlashAttention 4 takes head sizes that are multiples of 8, not {arrays.head_dim} and {arrays.v_dim}"
    ),
    "head sizes over 256": (
        "FlashAttention 4 takes head sizes from 8 to 256 on Hopper, not {arrays.head_dim} and {arrays.v_dim}"
    ),
    "origins by batch entry": "FlashAttention 4 takes one origin for all batch entries, not one for each",
    "8-bit caches": "FlashAttention 4 takes keys and values in the dtype of the queries",
    "max": "FlashAttention 4 does not tell the largest score of a row",
    **{f"gradients by {over}": "FlashAttention 4 has no gradient of {names}" for over in OVER.values()},
    # pages are read where flags are the whole mask: `unpaged` of backends/flash/call.py
    **{name: why for name, why in CUTE.items() if name != "paged caches"},
}
PALLAS_TPU: Features = {
    **ONLY_HOPPER,
    **NO_ORDER,
    "float64": 'TPUs have no {dtype}; use float32 or bfloat16, or backend="xla" on CPU',
    "64-bit integers": (
        "an index of this mask may leave 32 bits and TPU kernels have no 64-bit integers; "
        'shrink the numbers in the mask, or use backend="xla"'
    ),
    "paged caches of float16": (
        "TPUs have no float16, and a pool of pages would be converted whole at every call; "
        'use bfloat16 or float32, or backend="xla"'
    ),
    "other page sizes": (
        "a TPU kernel takes 128 keys or a multiple at a time, in at most 8 pages, and none of them is whole pages of "
        '{plan.page} tokens. Use a page of 16, 32, 64, or a multiple of 128, or backend="xla"'
    ),
}
_SIXTEEN = 'kernels for Hopper multiply bfloat16 and float16, not {dtype}; cast q, k and v, or use backend="triton"'
PALLAS_GPU: Features = {
    **ONLY_HOPPER,
    **NO_ORDER,
    "weights": f'{_SOFTMAX}; use backend="triton"',
    "float32": _SIXTEEN,
    "float64": _SIXTEEN,
    "head sizes over 256": '{side} dims of kernels for Hopper are at most 256, not {wide}; use backend="triton"',
    "64-bit integers": (
        "an index of this mask may leave 32 bits, which kernels for Hopper count in; shrink the numbers in the "
        'mask, or use backend="triton"'
    ),
    **{
        name: f'kernels for Hopper read keys and values as they are, and this call has {what}; use backend="triton"'
        for name, what in {
            "8-bit caches": "those of {arrays.kv_dtype}",
            "paged caches": "pages of them",
            "value scales": "scales of values",
            "unwritten keys": "some that may never have been written",
        }.items()
    },
    "pair lookups": (
        "`{source}` is indexed by q and k together, and kernels for Hopper have no gather; index it by q, by k "
        'or by q - k alone, or use backend="triton"'
    ),
    **{
        name: (
            "kernels for Hopper sum captured gradients per head and per query; that of `{source}` is one per "
            f'{what}; use backend="triton"'
        )
        for name, what in {
            "gradients by key": "key",
            "gradients by distance": "distance of query and key",
            "gradients by pair": "place that query and key choose together",
        }.items()
    },
}
