"""The architectures of NVIDIA, AMD and TPUs, a row each: all that kernels, tile sizes and errors know of a machine.

>>> architecture_of("sm_90").compiler, architecture_of("gfx942").compiler
(('cuda', 90, 32), ('hip', 'gfx942', 64))
>>> tpu_of("TPU v5 lite").rolls, tpu_of("TPU v4").rolls
(True, False)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from frisket.grammar.memo import memo

Products = Literal["mma", "wgmma", "tcgen05", "mfma", "wmma", "mxu"]
# instructions of matrix products in compiled kernels
_INSTRUCTIONS = {
    "mma": r"\b[HIQ]MMA\.",
    "wgmma": r"\b[HIQ]G?MMA\.",
    "tcgen05": r"\b(?:UTC[HIQ]|[HIQ])MMA\b",
    "mfma": r"\bv_mfma_",
    "wmma": r"\bv_wmma_",
}


@dataclass(frozen=True)
class Architecture:
    """A kind of GPU or TPU."""

    name: str  # as compilers have it: sm_90, gfx942
    vendor: Literal["nvidia", "amd", "google"]
    products: Products  # the widest instructions of matrix products
    kinds: tuple[str, ...]  # parts of names of devices
    shared: int = 0  # bytes of shared memory of a block by the vendors' documents; 0: no kernel asks
    tiles: str = ""  # the architecture whose tiles Triton's kernels take
    lanes: int = 32  # threads of a warp; of a TPU the lanes of a vector
    rows: int = 0  # queries of a warp group in kernels that are written for this architecture; 0: there are none
    processors: int = 0  # of the part that tiles are chosen for where there is no GPU
    bfloat16: bool = True  # whether there are products of bfloat16, which others convert to float32
    words: bool = False  # whether the forward tests bits of words: NVIDIA's GPUs make them with one instruction
    rolls: bool = True  # whether kernels may roll each row of a vector by another number

    @property
    def mma(self) -> str:
        """A pattern that matches instructions of matrix products."""
        return _INSTRUCTIONS[self.products]

    @property
    def capability(self) -> int:
        """The compute capability of a GPU of NVIDIA: 90 for sm_90."""
        return int(self.name.removeprefix("sm_"))

    @property
    def compiler(self) -> tuple[str, int | str, int]:
        """The backend of Triton's compiler, the architecture as it has it, and the threads of a warp."""
        name = self.capability if self.vendor == "nvidia" else self.name
        return "cuda" if self.vendor == "nvidia" else "hip", name, self.lanes


def _nvidia(
    capability: int, products: Products, tiles: int, shared: int, *kinds: str, rows: int = 0, processors: int = 0
) -> Architecture:
    # Blackwell makes words too, but spills with them in a window's tile of 64 x 64, and no model says what they gain
    new, words = capability >= 80, 80 <= capability < 100
    known = f"sm_{tiles}", 32, rows, processors
    return Architecture(f"sm_{capability}", "nvidia", products, kinds, shared, *known, bfloat16=new, words=words)


def _amd(name: str, products: Products, shared: int, lanes: int, *kinds: str) -> Architecture:
    return Architecture(name, "amd", products, kinds, shared, "gfx942", lanes)


_ROWS = (
    _nvidia(75, "mma", 80, 65_536, "T4", "RTX 20"),
    _nvidia(80, "mma", 80, 166_912, "A100"),
    _nvidia(86, "mma", 80, 101_376, "A10", "A40", "RTX A", "RTX 30"),
    _nvidia(87, "mma", 80, 166_912, "Orin"),
    _nvidia(89, "mma", 80, 101_376, "L4", "RTX 40"),
    _nvidia(90, "wgmma", 90, 232_448, "H100", "H200", "GH200", rows=64, processors=132),
    _nvidia(100, "tcgen05", 100, 232_448, "B200", rows=128),
    _nvidia(103, "tcgen05", 100, 232_448, "B300"),
    _nvidia(110, "mma", 80, 232_448, "Thor"),
    _nvidia(120, "mma", 80, 101_376, "RTX 50", "RTX PRO"),
    _nvidia(121, "mma", 80, 101_376, "GB10"),
    _amd("gfx90a", "mfma", 65_536, 64, "MI250"),
    _amd("gfx942", "mfma", 65_536, 64, "MI300", "MI325"),
    _amd("gfx950", "mfma", 163_840, 64, "MI35"),
    _amd("gfx1100", "wmma", 65_536, 32, "RX 79"),
    _amd("gfx1201", "wmma", 65_536, 32, "RX 90"),
    Architecture("TPU v4", "google", "mxu", ("TPU v2", "TPU v3", "TPU v4"), lanes=128, rolls=False),
    Architecture("TPU v5", "google", "mxu", ("TPU v4 lite", "TPU"), lanes=128),
)
ARCHITECTURES = {x.name: x for x in _ROWS}
GPUS = {n: x for n, x in ARCHITECTURES.items() if x.vendor != "google"}
H100 = GPUS["sm_90"]  # what tiles are chosen for where there is no GPU
WRITTEN = tuple(n for n, x in GPUS.items() if x.rows)  # kernels are written, and vendors' engines checked, for these


@memo(group="once")
def architecture_of(name: str) -> Architecture:
    """The row of a GPU. One that is not listed takes the vendor's row with the least memory, whose tiles are an A100's,
    which need no warp groups, or an MI300's."""
    if name in GPUS:
        return GPUS[name]
    if name.startswith("gfx"):
        return replace(GPUS["gfx90a"], name=name)
    digits = name.removeprefix("sm_")
    words = len(digits) == 2 and digits[0] in "89"
    return replace(GPUS["sm_75"], name=name, bfloat16=not digits.startswith("7"), words=words)


def name_of(amd: str, capability: str) -> str:
    """The name of a GPU's architecture by what frameworks say of it: `amd`, of AMD's "gfx942:sramecc+", and the compute
    capability of others, "9.0"."""
    name = amd.partition(":")[0]
    return name if name.startswith("gfx") else f"sm_{capability.replace('.', '')}"


def gpu_of(kind: str) -> Architecture | None:
    """The row of a GPU by the name of its device: "NVIDIA H100 80GB HBM3"."""
    return _by_kind(kind, tuple(GPUS.values()))


def tpu_of(kind: str) -> Architecture:
    """The row of a TPU by the name of its device; one that is not listed is like those from v5 on."""
    return _by_kind(kind, _ROWS[len(GPUS) :]) or ARCHITECTURES["TPU v5"]


def _by_kind(kind: str, rows: tuple[Architecture, ...]) -> Architecture | None:
    names = {part: x for x in rows for part in x.kinds}
    part = next((n for n in sorted(names, key=len, reverse=True) if n in kind), None)
    return None if part is None else names[part]
