"""Run by test_triton_table.py without TRITON_INTERPRET: what the default tiles take of every architecture,
compared with benchmarks/results/compiled/triton-<version>.txt. Each version of Triton has its table, since compilers
allot registers differently; of kernels that it lacks only the limits are checked. `--update-results` writes the lines
of the tests that run."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import triton
from lowering.kernels.triton.spills import CAUSAL, TABULATED, listed

import frisket as fk
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.architectures import GPUS
from frisket.lowering.dtypes import Operand
from frisket.lowering.kernels.triton import forward as triton_forward
from frisket.lowering.kernels.triton.forward import emit_decode
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.plan import Geometry, Pages, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import grids as triton_grids
from frisket.runtime.backends.triton.kernels import compile_reports
from frisket.runtime.backends.triton.tiles import MEDIUM, ProgramTraits, default_target

RESULTS = Path(__file__).parents[5] / "benchmarks" / "results" / "compiled"
TABLE = RESULTS / f"triton-{'.'.join(triton.__version__.split('.')[:2])}.txt"
LENGTH, HEADS = 8192, 8
KINDS = {"whole": (LENGTH, HEADS), "decode": (1, 1)}  # queries, key heads: forward and backward, and a step of decoding
MASKS = {  # the three classes of windows, spans from a table, and a score mod
    "causal": ("causal", None),
    "window": ("causal & window(128)", None),
    "documents": ("causal & same(doc)", None),
    "softcap": ("causal", "softcap(50)"),
}
SPILLED = listed()
DIMS = (64, 128, 256)
ALL = [*product(TABULATED, DIMS, (*MASKS, "stored"), KINDS), *product(CAUSAL, DIMS, ("causal",), KINDS)]
FEW = [
    ("sm_90", 64, "documents", "whole"), ("sm_90", 128, "softcap", "whole"), ("sm_90", 128, "window", "whole"),
    ("sm_90", 128, "causal", "decode"), ("sm_80", 64, "causal", "whole"), ("sm_100", 64, "causal", "whole"),
    ("gfx942", 64, "causal", "whole"), ("sm_90", 128, "stored", "decode"), ("gfx942", 128, "stored", "decode"),
]  # fmt: skip


def lines(arch, dim, name, kind):
    """(what begins its line, the line of the table, the report) of every kernel."""
    q_len, kv_heads = KINDS[kind]
    dtype = "bfloat16" if GPUS[arch].bfloat16 else "float16"
    dims = Dims(dim, dim, dtype, HEADS // kv_heads, "int8" if name == "stored" else "")
    if name == "stored":
        made = stored(arch, dims, q_len, kv_heads)
    else:
        mask, mod = MASKS[name]
        doc = {"doc": np.arange(LENGTH) // 700} if name == "documents" else {}
        stages = fk.compile(mask, mod, **doc).stages(
            backend="triton", arch=arch, q_len=q_len, kv_len=LENGTH, heads=HEADS, kv_heads=kv_heads, head_dim=dim,
            dtype=dtype,
        )  # fmt: skip
        made = stages.source, stages.plan, stages.target
    for r in compile_reports(*made, dims, arch):
        kernel = r.kernel.removeprefix("attention_")
        if kernel == "combine" or kernel.endswith("_sums"):  # no products, and the same for all masks
            continue
        place = arch, "D", str(dim), name, kernel
        tile = f"{r.block_q:>3} x {r.block_k:<3} {r.warps} warps {r.stages} stages"
        used = f"{r.registers:>3} registers {r.spills:>4} spilled {r.shared:>6} shared {r.mma:>3} mma"
        yield place, f"{arch:<6} D {dim:<3} {name:<9} {kernel:<7} {tile} {used}", r


def stored(arch, dims, q_len, kv_heads):
    """(source, plan, target) of 8 bits with scales, in pages of 16."""
    places = lookup("pages", (b, k // 16)), h // dims.group, k % 16
    key, value = (lookup(n, places, FLOAT) for n in ("k_scale", "v_scale"))
    mask = (k <= q + lookup("start", (b,))) & (k < lookup("end", (b,)))
    plan = make_plan(ProgramExprs(mask, score * key), value_scale=value, pages=Pages("pages", 16))
    kv = Operand(dims.kv_dtype)
    g = Geometry(1, HEADS, kv_heads, q_len, LENGTH, dims.head_dim, dims.v_dim, 0.1, k=kv, v=kv)
    target = default_target(g, dims.dtype, ProgramTraits(MEDIUM, stored=True, paged=True), arch=arch)
    few = triton_grids.shares(plan, None, g, target, dims, 132) if q_len == 1 else None
    if few is None:
        return triton_forward.emit(plan, target, dims), plan, target
    return emit_decode(plan, few.target, dims), plan, few.target


def known():
    text = TABLE.read_text() if TABLE.exists() else ""
    return {tuple(line.split()[:5]): line for line in text.splitlines()}


def check(arch, dim, name, kind, update):
    table, made = known(), {}
    for place, line, found in lines(arch, dim, name, kind):
        made[place] = line
        assert found.fits, line
        kernel = found.kernel.removeprefix("attention_")
        free = update or place not in table
        assert free or found.spills == SPILLED.get((triton.__version__[:3], arch, dim, name, kernel), 0), line
        assert found.mma > 0 or "delta" in place, line
        if not update:
            assert line == table.get(place, line), "if it should change, run pytest -m '' -n 0 --update-results here"
    if update:
        order = {place: i for i, place in enumerate(ALL)}
        ranked = sorted(
            (known() | made).items(),
            key=lambda x: order[x[0][0], int(x[0][2]), x[0][3], "decode" if "decode" in x[0] else "whole"],
        )
        TABLE.write_text("\n".join(line for _, line in ranked) + "\n")


@pytest.mark.parametrize(("arch", "dim", "name", "kind"), FEW)
def test_selected_triton_tiles_match_their_compiled_figures(arch, dim, name, kind, request):
    check(arch, dim, name, kind, request.config.getoption("--update-results"))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dim", "name", "kind"), [x for x in ALL if x not in FEW])
def test_remaining_triton_tiles_match_their_compiled_figures(arch, dim, name, kind, request):
    check(arch, dim, name, kind, request.config.getoption("--update-results"))


@pytest.mark.parametrize(("arch", "dim"), [
    pytest.param(arch, dim, marks=[] if (arch, dim) == ("sm_90", 512) else pytest.mark.slow)
    for arch in TABULATED for dim in (320, 512, 576)
])  # fmt: skip
def test_larger_heads_fit(arch, dim):
    """Tiles of heads above 256 that do not fit end in an error at the first call. Up to 512 they hardly spill."""
    for kind in KINDS:
        for _, line, found in lines(arch, dim, "causal", kind):
            assert found.fits, line
            assert found.spills <= 64 or dim > 512, line
