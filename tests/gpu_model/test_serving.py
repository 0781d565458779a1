"""Steps of serving in the model: streams with known answers, and the tiles of programs."""

from dataclasses import replace

import pytest
from gpu_sim.machine import H100
from gpu_sim.serving import KEY_HEADS, Block, Step, blocks_of, divided, stream

LENGTHS = (131_072, *[1024] * 31)


def test_streams():
    one = Block(10, 100, 400)  # 4 bytes a cycle where nobody else reads
    assert stream([one], 1, 1000) == 110
    assert stream([one] * 3, 1, 1000) == 330  # one after another
    assert stream([one] * 3, 3, 1000) == 110
    assert stream([one] * 3, 3, 6) == 10 + 3 * 400 / 6  # together no faster than memory
    assert stream([replace(one, bytes=0)] * 3, 3, 6) == 110
    assert stream([one, Block(5, 0, 0)], 1, 1000) == 115  # a program without tiles


def test_what_one_stream_leaves_others_take():
    """400 bytes at 3 of 6 a cycle, and then 400 more at the 4 that one program can read."""
    assert stream([Block(0, 100, 400), Block(0, 200, 800)], 2, 6) == pytest.approx(400 / 3 + 100)


def test_more_memory_is_never_slower():
    blocks = [Block(10, 100 + i, 400 + 3 * i) for i in range(50)]
    times = [stream(blocks, 12, cap) for cap in (5, 10, 20, 40, 80)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("lengths", [LENGTHS, (32_768,) * 8, (8192,)])
@pytest.mark.parametrize("queries", [1, 4, 16])
def test_programs_read_every_tile_once(lengths, queries):
    step = Step(queries, lengths)
    chosen = divided(step)
    programs = [*blocks_of(step, chosen)]
    assert sum(map(sum, programs)) == sum(-(-n // chosen.target.block_k) for n in lengths)
    assert len(programs) == chosen.grid(step.geometry)[chosen.balanced]
    assert all(map(sum, programs[: -len(lengths)]))  # those without tiles start last


def test_a_long_sequence_is_read_by_many_programs():
    """No program reads more than the mean of the sequences."""
    step = Step(1, LENGTHS)
    longest = max(map(sum, blocks_of(step, divided(step))))
    assert longest <= -(-sum(LENGTHS) // 64 // 32)


def test_bytes_of_a_step():
    assert Step(1, (1000,)).bytes == 1000 * KEY_HEADS * 2 * 256
    assert Step(1, (1000,), "int8", 16).bytes == 1000 * KEY_HEADS * 2 * 132 + 63 * 4
    assert H100.hbm == pytest.approx(3.015e12)
