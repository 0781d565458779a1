"""The architectures of NVIDIA, AMD and TPUs, a row each: all that kernels, tile sizes and errors know of a machine.

>>> architecture_of("sm_90").compiler, architecture_of("gfx942").compiler
(('cuda', 90, 32), ('hip', 'gfx942', 64))
>>> tpu_of("TPU v5 lite").rolls, tpu_of("TPU v4").rolls
(True, False)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from frisket.grammar.memo import memo

Products = Literal["fma", "mma", "wgmma", "tcgen05", "mfma", "wmma", "mxu"]  # fma: Triton has no other for a T4
# instructions of matrix products in compiled kernels
_INSTRUCTIONS = {
    "fma": r"\b[HIQ]MMA\.",
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
    processors: int = 0  # of the largest part that is sold; 0: not listed
    exp2: int = 8  # cycles that one exp2 of a warp keeps MUFU busy; only kernels with tensor memory ask
    bfloat16: bool = True  # whether there are products of bfloat16, which others convert to float32
    words: bool = False  # whether the forward tests bits of words: NVIDIA's GPUs make them with one instruction
    thread_bits: int = 6  # bits of a column by which threads of a warp differ where products leave their results
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


def _amd(name: str, products: Products, shared: int, thread_bits: int, *kinds: str, tiles: str = "") -> Architecture:
    lanes = 64 if products == "mfma" else 32
    return Architecture(name, "amd", products, kinds, shared, tiles or name, lanes, thread_bits=thread_bits)


_ROWS = (
    _nvidia(75, "fma", 80, 65_536, "T4", "RTX 20", processors=72),
    _nvidia(80, "mma", 80, 166_912, "A100", processors=108),
    _nvidia(86, "mma", 89, 101_376, "A10", "A40", "RTX A", "RTX 30", processors=84),
    _nvidia(87, "mma", 80, 166_912, "Orin", processors=16),
    _nvidia(89, "mma", 89, 101_376, "L4", "RTX 40", processors=142),
    _nvidia(90, "wgmma", 90, 232_448, "H100", "H200", "GH200", rows=64, processors=132),
    _nvidia(100, "tcgen05", 100, 232_448, "B200", rows=128, processors=148),
    # "doubling SFU throughput": NVIDIA's blog, "Making Softmax More Efficient with NVIDIA Blackwell Ultra"
    replace(_nvidia(103, "tcgen05", 100, 232_448, "B300", rows=128, processors=148), exp2=4),
    _nvidia(110, "tcgen05", 100, 232_448, "Thor", processors=20),
    _nvidia(120, "mma", 89, 101_376, "RTX 50", "RTX PRO", processors=188),
    _nvidia(121, "mma", 89, 101_376, "GB10", processors=48),
    _amd("gfx90a", "mfma", 65_536, 4, "MI250", tiles="gfx942"),
    _amd("gfx942", "mfma", 65_536, 4, "MI300", "MI325"),
    _amd("gfx950", "mfma", 163_840, 4, "MI35"),
    _amd("gfx1100", "wmma", 65_536, 1, "RX 79"),
    _amd("gfx1201", "wmma", 65_536, 8, "RX 90"),
    Architecture("TPU v4", "google", "mxu", ("TPU v2", "TPU v3", "TPU v4"), lanes=128, rolls=False),
    Architecture("TPU v5", "google", "mxu", ("TPU v4 lite", "TPU"), lanes=128),
)
ARCHITECTURES = {x.name: x for x in _ROWS}
GPUS = {n: x for n, x in ARCHITECTURES.items() if x.vendor != "google"}
H100 = GPUS["sm_90"]  # what tiles are chosen for where there is no GPU
MEASURED = {"sm_90": ("H100",)}  # devices of an architecture that ran frisket; the others of its row did not
WRITTEN = tuple(n for n, x in GPUS.items() if x.rows)  # Gluon's kernels are written for these
# FlashAttention 4 was read, and compiled around frisket's masks, for these
FLASH_CHECKED = ("sm_90", "sm_100")


@memo(group="once")
def architecture_of(name: str) -> Architecture:
    """The row of a GPU. NVIDIA's GPUs that are not listed take the row of an RTX 40, which needs no warp groups and
    little memory; older ones take a T4's. AMD's take the row of their generation of RDNA, or an MI250's."""
    if name in GPUS:
        return GPUS[name]
    if name.startswith("gfx"):
        return replace(GPUS["gfx1201" if name[3:5] == "12" else "gfx1100" if name[3] == "1" else "gfx90a"], name=name)
    digits = name.removeprefix("sm_")
    if digits.startswith("7"):
        return replace(GPUS["sm_75"], name=name)
    return replace(GPUS["sm_89"], name=name, words=len(digits) == 2 and digits[0] in "89")


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


State = Literal["measured on", "compiles", "interpreter only", "never"]


class Tried(NamedTuple):
    """Whether a kind of machine ran frisket."""

    machine: str
    state: State
    how: str


def tried() -> list[Tried]:
    """Every kind of machine that frisket has kernels or library calls for, with how far it was tried there."""
    gpus = []
    for x in GPUS.values():
        ran = MEASURED.get(x.name, ())
        # an architecture has devices that ran frisket and others that did not: a row for each kind
        if ran:
            gpus.append(Tried(f"{', '.join(ran)} ({x.name})", "measured on", "tests and benchmarks, torch and JAX"))
        if others := ", ".join(n for n in x.kinds if n not in ran):
            how = "Triton compiles the kernels for it; no such GPU ran them"
            gpus.append(Tried(f"{others} ({x.name})", "compiles", how))
    tpu = "in Pallas' interpreter on a CPU"
    return [
        Tried("x86-64 CPUs, Linux", "measured on", "AMD EPYC and Intel Xeon: AVX2, AVX-512 and AMX"),
        Tried("arm64 CPUs, Linux", "interpreter only", "native kernels are built for it and run in QEMU"),
        Tried("arm64 CPUs, macOS", "never", "calls of torch and JAX would run; a test imitates the system"),
        Tried("Windows", "never", "calls of torch and JAX would run; a test imitates the system"),
        *gpus,
        Tried("GPUs of Intel and Apple", "never", "there are no kernels for them"),
        Tried("TPU v4, v5e, v5p, v6e", "compiles", f"libtpu compiles the kernels; results were compared {tpu}"),
        Tried("TPU v2, v3", "interpreter only", f"kernels run {tpu}"),
    ]
