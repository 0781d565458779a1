"""The table of architectures: names of devices, vendors, relatives of unlisted ones, and the table on the page."""

import pytest
from support.pages import script

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
        ("sm_70", "sm_75", False, False), ("sm_88", "sm_89", True, True), ("sm_130", "sm_89", False, True),
        ("gfx906", "gfx90a", False, True), ("gfx1102", "gfx1100", False, True), ("gfx1200", "gfx1201", False, True),
    ],
)  # fmt: skip
def test_an_unlisted_gpu_has_the_memory_of_a_small_relative(name, like, words, bfloat16):
    row = architecture_of(name)
    assert (row.name, row.vendor, row.shared) == (name, GPUS[like].vendor, GPUS[like].shared)
    assert (row.words, row.bfloat16) == (words, bfloat16)


def test_kernels_are_written_for_rows_of_warp_groups():
    assert WRITTEN == ("sm_90", "sm_100", "sm_103")
    assert [architecture_of(n).rows for n in WRITTEN] == [64, 128, 128]
    assert {x.name for x in ARCHITECTURES.values() if x.vendor == "google"} == ARCHITECTURES.keys() - GPUS.keys()


def test_frameworks_name_architectures_in_two_ways():
    assert name_of("gfx942:sramecc+:xnack-", "9.4") == "gfx942"
    assert name_of("NVIDIA", "12.0") == name_of("", "12.0") == "sm_120"


def test_tpus_roll_rows_from_the_fifth_on():
    kinds = {"TPU v2": False, "TPU v3": False, "TPU v4": False, "TPU v4 lite": True, "TPU v5p": True, "TPU7x": True}
    assert {kind: tpu_of(kind).rolls for kind in kinds} == kinds
    assert tpu_of("something else").rolls


@pytest.fixture(scope="module")
def architectures():
    return script("architectures")


def test_table_of_gpus_is_up_to_date(architectures):
    assert architectures.PAGE.read_text(encoding="utf-8") == architectures.page(), "python docs/architectures.py"


def test_default_tiles_spill_nothing_at_head_sizes_64_and_128(architectures):
    """On GPUs of mma.sync, with both versions of Triton; on a T4 one kernel spills 8 bytes."""
    spills = {}
    for version in architectures.VERSIONS:
        for (arch, dim, kernel), figures in architectures.figures(version).items():
            assert figures[-1] <= GPUS[arch].shared
            if dim <= 128 and figures[-2] and GPUS[arch].products in ("fma", "mma"):
                spills[arch, dim, kernel, version] = figures[-2]
    assert spills == {("sm_75", 128, "dq", v): 8 for v in architectures.VERSIONS}
