"""The table of architectures: names of devices, vendors, and what an unlisted one is taken for."""

import pytest

from frisket.lowering.architectures import ARCHITECTURES, GPUS, WRITTEN, architecture_of, gpu_of, name_of, tpu_of


@pytest.mark.parametrize("name", GPUS)
def test_rows_of_gpus_name_tiles_and_a_compiler(name):
    row = architecture_of(name)
    assert GPUS[row.tiles].tiles == row.tiles
    assert row.shared >= 64 * 1024
    assert row.compiler[0] == {"nvidia": "cuda", "amd": "hip"}[row.vendor]
    assert f"sm_{row.compiler[1]}" == name or row.compiler[1] == name
    assert all(gpu_of(f"a {kind} of some size").name == name for kind in row.kinds)


@pytest.mark.parametrize(
    ("name", "like", "words", "bfloat16"),
    [
        ("sm_70", "sm_75", False, False), ("sm_88", "sm_75", True, True), ("sm_130", "sm_75", False, True),
        ("gfx906", "gfx90a", False, True),
    ],
)  # fmt: skip
def test_an_unlisted_gpu_has_the_least_memory_of_its_vendor(name, like, words, bfloat16):
    row = architecture_of(name)
    assert (row.name, row.vendor, row.shared) == (name, GPUS[like].vendor, GPUS[like].shared)
    assert (row.words, row.bfloat16) == (words, bfloat16)


def test_kernels_are_written_for_rows_of_warp_groups():
    assert WRITTEN == ("sm_90", "sm_100")
    assert {x.name for x in ARCHITECTURES.values() if x.vendor == "google"} == ARCHITECTURES.keys() - GPUS.keys()


def test_frameworks_name_architectures_in_two_ways():
    assert name_of("gfx942:sramecc+:xnack-", "9.4") == "gfx942"
    assert name_of("NVIDIA", "12.0") == name_of("", "12.0") == "sm_120"


def test_tpus_roll_rows_from_the_fifth_on():
    kinds = {"TPU v2": False, "TPU v3": False, "TPU v4": False, "TPU v4 lite": True, "TPU v5p": True, "TPU7x": True}
    assert {kind: tpu_of(kind).rolls for kind in kinds} == kinds
    assert tpu_of("something else").rolls
