"""Probes: a tiny call that needs one feature of `frisket.lowering.kernels.features`, on arrays of torch or JAX."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import frisket as fk
from frisket.dsl.errors import FrisketError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.backends.base import RECORDS

LENGTH, LONG = 24, 128  # tokens; of splash attention, which has whole tiles
DOC = np.arange(LONG) // 7
PAGE = 16
# what stands around a reason: who refuses, and what to write instead
AROUND = r"(?:backend '\S+' does not run this call: )?{}(?:\n  (?:take backend='triton'|leave out the backend))?"


@dataclass(frozen=True)
class Probe:
    """A call: its mask and score mod, options of fk.compile, keywords, and values of the mask's parameters."""

    mask: str | None = "causal"
    score: str | None = None
    options: dict = field(default_factory=dict)
    call: dict = field(default_factory=dict)
    values: dict = field(default_factory=dict)
    dtype: str = "float32"
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (16, 16)
    batch: int = 1
    stored: str = ""  # "int8", "pages", or "nan" in keys that no query sees
    gradients: bool = False  # `check` compares them; without `learned` those of q, k and v
    how: str = ""  # "jit", "vmap", "max", "traced table"
    frameworks: tuple[str, ...] = ("torch", "jax")
    needs: tuple[str, ...] = ()  # other features that the call needs too


def _learned(read: str, *shape: int) -> Probe:
    table = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    return Probe(score=f"score + t[{read}]", values={"t": table}, gradients=True, needs=("backward", "device tables"))


PROBES = {
    "lse": Probe(),
    "max": Probe(how="max"),
    "sinks": Probe(call={"sinks": np.array([0.5, -1.0], np.float32)}),
    "dropout": Probe(options={"dropout": 0.25}, call={"seed": 3}),
    "weights": Probe(options={"weight": "sigmoid(score)", "divide": "count"}),
    "equal bits in any batch": Probe(options={"invariant": True}),
    "score mods": Probe(score="softcap(3)"),
    "distance penalties": Probe(score="score - 0.25 * (q - k)"),
    "windows": Probe("causal & window(5)"),
    "documents": Probe("causal & same(doc)", values={"doc": DOC}),
    "other masks": Probe("causal & (q + k) % 3 > 0"),
    "empty rows": Probe("q >= k & k >= 4"),
    "64-bit integers": Probe("causal & (q * k * 1000000000) % 7 < 5", needs=("other masks",)),
    "pair lookups": Probe(
        "causal & sees[q % 3, k % 4]", values={"sees": np.arange(12).reshape(3, 4) % 5 > 0}, needs=("other masks",)
    ),
    **{dtype: Probe(dtype=dtype) for dtype in ("float16", "bfloat16", "float32", "float64")},
    "float8_e4m3fn": Probe(dtype="float8_e4m3fn", dims=(32, 32)),
    "grouped heads": Probe(heads=(4, 2)),
    "unequal head sizes": Probe(dims=(16, 8)),
    "head sizes not in eights": Probe(dims=(12, 12)),
    "head sizes over 256": Probe(dims=(272, 272)),
    "origins by batch entry": Probe(
        batch=2, call={"origin": (0, 0, np.array([3, 9]), np.array([0, 2])), "sizes": (2, 2, 140, 140)}
    ),
    "8-bit caches": Probe(stored="int8", call={"k_scale": 0.02}),
    "value scales": Probe(stored="int8", call={"k_scale": 0.02, "v_scale": 0.03}, needs=("8-bit caches",)),
    "paged caches": Probe(stored="pages"),
    "paged caches of float16": Probe(stored="pages", dtype="float16", needs=("paged caches",)),
    "other page sizes": Probe(stored="pages", options={"page": 144}, needs=("paged caches",)),
    "unwritten keys": Probe("k < 16", stored="nan"),
    "device tables": Probe("causal & same(doc)", values={"doc": DOC}, how="traced table", frameworks=("jax",)),
    "traced arrays": Probe(how="jit", frameworks=("jax",)),
    "vmap": Probe(how="vmap"),
    "orders": Probe("causal & k % 4 == 0", options={"reorder": True}, needs=("other masks", "max")),
    "backward": Probe(gradients=True),
    "lse cotangents": Probe(gradients=True, needs=("backward",)),
    "gradients by query": _learned("h", 2),
    "gradients by key": _learned("k", LONG),
    "gradients by distance": _learned("q - k", LONG),
    "gradients by pair": _learned("q % 5, k % 7", 5, 7),
}


