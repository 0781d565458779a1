"""The table of dtypes says what ml_dtypes and torch say of them."""

import ml_dtypes
import numpy as np
import pytest

from frisket.lowering.dtypes import ACCELERATED, BYTES, DTYPES, FLOATS, HALVES, SUMS, accumulate


@pytest.mark.parametrize("name", DTYPES)
def test_rows_of_dtypes_have_bytes_and_bits(name):
    row, kind = DTYPES[name], np.dtype(getattr(ml_dtypes, name, name))
    bits = ml_dtypes.iinfo(kind).bits - 1 if row.kind == "int8" else ml_dtypes.finfo(kind).nmant
    assert (row.bytes, row.mantissa) == (kind.itemsize, bits)


def test_lists_of_dtypes_follow_from_the_rows():
    assert {*FLOATS} | {*BYTES} == DTYPES.keys()
    assert {*SUMS} | {*HALVES} == {*FLOATS}
    assert {*ACCELERATED} == {*FLOATS} - {"float64"}


def test_sums_are_wide_beside_wide_arrays_alone():
    torch = pytest.importorskip("torch")
    for name in FLOATS:
        want = "float64" if name == "float64" else "float32"
        assert (
            accumulate(name) == accumulate(getattr(torch, name)) == accumulate(np.dtype(getattr(ml_dtypes, name, name)))
        )
        assert accumulate(name) == want
