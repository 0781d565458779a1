"""Run by test_planner_triton.py without TRITON_INTERPRET: Triton compiles the planners, for machines not here."""

import pytest
import triton
from support import masks
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from frisket.dsl.ir import lit, lookup, segment
from frisket.dsl.sugar import eq, k, q
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.planner import planner as flat
from frisket.lowering.planner import triton as text
from frisket.runtime.machine.modules import load_from_file

WRITTEN = masks.written()
DOC = frozenset({"doc"})
PLANNERS = {
    "documents": (WRITTEN["documents"], frozenset()),
    "sorted documents": (WRITTEN["documents"], DOC),
    "first document": (WRITTEN["first-document"], DOC),  # a table searched for a number that is no tensor
    "window by table": ((q >= k) & (q - k < lookup("w", (masks.h,))), frozenset()),
    "by batch": (WRITTEN["batch-documents"], frozenset()),
    "segments": (WRITTEN["segments"], frozenset()),
    "segment of a number": (eq(segment("off", lit(40)), segment("off", k)), frozenset()),
    "tiles": (WRITTEN["tile-map"], frozenset()),
    "tokens": (WRITTEN["global-tokens"], frozenset()),
    "reals": (WRITTEN["bias"], frozenset()),
    "scalars": (eq(lookup("doc", (q,)), lookup("doc", (k,))) & (q - k < masks.w), DOC),
}
POINTERS = {INT: "*i64", FLOAT: "*fp32", BOOL: "*i8"}
MACHINES = {
    "sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}  # fmt: skip


def compiled(kernel, types, constants, arch, warps=1):
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {n: types.get(n, "i32") for n in kernel.arg_names}, constants)
    return triton.compile(source, target=MACHINES[arch], options={"num_warps": warps, "enable_fp_fusion": False})


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(n, a, marks=[] if a == "sm_90" or n == "documents" else pytest.mark.slow)
        for n in PLANNERS
        for a in MACHINES
    ],
)
def test_triton_planner_kernels_compile_for_each_architecture(name, arch):
    made = text.emit(flat.planner(*PLANNERS[name]))
    assert "barrier" not in made.text  # on AMD it waits for no store: what others read is left to another launch
    module = load_from_file(made.text)
    types = dict.fromkeys(("Bounds", "Count", "Work", "Order"), "*i32") | {"Left": "*i1", "Place": "*i64"}
    types |= {t.name: POINTERS[t.type] for t in made.entries}
    types |= {p: POINTERS[r.type] for r in made.ranges for p in (r.least, r.most)}
    pieces = made.pieces or 64
    compiled(module.plan_spans, types, {"ROWS": max(1, 32 // pieces), "PIECES": pieces}, arch)
    if name == "documents":
        compiled(module.longest_first, types, {"BLOCK": 64}, arch, 4)
    for r in made.ranges[: arch == "sm_90"]:
        ours = {"Table": POINTERS[r.type], "Source": POINTERS[r.type]}
        ours |= dict.fromkeys(("Least", "Most", "Target"), POINTERS[r.type])
        if len(r.axes) == 1:
            for grain in (1, 32):
                compiled(module.lines, dict(ours), {"GRAIN_": grain, "BLOCKS": 32}, arch, 4)
            compiled(module.windows, dict(ours), {"BLOCK": 64}, arch, 4)
        else:
            compiled(module.halves, dict(ours), {"BLOCK": 32, "MOST": True}, arch, 4)
