"""Kernels of accelerators that run in an interpreter say so, and how long a call may take."""

import warnings

import pytest

import frisket as fk
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.registry import warn_slow
from frisket.runtime.machine.caller import SAID

jnp = pytest.importorskip("jax.numpy")


def said(backend, *lengths):
    SAID.clear()
    batch, heads, q_len, kv_len = lengths
    with pytest.warns(UserWarning, match=f"backend {backend!r}") as caught:
        warn_slow(backend, Geometry(batch, heads, heads, q_len, kv_len, 64, 64, 1.0))
    return str(caught[0].message).splitlines()[0]


def test_how_long_a_call_may_take():
    assert said("pallas-mosaic-gpu", 1, 1, 128, 128) == (
        "backend 'pallas-mosaic-gpu' runs in Pallas' interpreter on this CPU, for checking and not for speed: a call "
        "of this size may take about 10 s, its gradient three times as long"
    )
    assert "may take some minutes" in said("pallas-mosaic-gpu", 1, 8, 200, 200)
    assert "may take many hours" in said("pallas-mosaic-gpu", 8, 16, 4096, 4096)
    assert "may take some seconds" in said("pallas-tpu", 1, 8, 1024, 1024)
    assert "Triton's interpreter" in said("triton", 1, 1, 128, 128)
    assert "may take about 10 s" in said("triton", 2, 8, 500, 500)


def test_a_call_says_it_once_and_others_say_nothing():
    assert RECORDS["pallas-tpu"].interpreted
    SAID.clear()
    q = jnp.ones((1, 8, 1, 16))
    with pytest.warns(UserWarning, match="'pallas-tpu' runs in Pallas' interpreter") as caught:
        fk.attention(q, q, q, "causal", backend="pallas-tpu")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fk.attention(q, q, q, "causal", backend="pallas-tpu")
        fk.attention(q, q, q, "causal", backend="xla")
