"""TritonTarget: what the kernels of Triton, and Gluon's beside them, add to the numbers of a target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from frisket.lowering.plan import Target


@dataclass(frozen=True)
class TritonTarget(Target):
    """A target of Triton's kernels, and so are those in it. `splits`: into how many parts the keys of a short query are
    split; 0: as many as fill the machine. With `descriptors` a kernel reads arrays by tensor descriptors, where kernel
    and strides allow them: the GPU copies a tile by itself, without addresses in registers. With `words` the forward
    tests bits of 32 keys in border tiles, which NVIDIA's GPUs make with one instruction. `square` is the most queries
    and keys of a tile in the kernels of captured gradients."""

    dq: TritonTarget | None = None
    dkv: TritonTarget | None = None
    dv: TritonTarget | None = None
    decode: TritonTarget | None = None
    order: Literal["forward", "longest-first", "longest-of-all-first"] = "longest-first"  # of rows; of each head's rows
    splits: int = 0
    descriptors: bool = False
    words: bool = False
    square: int = 64
    limit: int = field(default=0, repr=False)  # bytes of shared memory that a program may have; 0: not known
