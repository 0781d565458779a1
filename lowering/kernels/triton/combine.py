"""Writes the Triton kernel that combines what programs found of parts of a row of tiles, in the order of the parts."""

from __future__ import annotations

from frisket.lowering.kernels.text import filled, skeleton
from frisket.lowering.plan import LoopPlan

from .parameters import padded
from .writer import Dims, TritonKernel, masked, wrapped

COMBINE = skeleton(__package__, "combine")


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
        part_at="first_at" if balanced or listed else "row_at",
    )
    rows = "queries of rows in parts" if listed else "q_len"
    return TritonKernel("attention_combine", text, f"attention_combine: grid ({rows}, heads, batch).")
