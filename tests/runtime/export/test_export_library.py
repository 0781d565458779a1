"""Every mask of the library through the exports: those that hold it hold all of it."""

from __future__ import annotations

from contextlib import suppress

import cases
import numpy as np
import pytest
import torch
from support import formats
from support.tiers import thinned
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from frisket.dsl.errors import ExportError


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", thinned(cases.masks(64), 4))
def test_library_exports_hold_the_whole_mask(name):
    case = cases.masks(64)[name]
    layout = case.mask.layout(**case.lengths, block=(16, 32))
    dense = np.asarray(case.mask.dense(**case.lengths))
    ours, table = layout.to_block_mask(), torch.from_numpy(dense)
    nb, nh = ours.kv_num_blocks.shape[:2]
    lengths = (case.batch, case.heads, case.q_len, case.kv_len)
    formats.same_lists(
        ours, create_block_mask(lambda b, h, q, k: table[b, h, q, k], nb, nh, *lengths[2:], "cpu", (16, 32))
    )
    np.testing.assert_array_equal(create_mask(ours.mask_mod, *lengths, "cpu").numpy(), dense)
    for b, h in np.ndindex(case.batch, case.heads):
        bsr = layout.to_bsr(bits=True)
        seen = formats.bsr(bsr.slices[bsr.slice_of[b, h]], bsr.shape)
        np.testing.assert_array_equal(seen[: case.q_len, : case.kv_len], dense[b, h])
    with suppress(ExportError):
        found = layout.to_flashmask()
        np.testing.assert_array_equal(
            np.broadcast_to(formats.flashmask(found.startend_row_indices, found.causal, case.q_len), dense.shape), dense
        )
    totals = (case.batch * case.q_len, case.batch * case.kv_len)
    with suppress(ExportError):
        np.testing.assert_array_equal(formats.slices(layout.to_slices(), *totals), formats.packed(dense))
    with suppress(ExportError):
        np.testing.assert_array_equal(formats.varlen(layout.to_varlen(), *totals), formats.packed(dense))
