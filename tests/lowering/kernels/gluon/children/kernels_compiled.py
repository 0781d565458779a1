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
from support.tiers import default_only

import frisket as fk
from frisket.dsl.errors import BackendError
from frisket.dsl.ir import lookup, var
from frisket.dsl.sugar import b, k, q
from frisket.lowering.dtypes import FP8
from frisket.lowering.kernels.gluon.forward import emit, groups_of
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import (
    K_SCALE,
    Q_SCALE,
    V_SCALE,
    Bounds,
    Geometry,
    Pages,
    ProgramFacts,
    make_plan,
    survives,
)
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.attention.attention import Attention
from frisket.runtime.backends.gluon.torch import compile_reports, compiled_for, fused_compiled, stages
from frisket.runtime.calls.arrays import Stored
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
SIZES = {"MLA": (192, 128)}  # of queries and keys, and of values
DIMS = {"sm_90": (64, 128, 160, 192, "MLA", 256), "sm_100": (64, 128, 256), "sm_103": (64, 128, 256)}
ALL = [(dim, name, arch) for arch in DIMS for dim, name in product(DIMS[arch], (*MASKS, "dropout"))]
KEYS = {64: 128, 128: 128, 192: 32, "MLA": 64, 256: 32}  # of a tile, over pages of 16: as `keys_of` has them
ALL += [(dim, "pages", "sm_90") for dim in KEYS]
# queries, keys and values of 8 bits, with a scale for each 128 tokens
EIGHT = {"8 bits": "causal", "8b docs": "documents", "8b cap": "softcap", "8b alibi": "alibi", "8b bias": "bias"}
ALL += [(dim, name, "sm_90") for dim, name in product((64, 128, "MLA", 256), EIGHT)]
FEW = [(*x, arch) for arch in DIMS for x in ((128, "causal"), (64, "documents"), (256, "alibi"))]
FEW += [(192, "causal", "sm_90"), ("MLA", "causal", "sm_90"), (128, "8 bits", "sm_90"), (128, "8b alibi", "sm_90")]
FEW += [(128, "pages", "sm_90")]
SPILLED = {  # bytes: a few numbers of a thread, which no loop over full tiles loads
    ("3.9", "sm_90", 128, "alibi"): 8,
    **{("3.9", "sm_100", 128, name): 8 for name in ("full", "causal")},
    ("3.6", "sm_90", 128, "pages"): 8,
    ("3.6", "sm_90", 256, "pages"): 32,
    ("3.9", "sm_90", 256, "pages"): 32,
}


def dims_of(dim, name=""):
    return Dims(*SIZES.get(dim, (dim, dim)), FP8 if name in EIGHT else "bfloat16")


def made(dim, name, arch="sm_90"):
    """(text, plan, target) of a kernel, as training calls it."""
    dims = dims_of(dim, name)
    if name == "dropout":
        plan = make_plan(
            ProgramExprs(q >= k),
            facts=ProgramFacts(bounds=Bounds(var("k0"), var("k0"), var("q0"), var("q1"))),
            keep_mask=survives(),
        )
        groups, rows = groups_of(arch, dims.head_dim, dims.v_dim)
        block = groups * rows, 64 if dims.v_dim <= 128 else 32
        g = Geometry(1, 1, 1, 1, 1, dims.head_dim, dims.v_dim, 1)
        chosen = Target("gluon", *block, 4, stages(arch, g, *block), arch=arch)
        return emit(plan, chosen, dims), plan, chosen
    if name == "pages":  # sequences with a start and an end each, as in a cache
        seen = (k <= q + lookup("start", (b,))) & (k < lookup("end", (b,)))
        plan, g = (
            make_plan(ProgramExprs(seen), pages=Pages("pages", 16)),
            Geometry(1, 1, 1, 1, 1, dims.head_dim, dims.v_dim, 1),
        )
        chosen = Target("gluon", 128, KEYS[dim], 4, stages(arch, g, 128, KEYS[dim]), arch=arch)
        return emit(plan, chosen, dims), plan, chosen
    mask, mod = MASKS[EIGHT.get(name, name)]
    att = fk.compile(mask, mod, **TABLES.get(EIGHT.get(name, name), {}))
    if name in EIGHT:
        of = ((Q_SCALE, 128), (K_SCALE, 128), (V_SCALE, 0))
        att = Attention(att.program.stored_as(Stored(False, False, 0, "bhsd", 1, (0, 0, 0), of)), att.options)
    shown = att.stages(
        backend="gluon", arch=arch, q_len=LENGTH, kv_len=LENGTH, heads=HEADS, kv_heads=HEADS,
        head_dim=dims.head_dim, v_dim=dims.v_dim, dtype=dims.dtype,
    )  # fmt: skip
    return shown.source, shown.plan, shown.target


def known(table):
    text = table.read_text() if table.exists() else ""
    return {line[:17]: line for line in text.splitlines()}


# bytes that the fused backward spills with Triton 3.9: numbers of a thread, in the loop over full tiles
BACKWARD = {"128, causal, 1": 0, "128, causal, 4": 0, "64, causal, 1": 0, "64, causal, 4": 16}


