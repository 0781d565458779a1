"""The dtypes of q, k and v, a row each, from which every list of dtypes derives, and the form of an array in memory.

>>> DTYPES["bfloat16"].bytes, DTYPES["bfloat16"].triton, accumulate("bfloat16")
(2, 'bf16', 'float32')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Dtype:
    """A dtype of q, k or v; torch, jax.numpy and numpy with ml_dtypes call it by `name`."""

    name: str
    kind: Literal["float", "fp8", "int8"]
    bytes: int
    mantissa: int  # bits behind the leading one; of an integer those of its magnitude
    triton: str  # the name in signatures of Triton's kernels
    cpp: str  # the type of entries in memory that C++ kernels read
    cpp_form: int = 0  # the number of HALF or EIGHT in C++ kernels, which tells dtypes of one size apart
    accumulate: str = "float32"  # the dtype of sums, lse and sinks

    @property
    def half(self) -> bool:
        """Whether this is a Float of 16 bits."""
        return self.bytes == 2


_ROWS = (
    Dtype("float16", "float", 2, 10, "fp16", "uint16_t", 2),
    Dtype("bfloat16", "float", 2, 7, "bf16", "uint16_t", 1),
    Dtype("float32", "float", 4, 23, "fp32", "float"),
    Dtype("float64", "float", 8, 52, "fp64", "double", accumulate="float64"),
    Dtype("int8", "int8", 1, 7, "i8", "int8_t", 1),
    Dtype("float8_e4m3fn", "fp8", 1, 3, "fp8e4nv", "uint8_t", 2),
    Dtype("float8_e5m2", "fp8", 1, 2, "fp8e5", "uint8_t", 3),
)
DTYPES = {x.name: x for x in _ROWS}
FLOATS = tuple(x.name for x in _ROWS if x.kind == "float")  # of queries
BYTES = tuple(x.name for x in _ROWS if x.bytes == 1)  # of keys and values, with queries of any Float
FP8 = "float8_e4m3fn"  # of queries, keys and values together, in the forward alone
HALVES = tuple(n for n in FLOATS if DTYPES[n].half)
SUMS = tuple(n for n in FLOATS if DTYPES[n].accumulate == n)  # dtypes that sums have
SINGLE, DOUBLE = SUMS
ACCELERATED = (SINGLE, *HALVES)  # of queries on GPUs and TPUs, which have no float64 or a slow one


def accumulate(dtype: Any) -> str:
    """The dtype of sums, lse and sinks for arrays of a dtype, which is a name or a framework's own."""
    row = DTYPES.get(str(dtype).removeprefix("torch."))
    return SINGLE if row is None else row.accumulate


def result_of(dtype: str) -> str:
    """The dtype of out, for queries of a dtype: 8 bits are too few for a sum.

    >>> result_of("float16"), result_of("float8_e4m3fn")
    ('float16', 'bfloat16')
    """
    return "bfloat16" if dtype == FP8 else dtype


@dataclass(frozen=True)
class Operand:
    """The form of q, k or v in memory. A scale belongs to a block of `scale_block` (tokens, entries along the head
    dimension); None: there are no scales. `pack` values share a byte where they have fewer than 8 bits.

    >>> print(Operand("int8", (1, 32)), Operand("int8", pack=2), sep="; ")
    int8 with a scale for 1 x 32 tokens and dims; int8 with 2 values in a byte
    """

    dtype: str = ""  # "": of shapes alone, whose dtype is not said
    scale_block: tuple[int, int] | None = None
    pack: int = 1

    def has_kernels(self, name: str, dim: int) -> bool:
        """Whether kernels read q, k or v, by `name`, in this form."""
        tokens, along = self.scale_block or (0, dim)
        # with queries of 8 bits a scale may belong to any number of tokens
        scales = self.dtype == FP8 or (tokens <= 1 and (name != "q" or not tokens))
        return self.dtype in _READ[name] and scales and along == dim and self.pack == 1

    def __str__(self) -> str:
        block = self.scale_block
        scales = "" if block is None else f" with a scale for {block[0]} x {block[1]} tokens and dims"
        return f"{self.dtype}{scales}" + f" with {self.pack} values in a byte" * (self.pack > 1)


UNSAID = Operand()
OPERANDS = {name: Operand(name) for name in DTYPES}  # without scales
_READ = {"q": {"", *FLOATS, FP8}, "k": {"", *DTYPES}, "v": {"", *DTYPES}}  # dtypes that kernels read
