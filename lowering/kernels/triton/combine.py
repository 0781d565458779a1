"""Writes the Triton kernels that combine what programs found of parts of a row of tiles, in the order of the parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frisket.lowering.kernels.text import filled, skeleton
from frisket.lowering.plan import LoopPlan

from .parameters import padded
from .writer import Dims, TritonKernel, masked, wrapped

COMBINE, SUMS = skeleton(__package__, "combine"), skeleton(__package__, "sums")


def combine(
    plan: LoopPlan, dims: Dims, *, sinks: bool = False, top: bool = False, low: bool = False, balanced: bool = False,
    listed: bool = False,
) -> TritonKernel:  # fmt: skip
    """The kernel that combines the parts of each row, or of those rows that a table lists. Of the plan it reads
    `guard`: whether a row may be empty."""
    e, dim, length = ("d", "DIM", "HEAD_DIM") if dims.v_dim == dims.head_dim else ("e", "DIM_V", "V_DIM")
    ragged = padded(dims.v_dim) != dims.v_dim
    text = filled(
        COMBINE,
        wrapped,
        d=e,
        dim=dim,
        v_dim=length,
        load=masked("part[:, None] < splits", f"{e}[None, :] < {length}" if ragged else ""),
        store=masked(f"{e} < {length}" if ragged else "", other=""),
        sinks=sinks,
        largest=top,
        low=low,
        guard=plan.guard,
        rescale="rescale" if sinks else "1.0",
        balanced=balanced,
        listed=listed,
        of_place="place",
        length="q_len",
        part_at="first_at" if balanced or listed else "row_at",
    )
    rows = "queries of rows in parts" if listed else "q_len"
    return TritonKernel("attention_combine", text, f"attention_combine: grid ({rows}, heads, batch).")


@dataclass(frozen=True)
class PartSums:
    """The sums of a part of a row of a backward kernel, which stand beside one another in float32: `arrays` are
    (gradient, its sum, "d" or "e"), `totals` (buffer, its sum), of which each of `heads` heads has one."""

    dims: Dims
    arrays: Sequence[tuple[str, str, str]]
    totals: Sequence[tuple[str, str]]
    heads: int = 1

    def _width(self, d: str) -> int:
        return self.dims.head_dim if d == "d" else self.dims.v_dim

    @property
    def offsets(self) -> list[int]:
        """The place of each among the numbers of a query or key."""
        widths = [*(self._width(d) for *_, d in self.arrays), *[self.heads] * len(self.totals)]
        return [sum(widths[:i]) for i in range(len(widths) + 1)]

    @property
    def numbers(self) -> int:
        """Numbers of a query or key."""
        return self.offsets[-1]

    def stores(self, masks: dict[str, str]) -> list[str]:
        """The lines that store the sums of arrays at `part_at`."""
        return [
            f"tl.store(Acc + part_at[:, None] * {self.numbers} + {_behind(offset, d)}, {total}{masks[d]})"
            for offset, (_, total, d) in zip(self.offsets, self.arrays)
        ]

    def stores_of_totals(self) -> list[str]:
        """The lines that store the totals of a head there."""
        head = " + head - kv_head * GROUP" if self.heads > 1 else ""
        offsets = self.offsets[len(self.arrays) :]
        return [
            f"tl.store(Acc + part_at * {self.numbers} + {offset}{head}, {total}, mask=present)"
            for offset, (_, total) in zip(offsets, self.totals)
        ]

    def kernel(self, name: str, length: str, buffers: Sequence[str]) -> TritonKernel:
        """The kernel that adds the parts of rows up; `buffers` are the parameters of totals."""
        several = self.heads > 1
        offsets = [f" + {n}" if n else "" for n in self.offsets]
        text = filled(
            SUMS,
            wrapped,
            name=name,
            numbers=self.numbers,
            length=length,
            results=", ".join(n for n, *_ in self.arrays),
            buffers=list(buffers),
            of_place="place * GROUP" if several else "place",
            several=several,
            arrays=[self._array(*x) for x in zip(offsets, self.arrays)],
            totals=[
                {"offset": offset + " + i" * several, "buffer": buffer}
                for offset, (buffer, _) in zip(offsets[len(self.arrays) :], self.totals)
            ],
        )
        return TritonKernel(name, text, f"{name}: grid (rows of tiles in parts, heads, batch).")

    def _array(self, offset: str, array: tuple[str, str, str]) -> dict[str, Any]:
        result, _, d = array
        width = self._width(d)
        ragged = padded(width) != width
        return {
            "result": result, "d": d, "dim": padded(width), "width": width, "offset": offset, "scaled": result != "DV",
            "load": masked("part[:, None] < splits", f"{d}[None, :] < {width}" * ragged),
            "store": masked(f"{d} < {width}" * ragged, other=""),
        }  # fmt: skip


def _behind(offset: int, d: str) -> str:
    return f"({offset} + {d}[None, :])" if offset else f"{d}[None, :]"
