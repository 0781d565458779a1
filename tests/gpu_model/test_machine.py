"""The constants of GPUs: the products of their data sheets, and tables of tiles that some model knows."""

import pytest
from gpu_sim import search
from gpu_sim.machine import A100, GPUS, H100, L40S, RTX_3090, RTX_4090, resident

from frisket.lowering.architectures import GPUS as LISTED


@pytest.mark.parametrize(("gpu", "rate"), [
    (A100, 312e12), (H100, 989.4e12 * 1.755 / 1.83), (RTX_3090, 71e12), (RTX_4090, 165.2e12), (L40S, 362e12),
])  # fmt: skip
def test_products_are_those_of_the_data_sheet(gpu, rate):
    """NVIDIA's rates of 16-bit products that add in float32, without sparsity."""
    assert gpu.processors * 4 * gpu.matrix * 2 * gpu.clock == pytest.approx(rate, rel=0.01)


def test_blocks_of_modelled_gpus_fit_their_processors():
    for gpu in GPUS.values():
        assert LISTED[gpu.arch].shared == gpu.shared_bytes - gpu.reserved
        assert resident(gpu, 8, 128, LISTED[gpu.arch].shared) == 1


def test_tiles_are_searched_for_all_gpus_that_take_them():
    """No tile of a table may spill on any GPU of mma.sync that takes it; sm_86 has the instructions of sm_89."""
    for name in ("sm_80", "sm_89"):
        forms = {arch for _, _, arch in search.Cell(name, "forward", "long", 128).forms}
        takers = {x.name for x in LISTED.values() if x.tiles == name and x.products == "mma"}
        assert forms == takers - {"sm_86", "sm_121"}
