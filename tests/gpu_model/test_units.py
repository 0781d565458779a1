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
    assert units.counted(kernel, loop) == {"MUFU": 16 * 8, "issue": 24.0, "FMA": 2 + 1, "ALU": 2 + 2}


def test_loops_without_exponentials_are_no_tiles():
    (kernel,) = sass.parse(listing(LOOP.format(exponentials="      MUFU.EX2 R4, R4\n" * 2)))
    assert units.with_exponentials(kernel) == []
