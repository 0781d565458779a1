"""Run by test_gluon_compiled.py without TRITON_INTERPRET: what the Gluon kernels take of Hopper and Blackwell,
compared with benchmarks/results/compiled/gluon-<architecture>-triton-<version>.txt. `--update-results` writes the lines
of the tests that run."""

import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import triton

import frisket as fk
from frisket.dsl.errors import BackendError
from frisket.dsl.ir import var
from frisket.dsl.sugar import k, q
from frisket.lowering.kernels.gluon.forward import emit, groups_of
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, Geometry, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.gluon.torch import compile_reports, compiled_for, stages
from frisket.runtime.machine.modules import load_from_file as load

RESULTS = Path(__file__).parents[5] / "benchmarks" / "results" / "compiled"
VERSION = ".".join(triton.__version__.split(".")[:2])
LENGTH, HEADS = 8192, 8
MASKS = {
    "full": (None, None), "causal": ("causal", None), "window": ("causal & window(128)", None),
    "documents": ("causal & same(doc)", None), "softcap": ("causal", "softcap(50)"),
    "alibi": ("causal", "alibi"), "bias": ("causal", "score + bias[h, q - k]"),
}  # fmt: skip
TABLES = {"documents": {"doc": np.arange(LENGTH) // 700}, "bias": {"bias": np.zeros((HEADS, LENGTH), np.float32)}}
ALL = list(product((64, 128, 256), (*MASKS, "dropout")))
FEW = [(128, "causal"), (64, "documents"), (256, "alibi")]
ARCHITECTURES = ("sm_90", "sm_100")
SPILLED = {("3.9", "sm_90", 128, "alibi"): 8}  # bytes: one number of a thread, which no loop over tiles loads


def made(dim, name, arch="sm_90"):
    """(text, plan, target) of a kernel, as training calls it."""
    if name == "dropout":
        plan = make_plan(
            ProgramExprs(q >= k),
            facts=ProgramFacts(bounds=Bounds(var("k0"), var("k0"), var("q0"), var("q1"))),
            keep_mask=survives(),
        )
        groups, rows = groups_of(arch, dim, dim)
        block = groups * rows, 64 if dim <= 128 else 32
        chosen = Target("gluon", *block, 4, stages(Geometry(1, 1, 1, 1, 1, dim, dim, 1), *block), arch=arch)
        return emit(plan, chosen, Dims(dim, dim, "bfloat16")), plan, chosen
    mask, mod = MASKS[name]
    shown = fk.compile(mask, mod, **TABLES.get(name, {})).stages(
        backend="gluon", arch=arch, q_len=LENGTH, kv_len=LENGTH, heads=HEADS, kv_heads=HEADS, head_dim=dim,
        dtype="bfloat16",
    )  # fmt: skip
    return shown.source, shown.plan, shown.target


def known(table):
    text = table.read_text() if table.exists() else ""
    return {line[:17]: line for line in text.splitlines()}


def check(dim, name, arch, update):
    table = RESULTS / f"gluon-{arch}-triton-{VERSION}.txt"
    (found,) = compile_reports(*made(dim, name, arch), Dims(dim, dim, "bfloat16"), arch)
    place = f"D {dim:<3} {name:<9}  "
    line = (
        f"{place}{found.block_q:>3} x {found.block_k:<3} {found.warps} warps {found.stages} stages "
        f"{found.registers:>3} registers {found.spills:>3} spilled {found.shared:>6} shared {found.mma:>3} mma"
    )
    assert found.fits, line
    assert found.spills == SPILLED.get((VERSION, arch, dim, name), 0), line
    assert found.mma > 0, line
    if update:
        lines = known(table) | {place: line}
        order = [f"D {d:<3} {n:<9}  " for d, n in ALL]
        table.write_text("".join(lines[p] + "\n" for p in order if p in lines))
    else:
        assert line == known(table).get(place, line), "if it should change, run pytest -m '' -n 0 --update-results here"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dim", "name"), FEW)
def test_selected_gluon_kernels_match_their_compiled_figures(dim, name, arch, request):
    check(dim, name, arch, request.config.getoption("--update-results"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dim", "name"), [x for x in ALL if x not in FEW])
def test_remaining_gluon_kernels_match_their_compiled_figures(dim, name, arch, request):
    check(dim, name, arch, request.config.getoption("--update-results"))


def test_warps_of_a_group_meet_before_they_arrive_on_blackwell():
    """Weights are in tensor memory before the barrier that tells of them."""
    source, plan, chosen = made(128, "causal", "sm_100")
    compiled = compiled_for(load(source).attention_forward, plan, chosen, Dims(128, 128, "bfloat16"))
    assert compiled.metadata.tmem_size == 512
    lines = sass(compiled.asm["cubin"])
    assert sum("UTCBAR" in x for x in lines) >= 3  # of free values, free keys, and scores or sums
    stored = False  # by this warp alone
    for x in lines:
        stored |= "STTM" in x
        if "BAR.SYNC" in x:
            stored = False
        assert not (stored and "SYNCS.ARRIVE" in x), "an arrival by a warp that waited for its own weights alone"


def test_exponentials_that_are_a_polynomial_on_blackwell():
    """The exponentials of 10 in 32 columns of a full tile, and of 4 in a border tile, take no MUFU.

    One instruction computes two columns. If each computed one, issue would take longer than MUFU for all columns."""
    source, plan, chosen = made(128, "causal", "sm_100")
    lines = sass(compiled_for(load(source).attention_forward, plan, chosen, Dims(128, 128, "bfloat16")).asm["cubin"])
    border, full, of_a_row, groups = 128 - 16, 128 - 40, 1, 2
    assert sum("MUFU.EX2" in x for x in lines) == groups * (border + full + 2 * of_a_row)
    pairs, degree = 8 + 20, 5
    assert sum("FFMA2" in x or "FADD2" in x for x in lines) >= groups * pairs * (degree + 3)
    assert sum("FMUL2" in x for x in lines) >= groups * pairs


def sass(cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", shown, re.M)


def test_warps_of_a_group_meet_before_they_arrive():
    """The interpreter of tests/support/gluon takes a warp group for one: here is why it may."""
    source, plan, chosen = made(128, "causal")
    lines = sass(compiled_for(load(source).attention_forward, plan, chosen, Dims(128, 128, "bfloat16")).asm["cubin"])
    assert sum("UTMALDG.4D" in x for x in lines) >= 4  # both halves of the queries, keys, values
    assert any("USETMAXREG.DEALLOC" in x for x in lines)
    waited = False  # for products, by this warp alone
    for x in lines:
        waited |= "WARPGROUP.DEPBAR" in x
        if "BAR.SYNC" in x:
            waited = False
        assert not (waited and "SYNCS.ARRIVE" in x), "an arrival by a warp that waited for its own products alone"


def test_products_run_beside_the_softmax():
    """In the loop over full tiles both products begin before either is waited for."""
    source, plan, chosen = made(128, "causal")
    lines = sass(compiled_for(load(source).attention_forward, plan, chosen, Dims(128, 128, "bfloat16")).asm["cubin"])
    marks = [m[0] for x in lines if (m := re.search(r"HGMMA|DEPBAR\.LE gsb0, 0x\d|MUFU\.EX2", x))]
    shown = re.sub(r"(HGMMA |MUFU.EX2 )\1+", r"\1", " ".join(marks) + " ")
    assert shown.count("HGMMA DEPBAR.LE gsb0, 0x1 MUFU.EX2 DEPBAR.LE gsb0, 0x0") >= 4  # two loops of two warp groups


def test_gluon_compilation_refuses_other_architectures():
    source, plan, chosen = made(64, "causal")
    with pytest.raises(BackendError, match="the text is written for sm_90, not sm_80"):
        next(compile_reports(source, plan, chosen, Dims(64, 64, "bfloat16"), "sm_80"))
    with pytest.raises(BackendError, match="are written for sm_90 and sm_100, not sm_80"):
        made(64, "causal", "sm_80")
