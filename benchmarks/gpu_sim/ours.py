"""Our Triton kernels as the model takes them: a mask, a head size, a dtype, a tile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

import frisket as fk
from frisket.lowering.architectures import architecture_of
from frisket.lowering.dtypes import FP8
from frisket.lowering.kernels.triton import backward, forward
from frisket.lowering.kernels.triton.captured import emit_all
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget
from frisket.lowering.plan import K_SCALE, Q_SCALE, V_SCALE, Geometry, LoopPlan, Target
from frisket.runtime.attention.attention import Attention
from frisket.runtime.backends.gluon import torch as gluon_kernels
from frisket.runtime.backends.triton import kernels as triton_kernels
from frisket.runtime.backends.triton.tiles import TABLE, of_amd, of_kernel, ordered
from frisket.runtime.calls.arrays import Stored
from frisket.runtime.machine.modules import load_from_file

from .compiled import Compiled, kept
from .machine import GPUS

LENGTH, HEADS = 8192, 16
DRAWN = "12 documents"  # of benchmarks/gpu.py
KERNELS = ("forward", "dq", "dkv")
APART = ("dk", "dv")  # in the place of dkv, where calls have a kernel for each
# of the products that a kernel makes, by head size, for a pair
FLOPS = {"forward": 4, "dq": 6, "dkv": 8, "dk": 6, "dv": 4}


@dataclass(frozen=True, order=True)
class Tile:
    """A tile of queries and keys, with the warps and stages that walk it, and whether tensor descriptors read it. AMD's
    compiler takes `waves` and `mfma`, as a Target has them; 0: as frisket chooses."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    descriptors: int = 0
    waves: int = 0
    mfma: int = 0

    def __str__(self) -> str:
        amd = "".join(f" {n} {x}" for n, x in (("waves", self.waves), ("mfma", self.mfma)) if x)
        return f"{self.block_q} x {self.block_k} w{self.warps} s{self.stages}{' TMA' * self.descriptors}{amd}"

    @classmethod
    def read(cls, text: str) -> Tile:
        """A tile of `128,64,8,3`, or of `128,64,8,3,1` with tensor descriptors."""
        return cls(*map(int, text.split(",")))


@dataclass(frozen=True)
class Mask:
    """A mask and a score mod by their texts, with tables for a `length`, at which kernels are printed."""

    text: str | None
    score: str | None = None
    tables: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)
    length: int = LENGTH


