"""TritonTarget: what the kernels of Triton and of Gluon add to the numbers of a target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from frisket.lowering.architectures import architecture_of
from frisket.lowering.plan import Target


@dataclass(frozen=True)
class TritonTarget(Target):
    """A target of Triton's kernels, and so are those in it. `splits`: into how many parts the keys of a short query are
    split; 0: as many as fill the machine. With `descriptors` a kernel reads arrays by tensor descriptors, where kernel
    and strides allow them: the GPU copies a tile by itself, without addresses in registers. With `words` the forward
    tests bits of 32 keys in partial tiles, which NVIDIA's GPUs make with one instruction. `square` is the most queries
    and keys of a tile in the kernels of captured gradients. `latent` are the tiles of few queries whose values are the
    first numbers of keys, those with fewer rows first: rows, keys, warps and stages. Without any, tiles are those for
    other values. `waves` and `mfma` are options of AMD's compiler: the wavefronts of a SIMD that registers are allotted
    for, and the rows of a matrix product, 16 or 32. The compiler chooses where they are 0. `fused` is the tile of
    Gluon's fused backward, where calls may take it in the place of dq and dkv."""

    dq: TritonTarget | None = None
    dkv: TritonTarget | None = None
    dv: TritonTarget | None = None
    decode: TritonTarget | None = None
    fused: TritonTarget | None = None
    order: Literal["forward", "longest-first", "longest-of-all-first"] = "longest-first"  # of rows; of each head's rows
    splits: int = 0
    descriptors: bool = False
    words: bool = False
    square: int = 64
    waves: int = 0
    mfma: int = 0
    measured: str = field(default="", repr=False, compare=False)  # where and when the tile was measured, in words
    latent: tuple[tuple[int, int, int, int], ...] = field(default=(), repr=False)
    limit: int = field(default=0, repr=False)  # bytes of shared memory that a program may have; 0: not known

    @property
    def thread_bits(self) -> int:
        """The bits of a column by which threads of a warp differ where products leave their results."""
        return 12 if self.mfma == 16 else architecture_of(self.arch).thread_bits

    @property
    def options(self) -> dict[str, Any]:
        """The options of Triton's compiler."""
        of_amd = {"waves_per_eu": self.waves, "matrix_instr_nonkdim": self.mfma}
        common = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        return common | {n: x for n, x in of_amd.items() if x}
