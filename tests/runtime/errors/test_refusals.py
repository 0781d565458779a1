"""What later versions bring is refused in words: gradients, traced parameters."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import frisket as fk
from frisket.dsl.errors import ParameterError, ShapeError

ONES = np.ones((1, 8, 2, 16), np.float32)


def test_masks_do_not_add():
    with pytest.raises(ParameterError) as caught:
        fk.mask("causal") + fk.mask("causal")
    assert str(caught.value) == (
        "masks are joined with `&`, `|`, `^` and `-`, and turned round with `~`; they do not add"
    )


def test_masks_are_made_of_values():
    with pytest.raises(ParameterError) as caught:
        jax.jit(lambda doc: fk.mask("same(doc)", doc=doc).layout(8, 8).counts)(np.zeros(8, int))
    assert str(caught.value) == (
        "`doc` is traced by jax.jit or another transform, and this takes values; compile the mask without it and give "
        "it to the call: att(q, k, v, doc=doc)"
    )


@pytest.mark.parametrize("backend", ["aten", "cpp"])
def test_keys_and_values_of_two_dtypes(backend):
    torch = pytest.importorskip("torch")
    q = torch.ones(1, 2, 8, 16, dtype=torch.bfloat16)
    k = q.to(torch.float8_e5m2)
    for queries, keys, values in ((q, k, q), (k, q, q), (q, q.float(), q.float())):
        with pytest.raises(ShapeError, match=r"^q, k and v have dtypes .*; convert them to one$"):
            fk.attention(queries, keys, values, backend=backend)