def documents(length: int, mean: int = 512) -> dict[str, Any]:
    return {"doc": (np.arange(length) // mean).astype(np.int32)}


def drawn(length: int) -> dict[str, Any]:
    """The documents of benchmarks/gpu.py, whose lengths are drawn."""
    import torch
    from gpu_masks import contests

    doc = contests(length, 1, "cpu")[DRAWN].params["doc"]
    assert isinstance(doc, torch.Tensor)
    return {"doc": doc.numpy()}


def allowed(length: int) -> dict[str, Any]:
    """A table with full tiles nowhere."""
    at = np.arange(length, dtype=np.int32)
    return {"allowed": (3 * at[:, None] + at) % 7 > 2}


MASKS = {
    "causal": Mask("causal"),
    "full": Mask(None),
    "window 128": Mask("causal & window(128)"),
    "window 512": Mask("causal & window(512)"),
    "window 1024": Mask("causal & window(1024)"),
    "documents": Mask("causal & same(doc)", None, documents(LENGTH)),
    DRAWN: Mask("causal & same(doc)", None, documents(LENGTH)),
    "documents, any order": Mask("causal & same(doc)", None, {"doc": (np.arange(LENGTH) % 16).astype(np.int32)}),
    "documents, both sides": Mask("same(doc)", None, documents(LENGTH)),
    "prefix": Mask("causal | k < 1024"),
    "residue": Mask("causal & k % 4 == 1"),
    "dilation by 4": Mask("causal & (q - k) % 4 == 0"),
    "dilation by 5": Mask("causal & (q - k) % 5 == 0"),
    "product": Mask("causal & q * k % 7 < 3"),
    "softcap": Mask("causal", "softcap(50)"),
    "alibi": Mask("causal", "score + slope[h] * (k - q)", {"slope": np.linspace(0.1, 1, HEADS).astype(np.float32)}),
    "bias": Mask(
        "causal", "score + bias[h, clamp(q - k, -511, 511) + 511]", {"bias": np.zeros((HEADS, 1023), np.float32)}
    ),
    "bias of positions": Mask(
        "causal", "score + bias[h, q, k]", {"bias": np.zeros((HEADS, 512, 512), np.float32)}, length=512
    ),
    "mask of positions": Mask("causal & allowed[q, k]", None, allowed(512), length=512),
}


@dataclass(frozen=True)
class Ours:
    """One of our kernels without its tile: the mask's name in MASKS or its text, and the shapes; `listed` says that a
    table lists its programs, which divide long rows."""

    kernel: str
    mask: str = "causal"
    dim: int = 128
    dtype: str = "bfloat16"
    group: int = 1
    arch: str = "sm_90"
    listed: bool = False

    @property
    def part(self) -> str:
        """The field of a target that holds the tile: that of dkv holds dk's where values have a kernel of their own."""
        return "dkv" if self.kernel == "dk" else self.kernel

    @property
    def flops(self) -> int:
        """FLOP for a pair of query and key."""
        return FLOPS[self.kernel] * self.dim


@cache
def planned(ours: Ours) -> tuple[LoopPlan, Target]:
    """The plan of the kernel and the tiles that frisket chooses."""
    mask = MASKS.get(ours.mask) or Mask(ours.mask)
    att = fk.compile(mask.text, mask.score, backend="triton", **mask.tables)
    made = att.stages(
        backend="triton", arch=ours.arch, q_len=mask.length, kv_len=mask.length, heads=HEADS,
        kv_heads=HEADS // ours.group, head_dim=ours.dim, dtype=ours.dtype,
    )  # fmt: skip
    if (made.target.dv is not None) == (ours.kernel in APART):
        return made.plan, made.target
    if made.target.dv is None:
        raise ValueError(f"calls of head size {ours.dim} have one kernel of dk and dv on {ours.arch}: ask for dkv")
    block_q, block_k, warps, stages, described = TABLE[ours.arch]["dkv"]["long"][str(min(ours.dim, 256))]
    both = TritonTarget(
        "triton", block_q, block_k, warps, stages, descriptors=bool(described)
    )  # one kernel: what is searched
    return made.plan, replace(made.target, dkv=both, dv=None)


def chosen(ours: Ours) -> Tile:
    """The tile that frisket takes by itself."""
    target = of_kernel(f"attention_{ours.part}", planned(ours)[1])
    return Tile(target.block_q, target.block_k, target.num_warps, target.num_stages, int(target.descriptors))


def together(ours: Ours, length: int, places: int) -> int:
    """How many of so many heads start together, the longest rows of all first."""
    _, target = planned(ours)
    if target.order == "longest-first":
        return 1
    g = Geometry(1, places, min(places, 32), length, length, ours.dim, ours.dim, 1.0)
    count = GPUS[ours.arch].processors
    return places if ordered(target.everywhere(order="longest-first"), g, count).order != "longest-first" else 1


def compiled(ours: Ours, tile: Tile) -> Compiled:
    """The kernel with this tile, compiled by the Triton that is installed."""
    plan, target = planned(ours)
    own = of_kernel(f"attention_{ours.part}", target)
    mine = replace(
        own, block_q=tile.block_q, block_k=tile.block_k, num_warps=tile.warps, num_stages=tile.stages,
        descriptors=bool(tile.descriptors),
    )  # fmt: skip
    gpu = architecture_of(ours.arch)
    if gpu.vendor == "amd":
        chosen_by_rows = of_amd(ours.part, mine, gpu)
        mine = replace(chosen_by_rows, waves=tile.waves, mfma=tile.mfma or chosen_by_rows.mfma)
    whole = replace(target, **{ours.part: mine}) if ours.kernel != "forward" else replace(
        mine, dq=target.dq, dkv=target.dkv, decode=target.decode
    )  # fmt: skip
    dims = Dims(ours.dim, ours.dim, ours.dtype, ours.group)
    source, name = _emitted(ours.part if ours.listed else "", plan, whole, dims), f"attention_{ours.part}"
    kernel = vars(load_from_file(source))[name]
    key = (_one(source, name), triton_kernels.signature(kernel, plan, mine, dims), mine, dims)
    found = kept(
        name, ours.arch, tile.warps, key, lambda: triton_kernels.compiled_for(ours.arch, kernel, plan, mine, dims)
    )
    return replace(found, stages=tile.stages)


def compiled_gluon(
    mask: str, arch: str, dim: int, v_dim: int, dtype: str = "bfloat16", tokens: int = 128
) -> tuple[Compiled, TritonTarget]:
    """Gluon's forward under a mask of MASKS, compiled by the Triton that is installed, and its tile. 8-bit queries and
    keys have a scale for each block of `tokens`, or of a head where that is 0."""
    known, dims = MASKS[mask], Dims(dim, v_dim, dtype)
    att = fk.compile(known.text, known.score, backend="gluon", **known.tables)
    if dtype == FP8:
        of = ((Q_SCALE, tokens), (K_SCALE, tokens), (V_SCALE, 0))
        how = Stored(False, False, 0, "bhsd", 1, (0, 0, 0), of)
        att = Attention(att.program.stored_as(how), att.options)
    made = att.stages(
        backend="gluon", arch=arch, q_len=LENGTH, kv_len=LENGTH, heads=HEADS, kv_heads=HEADS, head_dim=dim,
        v_dim=v_dim, dtype=dims.dtype,
    )  # fmt: skip
    kernel, key = vars(load_from_file(made.source))["attention_forward"], (made.source, made.target, dims)
    found = kept(
        "attention_forward", arch, 4, key, lambda: gluon_kernels.compiled_for(kernel, made.plan, made.target, dims)
    )
    return found, made.target


@cache
def _emitted(listed: str, plan: LoopPlan, target: Target, dims: Dims) -> str:
    """The module; of the kernel that is `listed` alone, or of all kernels."""
    if not listed:
        return emit_all(plan, target, dims)
    if listed == "forward":
        return forward.emit(plan, target, dims, listed=True)
    return backward.emit(plan, target, dims, set("qkv"), dlse=False, listed={f"attention_{listed}"})


def _one(source: str, name: str) -> str:
    """The text of a module without its docstring and its other kernels: they change nothing of this one."""
    parts = re.split(r"\n(?=@triton\.jit)", re.sub(r'\A""".*?"""', "", source, flags=re.DOTALL))
    return "\n".join(p for p in parts if "\ndef attention_" not in p or f"\ndef {name}(" in p)
