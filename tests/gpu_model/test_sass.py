"""The text of a disassembler as instructions, loops and counts."""

import pytest
from gpu_sim import sass
from support.sass import listing

LOOP = """
      MOV R1, R2
.L_x_0:
wait=1,write=2 MUFU.EX2 R0, R1
      @!PT LDS RZ, [RZ]
stall=4 FADD R2, R2, R0
      @P0 BRA `(.L_x_2)
read=3 STS [R3], R2
.L_x_2:
      HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
stall=5 @!P1 BRA `(.L_x_0)
      EXIT
"""


def test_sass_control_bits_give_stalls_and_barriers():
    (kernel,) = sass.parse(listing(LOOP))
    one, two = kernel.instructions[1], kernel.instructions[3]
    assert (one.op, one.stall, one.write, one.read, one.wait) == ("MUFU.EX2", 1, 2, 7, 1)
    assert (two.text, two.stall, two.write, two.wait) == ("FADD R2, R2, R0", 4, 7, 0)
    assert kernel.instructions[5].read == 3


def test_loops_and_counts():
    (kernel,) = sass.parse(listing(LOOP))
    assert kernel.loops == kernel.products == (sass.Loop(1, 8),)
    kinds = sass.counted(kernel.body(kernel.loops[0]))
    assert kinds == {"MUFU": 1, "FADD": 1, "branch": 2, "STS": 1, "matrix": 1}  # a load that never runs is none


def test_a_spin_on_a_barrier_is_no_loop():
    text = """
.L_x_0:
      FADD R1, R1, R2
.L_x_1:
      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3
      @!P0 BRA `(.L_x_1)
      HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
      @P1 BRA `(.L_x_0)
.L_x_2:
      BRA `(.L_x_2)
"""
    (kernel,) = sass.parse(listing(text))
    assert kernel.loops == (sass.Loop(0, 5),)


def test_a_wait_that_is_asked_again_behind_the_end_is_no_loop():
    text = """
.L_x_0:
      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3
      @!P0 BRA `(.L_x_2)
.L_x_1:
      HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
      @P1 BRA `(.L_x_0)
      EXIT
.L_x_2:
      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3
      @!P0 BRA `(.L_x_2)
      BRA `(.L_x_1)
"""
    (kernel,) = sass.parse(listing(text))
    assert kernel.loops == (sass.Loop(0, 4),)


def test_inner_loops_only():
    text = ".L_x_0:\n MOV R1, R2\n.L_x_1:\n HMMA.16816.F32 R1, R2, R3, R1\n@P0 BRA `(.L_x_1)\n@P1 BRA `(.L_x_0)\n"
    (kernel,) = sass.parse(listing(text))
    assert kernel.loops == (sass.Loop(1, 3),)


def test_text_without_encodings_is_refused():
    with pytest.raises(ValueError, match="nvdisasm -c -hex"):
        sass.parse("        /*0000*/                   MOV R1, R2 ;")


def test_sass_operations_have_their_kind():
    known = {"HGMMA.64x8x16": "matrix", "LDGSTS.E.128": "LDGSTS", "UTMALDG.2D": "TMA", "UIADD3": "uniform",
             "LDC": "LDG", "LDSM.16.M88.4": "LDSM", "R2P": "logic", "SYNCS.ARRIVE": "barrier", "F2FP.BF16": "convert",
             "STL": "local", "IMAD.MOV.U32": "integer", "UTCHMMA": "matrix"}  # fmt: skip
    assert {op: sass.Instruction(f"{op} R1").kind for op in known} == known