class Call:
    """A probe on arrays of a framework."""

    def __init__(self, probe: Probe, framework: str, length: int = LENGTH) -> None:
        self.probe, self.framework, self.draw = probe, framework, np.random.default_rng(5)
        self.length = length
        batch, (heads, kv_heads), (dim, v_dim) = probe.batch, probe.heads, probe.dims
        page, self.more = probe.options.get("page", PAGE), dict(probe.call)
        q = self.array((batch, heads, length, dim))
        if probe.stored == "pages":
            pool = [self.array((5, kv_heads, page, d)) for d in (dim, v_dim)]
            self.qkv, self.more["pages"] = (q, *pool), self.plain(np.array([[3, 1]], np.int32))
        elif probe.stored == "int8":
            both = (batch, kv_heads, length)
            ints = [self.draw.integers(-100, 100, (*both, d)).astype(np.int8) for d in (dim, v_dim)]
            self.qkv = q, *(self.turned(x) for x in ints)
            for name in ("k_scale", "v_scale"):
                if name in self.more:
                    scale = self.more[name] * self.draw.uniform(0.5, 1.5, both)
                    self.more[name] = self.turned(scale.astype(np.float32))
        else:
            k, v = (self.draw.standard_normal((batch, kv_heads, length, d)) for d in (dim, v_dim))
            if probe.stored == "nan":
                k[:, :, 16:], v[:, :, 16:] = np.nan, np.nan
            self.qkv = q, self.cast(self.turned(k)), self.cast(self.turned(v))
        self.values = {n: self.plain(x) if probe.gradients else x for n, x in probe.values.items()}

    def turned(self, x: np.ndarray) -> Any:
        """An array [batch, heads, length, ...] with the axes that the framework has."""
        return self.plain(x if self.framework == "torch" else np.ascontiguousarray(x.swapaxes(1, 2)))

    def plain(self, x: np.ndarray) -> Any:
        if self.framework == "torch":
            import torch

            return torch.from_numpy(np.ascontiguousarray(x))
        import jax

        return jax.numpy.asarray(x)

    def cast(self, x: Any) -> Any:
        if self.framework == "torch":
            import torch

            return x.to(getattr(torch, self.probe.dtype))
        return x.astype(self.probe.dtype)

    def array(self, shape: tuple[int, ...]) -> Any:
        return self.cast(self.turned(self.draw.standard_normal(shape)))

    def attention(self, backend: str, **more: Any) -> Attention:
        options = {n: x for n, x in self.probe.options.items() if n != "page"} | more
        if options.get("reorder"):
            options["reorder"] = fk.reorder(self.probe.mask, self.length, block=(8, 8), moving=0)
        att = fk.compile(self.probe.mask, self.probe.score, backend=backend, **options)
        if self.probe.stored == "nan":
            att = Attention(replace(att.program, unwritten=True), att.options)
        return att

    def run(self, backend: str, **more: Any) -> None:
        """Run it on a backend; raises where the backend refuses it or is wrong."""
        att, how = self.attention(backend, **more), self.probe.how
        if how in ("jit", "traced table", "vmap", "max"):
            found, want = (getattr(self, how.replace(" ", "_"))(a) for a in (att, self.attention("library")))
            for x, y in zip(found, want, strict=True):
                np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-5, rtol=2e-5)
        elif self.probe.gradients and "backward" in RECORDS[backend].features:  # `check` would leave them out
            self.differentiate(att)
        else:
            att.check(*self.qkv, gradients=self.probe.gradients, **self.more, **self.values)

    def differentiate(self, att: Attention) -> None:
        if self.framework == "torch":
            att(*(x.requires_grad_() for x in self.qkv), **self.more, **self.values)
            return
        import jax

        jax.grad(lambda q: att(q, *self.qkv[1:], **self.more, **self.values).sum())(self.qkv[0])

    def max(self, att: Attention) -> tuple[Any, ...]:
        return att(*self.qkv, return_max=True)

    def jit(self, att: Attention) -> tuple[Any, ...]:
        import jax

        return jax.jit(lambda *x: att(*x, return_lse=True))(*self.qkv)

    def traced_table(self, att: Attention) -> tuple[Any, ...]:
        import jax

        doc = self.plain(DOC)
        return (jax.jit(lambda doc: att(*self.qkv, doc=doc))(doc),)

    def vmap(self, att: Attention) -> tuple[Any, ...]:
        stacked = [x[None] for x in self.qkv]
        if self.framework == "torch":
            import torch

            return (torch.func.vmap(lambda *x: att(*x))(*stacked),)
        import jax

        return (jax.vmap(lambda *x: att(*x))(*stacked),)


def refusal(reason: str) -> str:
    """The pattern of the whole text of an error with a reason."""
    parts = re.split(r"\{.*?\}", reason)
    return AROUND.format(".*".join(map(re.escape, parts)))


def lacked(backend: str, feature: str) -> str:
    """The reason why a backend lacks a feature, or its interpreter here does."""
    record = RECORDS[backend]
    interpreter = record.interpreter.features if record.interpreter is not None and record.interpreted else {}
    return record.features.get(feature) or interpreter.get(feature, "")


def compare(backend: str, framework: str, feature: str, dtype: str = "float32", **options: Any) -> str:
    """What is wrong about the claim of a backend; "" where its call does what the record says."""
    probe, length = PROBES[feature], LONG if backend == "splash" else LENGTH
    if probe.dtype == "float32" and feature != "float32":
        probe = replace(probe, dtype=dtype)  # which the backend takes
    needed = [feature, *probe.needs]
    if framework == "jax" and (probe.gradients or probe.how == "vmap"):
        needed.append("traced arrays")
    reasons = [reason for name in needed if (reason := lacked(backend, name))]
    try:
        with x64(framework == "jax" and probe.dtype == "float64"):
            Call(probe, framework, length).run(backend, **options)
    except FrisketError as error:
        said = str(error)
        right = any(re.fullmatch(refusal(reason), said, re.S) for reason in reasons)
        return "" if right else f"claimed {reasons}, and it is refused: {said}"
    return f"claimed {reasons}, and it works" if reasons else ""


def x64(on: bool) -> AbstractContextManager[Any]:
    """64 bits of JAX, where they are needed."""
    if not on:
        return nullcontext()
    import jax

    return jax.enable_x64(True)