@pytest.mark.parametrize("which", default_only(list(BACKWARD), "128, causal, 1"))
def test_selected_fused_backward_computes_five_products(which):
    size, name, heads = which.split(", ")
    dim, group, (mask, mod) = int(size), int(heads), MASKS[name]
    shown = fk.compile(mask, mod, backend="gluon").stages(
        arch="sm_90", q_len=LENGTH, kv_len=LENGTH, heads=HEADS, kv_heads=HEADS // group, head_dim=dim, dtype="bfloat16"
    )
    dims = Dims(dim, dim, "bfloat16", group)
    _, found = compile_reports(shown.source, shown.plan, shown.target, dims)
    assert (found.kernel, found.block_k, found.warps, found.stages) == ("attention_backward", 128, 12, 2)
    assert found.fits
    assert found.spills <= BACKWARD[which], found
    # of two groups and two loops: 64 x 128 x 16 and 64 x 64 x 16 products of 64 keys each
    products = {128: 8 + 8 + 4 + 4 + 8, 64: 4 + 4 + 8 + 8 + 8}[dim]
    assert found.mma == 2 * 2 * products
    kernel = load(shown.source).attention_backward
    lines = sass(fused_compiled(kernel, shown.plan, shown.target.fused, dims).asm["cubin"])
    assert sum("UTMAREDG" in x and ".ADD" in x for x in lines) >= 2
    waited = stored = False  # for products, and to shared memory, by this warp alone
    for x in lines:
        waited |= "WARPGROUP.DEPBAR" in x
        stored |= "STSM" in x or "STS." in x
        if "BAR.SYNC" in x:
            waited = stored = False
        assert not ((waited or stored) and "SYNCS.ARRIVE" in x), "an arrival by a warp that waited for itself alone"


def check(dim, name, arch, update):
    table = RESULTS / f"gluon-{arch}-triton-{VERSION}.txt"
    found = next(compile_reports(*made(dim, name, arch), dims_of(dim, name), arch))  # of the forward
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
        order = [f"D {d:<3} {n:<9}  " for d, n, on in ALL if on == arch]
        table.write_text("".join(lines[p] + "\n" for p in order if p in lines))
    else:
        assert line == known(table).get(place, line), "if it should change, run pytest -m '' -n 0 --update-results here"


@pytest.mark.parametrize(("dim", "name", "arch"), FEW)
def test_selected_gluon_kernels_match_their_compiled_figures(dim, name, arch, request):
    check(dim, name, arch, request.config.getoption("--update-results"))


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "name", "arch"), [x for x in ALL if x not in FEW])
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


def test_blackwell_tells_of_weights_before_the_last_exponential():
    """In each loop a group stores half of a tile's weights and arrives, and then computes the other exponentials."""
    source, plan, chosen = made(128, "causal", "sm_100")
    lines = sass(compiled_for(load(source).attention_forward, plan, chosen, Dims(128, 128, "bfloat16")).asm["cubin"])
    marks = [m[0] for x in lines if (m := re.search(r"MUFU\.EX2|STTM\.x32|SYNCS\.ARRIVE|UTCHMMA", x))]
    pieces = re.findall(
        r"((?:MUFU.EX2 )+)STTM.x32 (?:MUFU.EX2 )*SYNCS.ARRIVE ((?:MUFU.EX2 )+)STTM.x32", " ".join(marks)
    )
    assert len(pieces) == 2 * 2  # loops and groups
    assert all(min(x.count("MUFU"), y.count("MUFU")) >= 20 for x, y in pieces)
    assert marks.count("UTCHMMA") == 16


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


def test_warps_of_a_group_meet_before_they_tell_what_they_wrote():
    """Bits of keys, and values set to 0, are in shared memory and fenced before the barrier that tells of them."""
    source, plan, chosen = made(128, "pages")
    lines = sass(compiled_for(load(source).attention_forward, plan, chosen, dims_of(128)).asm["cubin"])
    assert sum("FENCE.VIEW.ASYNC" in x for x in lines) >= 2 * 3  # of each half: the first tile, border tiles, results
    wrote = False  # by this warp alone
    for x in lines:
        wrote |= "STS" in x or "FENCE.VIEW.ASYNC" in x
        if "BAR.SYNC" in x:
            wrote = False
        assert not (wrote and "SYNCS.ARRIVE" in x), "an arrival by a warp that waited for its own writes alone"


@pytest.mark.parametrize(("dim", "values"), [(128, 1), (192, 2), ("MLA", 1)])
def test_products_run_beside_the_softmax(dim, values):
    """In the loop over full tiles the product with keys and those with the parts of values begin before any is waited
    for."""
    source, plan, chosen = made(dim, "causal")
    lines = sass(compiled_for(load(source).attention_forward, plan, chosen, dims_of(dim)).asm["cubin"])
    marks = [m[0] for x in lines if (m := re.search(r"HGMMA|DEPBAR\.LE gsb0, 0x\d|MUFU\.EX2", x))]
    shown = re.sub(r"(HGMMA |MUFU.EX2 )\1+", r"\1", " ".join(marks) + " ")
    beside = f"HGMMA DEPBAR.LE gsb0, 0x{values} MUFU.EX2 DEPBAR.LE gsb0, 0x0"
    assert shown.count(beside) >= 4  # two loops of two warp groups


def test_gluon_compilation_refuses_other_architectures():
    source, plan, chosen = made(64, "causal")
    with pytest.raises(BackendError, match="the text is written for sm_90, not sm_80"):
        next(compile_reports(source, plan, chosen, Dims(64, 64, "bfloat16"), "sm_80"))
    with pytest.raises(BackendError, match="are written for sm_90, sm_100 and sm_103, not sm_80"):
        made(64, "causal", "sm_80")
