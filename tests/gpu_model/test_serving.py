"""Steps of serving in the model: streams with known answers, and the tiles of programs."""

import math
from dataclasses import replace

import pytest
from gpu_sim.machine import H100
from gpu_sim.serving import GROUP, KEY_HEADS, Block, Program, Step, divided, fetched, programs_of, stream

LENGTHS = (131_072, *[1024] * 31)


def test_memory_streams_take_the_known_cycles():
    one = Block(10, 100, 400)  # 4 bytes a cycle where nobody else reads
    assert stream([one], 1, 1000) == 110
    assert stream([one] * 3, 1, 1000) == 330  # one after another
    assert stream([one] * 3, 3, 1000) == 110
    assert stream([one] * 3, 3, 6) == 10 + 3 * 400 / 6  # together no faster than memory
    assert stream([replace(one, bytes=0)] * 3, 3, 6) == 110
    assert stream([one, Block(5, 0, 0)], 1, 1000) == 115  # a program without tiles


def test_bandwidth_that_a_stream_leaves_is_taken_by_others():
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
    programs = programs_of(step, chosen)
    tiles = [x.tiles for x in programs]
    assert sum(tiles) == sum(-(-n // chosen.target.block_k) for n in lengths) * KEY_HEADS
    assert len(programs) == math.prod(chosen.grid(step.geometry)[: 2 if chosen.balanced else 3])
    assert all(tiles[: -len(lengths) * KEY_HEADS])  # those without tiles start last
    assert fetched(programs, 264, 1000) == sum(tiles)


def test_a_long_sequence_is_read_by_many_programs():
    """No program reads more than an eighth beyond the mean of the sequences."""
    share = -(-sum(LENGTHS) // 64 // 32)
    step = Step(1, LENGTHS)
    longest = max(x.tiles for x in programs_of(step, divided(step)))
    assert longest <= share + share // 8


@pytest.mark.parametrize("queries", [64, 130, 512])
@pytest.mark.parametrize("lengths", [(8192,), (8192, 3000)])
def test_programs_of_a_prompt_cover_what_its_rows_see(queries, lengths):
    """Whatever divides rows of tiles, each key head's programs read what its tiles of queries see."""
    step = Step(queries, lengths)
    chosen = divided(step)
    for one in (chosen, divided(step, whole=True)):
        rows = -(-queries // one.queries)
        wanted = sum(
            -(-(n - queries + min(queries, (i + 1) * one.queries)) // one.target.block_k)
            for n in lengths for i in range(rows)
        )  # fmt: skip
        programs = programs_of(step, one)
        assert sum(x.tiles for x in programs) == wanted * KEY_HEADS * GROUP // one.pack
        assert fetched(programs, 264, 1 << 30) <= sum(-(-n // one.target.block_k) + rows for n in lengths) * KEY_HEADS


def test_tiles_that_many_programs_read():
    """Side by side programs find in L2 what one of them brings, one after another only what it has room for."""
    programs = [Program(0, 0, range(0), range(100))] * 4
    assert fetched(programs, 4, 10) == 100
    assert [fetched(programs, 1, room) for room in (10, 1000)] == [400, 100]
    assert fetched([*programs, Program(1, 0, range(0), range(100))], 1, 1000) == 200
    assert fetched([Program(0, 0, range(i, i + 1), range(50 * i, 50 * i + 50)) for i in range(3)], 1, 10) == 153


def test_bytes_of_a_step():
    assert Step(1, (1000,)).bytes == 1000 * KEY_HEADS * 2 * 256
    assert Step(1, (1000,), "int8", 16).bytes == 1000 * KEY_HEADS * 2 * 132 + 63 * 4
    assert H100.hbm == pytest.approx(3.015e12)
