"""Cycles of a Blackwell SM's units, counted in a loop whose instructions are known."""

from gpu_sim import sass, units
from support.sass import listing

LOOP = """
      MOV R1, R2
.L_x_0:
      LDTM.x64 R4, tmem[UR8]
{exponentials}
      FFMA2 R4, R4, R6, R8
      FFMA R4, R4, R6, -R8
      FMNMX3 R3, R4, R5, R6, !PT
      F2FP.BF16.F32.PACK_AB R4, R5, R4
      @!PT LDS RZ, [RZ]
      @!P1 BRA `(.L_x_1)
      FMUL R4, R3, R4
      STTM.x64 tmem[UR8+0x100], R4
.L_x_1:
      @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR32+0x30420], RZ
      @P2 BRA `(.L_x_0)
      EXIT
"""


def test_counts_of_a_known_loop():
    (kernel,) = sass.parse(listing(LOOP.format(exponentials="      MUFU.EX2 R4, R4\n" * 16)))
    (loop,) = units.with_exponentials(kernel)
    # without the load that never runs, and without the branch that stores to tensor memory
    assert units.counted(units.often(kernel, loop)) == {"MUFU": 16 * 8, "issue": 24.0, "FMA": 2 + 1, "ALU": 2 + 2}


def test_loops_without_exponentials_are_no_tiles():
    (kernel,) = sass.parse(listing(LOOP.format(exponentials="      MUFU.EX2 R4, R4\n" * 2)))
    assert units.with_exponentials(kernel) == []


PIECES = """
.L_x_0:
      LDTM.x64 R4, tmem[UR8]
{first}
      STTM.x32 tmem[UR8], R4
      @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR32+0x30420], RZ
{second}
      STTM.x32 tmem[UR8+0x20], R4
      @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR32+0x30428], RZ
      FMUL R4, R3, R4
      @P2 BRA `(.L_x_0)
      EXIT
"""


def test_parts_of_a_softmax_end_where_weights_are_told_of():
    first, second = ("      MUFU.EX2 R4, R4\n" * n for n in (12, 4))
    (kernel,) = sass.parse(listing(PIECES.format(first=first, second=second)))
    (loop,) = units.with_exponentials(kernel)
    assert [part["MUFU"] for part in units.pieces(kernel, loop)] == [12 * 8, 4 * 8, 0]
    assert [part["MUFU"] for part in units.pieces(kernel, loop, 4)] == [12 * 4, 4 * 4, 0]


def test_time_of_a_tile_in_turns():
    """One group: scores, a softmax, and the product with values, of which half runs during the second exponentials.
    Two groups: each computes during the products of the other."""
    product, softmax = 512, [100.0, 60.0, 20.0]
    assert units.in_turns(product, 1, [160.0, 20.0], False) == 2 * product + 160
    assert units.in_turns(product, 1, softmax, False) == 2 * product + 100
    assert units.in_turns(product, 1, softmax, True) == 2 * product
    assert units.in_turns(product, 2, softmax, False) == 4 * product
    assert units.in_turns(20, 2, softmax, False) == 2 * sum(softmax)
