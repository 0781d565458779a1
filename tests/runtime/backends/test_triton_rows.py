"""Long rows of tiles in parts: the table of programs, and which launches have one."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support.triton.process import run

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.sugar import k, q
from frisket.lowering.kernels.triton import backward, forward
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, Geometry, ProgramFacts, Spans, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton.grids import FINER, LATER, LEAST, LONG, of_call, row_parts

GLOBAL = make_plan(ProgramExprs((abs(q - k) <= 256) | (k < 64) | (q < 64)))


def spans(*slices, slice_of=None):
    """Slices of rows that see so many tiles, in records of at most 1,000."""
    bounds = np.zeros((len(slices), len(slices[0]), 4, 4), np.int32)
    for at in range(4):
        bounds[:, :, at, 0] = 1000 * at
        bounds[:, :, at, 3] = 1000 * at + np.clip(np.array(slices) - 1000 * at, 0, 1000)
    slice_of = np.zeros((1, 1), np.int32) if slice_of is None else np.array(slice_of, np.int32)
    return Spans(bounds, np.full(bounds.shape[:2], 4, np.int32), slice_of)


def walked(made, rows):
    """For each row of a slice the tiles that its programs walk, sorted; every tile once where the table is right."""
    found = {n: [] for n in range(rows)}
    for row, _, begin, end in made[made[:, 0] >= 0].tolist():
        found[row] += range(begin, end)
    return {n: sorted(x) for n, x in found.items()}


@pytest.mark.parametrize("seed", range(20))
def test_row_parts_walk_each_tile_once_and_store_each_sum(seed):
    draw = np.random.default_rng(seed)
    tiles = draw.integers(0, 40, (3, 17))
    tiles[draw.random((3, 17)) < 0.1] = draw.integers(300, 3000)
    slice_of = draw.integers(0, 3, (4, 2))
    made = row_parts(spans(*tiles, slice_of=slice_of), 16)
    if made is None:
        assert tiles[np.unique(slice_of)].max() <= LONG * max(LEAST, tiles[slice_of].sum() / 16 + 17)
        return
    for one in range(3):
        assert walked(made.programs[one], 17) == {n: list(range(x)) for n, x in enumerate(tiles[one].tolist())}
    found = []
    for b, h in np.ndindex(4, 2):
        programs, rows = made.programs[slice_of[b, h]], made.rows[slice_of[b, h]]
        lengths = programs[programs[:, 0] >= 0] @ [0, 0, -1, 1]
        assert (np.diff(lengths) <= 0).all()  # longest first
        listed = {(row, first + n): n for row, first, parts in rows.tolist() for n in range(parts)}
        parts = programs[programs[:, 1] >= 0]
        assert {(row, place) for row, place, _, _ in parts.tolist()} == listed.keys()
        order = sorted(parts.tolist())  # by row, then by place: parts come in the order of the tiles
        assert all(x[3] == y[2] for x, y in pairwise(order) if x[0] == y[0])
        found += [made.at[b, h] + place for place in parts[:, 1].tolist()]
    assert sorted(found) == list(range(made.places))


def test_rows_are_divided_by_what_a_place_has_in_the_mean():
    """One row of 1,600 tiles, and 80 of 18 that with 2 each for their ends are as much again."""
    made = row_parts(spans([1598, *[18] * 80]), 16)
    assert made.rows[0].tolist() == [[0, 0, 8 * FINER]]
    assert row_parts(spans([1598, *[18] * 80]), 2) is None
    assert row_parts(spans([1598, *[18] * 80]), 16, later=True).rows[0].tolist() == [[0, 0, 8 * FINER * LATER]]
    assert row_parts(spans([LEAST + 4, *[1] * 20]), 1 << 20) is None  # parts would be too short
    assert row_parts(spans([18] * 80), 16) is None


def test_heads_of_a_group_are_divided_together():
    slices = [1598, *[18] * 80], [18] * 81
    alike = row_parts(spans(*slices, slice_of=[[0, 0, 1, 1]]), 16, group=2)
    assert alike.rows.tolist() == [[[0, 0, 11]], [[0, 0, 0]]]
    assert alike.at.tolist() == [[0, 11]]
    assert row_parts(spans(*slices, slice_of=[[0, 1, 1, 1]]), 16, group=2) is None  # a group sees two slices


class Source:
    def rows(self, block):
        return spans([1598, *[18] * 80])

    columns = rows


def test_calls_that_have_no_table():
    g, tile = Geometry(1, 1, 1, 5184, 5184, 64, 64, 0.1), Target("triton", 64, 64)
    assert of_call(GLOBAL, Source(), g, tile, 8) is not None
    q0, q1, k0 = (ir.var(n) for n in ("q0", "q1", "k0"))
    causal = make_plan(ProgramExprs(q >= k), facts=ProgramFacts(bounds=Bounds(k0, k0, q0, q1)))
    whole, forward = replace(tile, splits=1), replace(tile, order="forward")
    for plan, source, target in (
        (causal, Source(), tile), (make_plan(ProgramExprs()), Source(), tile), (GLOBAL, None, tile),
        (GLOBAL, Source(), whole), (GLOBAL, Source(), forward),
    ):  # fmt: skip
        assert of_call(plan, source, g, target, 8) is None


SHAPE = {"backend": "triton", "q_len": 8192, "heads": 16, "head_dim": 64, "dtype": "bfloat16"}


def names(text):
    return re.findall(r"^def attention_(\w+)", text, re.M)


def test_triton_source_shows_kernels_that_split_long_rows():
    seen = fk.compile("abs(q - k) <= 256 | k < 64 | q < 64").stages(arch="sm_90", **SHAPE)
    assert names(seen.source) == ["forward", "combine", "delta", "dq", "dq_sums", "dkv", "dkv_sums"]
    dims = Dims(64, 64, "bfloat16")
    both = backward.emit(seen.plan, seen.target, dims, "qkv", dlse=False, listed={"attention_dq", "attention_dkv"})
    run_by_calls = forward.emit(seen.plan, seen.target, dims, listed=True) + both
    for one in re.split(r"@triton\.jit.*\n", seen.source)[1:]:
        assert one.rstrip() in run_by_calls


@pytest.mark.parametrize(
    ("mask", "more", "kernels"),
    [
        ("causal", {}, ["forward", "delta", "dq", "dkv"]),
        ("causal", {"heads": 1}, ["forward", "delta", "dq", "dkv", "dkv_sums"]),  # columns come from a table
        ("doc[q] == doc[k]", {"doc": np.arange(8192) // 512}, ["forward", "delta", "dq", "dkv"]),
    ],
)
def test_triton_source_of_short_rows_has_no_split_kernels(mask, more, kernels):
    assert names(fk.compile(mask).source(**SHAPE | more)) == kernels


def test_triton_source_for_jax_has_no_split_kernels():
    jnp = pytest.importorskip("jax.numpy")
    given = [jnp.zeros((1, 8192, 1, 64), jnp.bfloat16)] * 3
    assert "dkv_sums" not in names(fk.compile("causal").source("triton", *given))


@pytest.mark.exhaustive
def test_long_triton_rows_pass_in_the_interpreter():
    run(Path(__file__).parent / "children/triton_rows_interpreted.py", TRITON_INTERPRET="1")
