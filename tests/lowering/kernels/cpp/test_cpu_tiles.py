"""Tile sizes of the native kernels."""

import pytest

import frisket as fk
from frisket.lowering.kernels.cpp import tiles as cpu_tiles
from frisket.lowering.plan import Geometry


def geometry(q_len, dim=64, batch=1, heads=8):
    return Geometry(batch, heads, heads, q_len, max(q_len, 4096), dim, dim, 1.0)


@pytest.mark.parametrize(
    ("g", "dtype", "narrow", "want"),
    [
        (geometry(4096), "float32", False, (96, 64)),
        (geometry(4096), "float32", True, (96, 64)),
        (geometry(4096), "float16", False, (96, 128)),
        (geometry(4096, dim=128), "float64", False, (96, 64)),
        (geometry(4096, dim=256), "float32", False, (192, 128)),
        (geometry(4096, dim=256), "float64", False, (192, 128)),
        (geometry(4096, dim=512), "float64", False, (192, 64)),
        (geometry(4096, dim=256), "float32", True, (96, 128)),
        (geometry(256), "float32", False, (24, 64)),
        (geometry(256, batch=32), "float32", False, (96, 64)),
        (geometry(1), "float32", False, (1, 64)),
        (geometry(16), "float32", False, (16, 64)),
        (geometry(17), "float32", False, (24, 64)),
    ],
)
def test_native_tiles_fit_the_second_level_cache(g, dtype, narrow, want, monkeypatch):
    monkeypatch.setattr(cpu_tiles, "second_level", lambda: 1 << 20)
    assert cpu_tiles.tiles(g, dtype, narrow) == want


def test_a_small_cache_makes_small_tiles(monkeypatch):
    monkeypatch.setattr(cpu_tiles, "second_level", lambda: 1 << 15)
    assert cpu_tiles.tiles(geometry(4096), "float32", False) == (96, 32)


def test_size_of_the_second_level_cache_is_known():
    assert cpu_tiles.second_level() >= 1 << 15


def test_single_query_that_sees_all_keys_has_full_tiles_alone():
    block = cpu_tiles.tiles(geometry(1), "float32", False)
    spans = fk.compile("causal").plan(1, 4096, 1, 8, origin=(0, 0, 4095, 0)).rows(block)
    assert spans.bounds.tolist() == [[[[0, 0, 64, 64]]]]
