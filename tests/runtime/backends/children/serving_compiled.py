"""Run by test_triton_binding.py without an interpreter: the bytes that one tile of keys costs in the loops of decode
kernels, counted by the tensors that Triton's optimised IR loads there, with the tiles that an H200 takes."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.architectures import GPUS
from frisket.lowering.dtypes import Operand
from frisket.lowering.kernels.triton import forward
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.plan import Geometry, Pages, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton.grids import shares
from frisket.runtime.backends.triton.kernels import compiled_for, resources
from frisket.runtime.backends.triton.tiles import MEDIUM, ProgramTraits, default_target
from frisket.runtime.machine.modules import load_from_file

GROUP, KEY_HEADS, DIM, LENGTH, PROCESSORS = 8, 8, 128, 32_768, 132
ALLOWED = 1.05
BYTES = {"i8": 1, "f8E4M3FN": 1, "i16": 2, "bf16": 2, "i32": 4, "f32": 4}
STORES = [(kv, page) for kv in ("", "int8", "float8_e4m3fn") for page in (0, 16, 128)]


def plan_of(kv, page):
    """Causal attention behind what every sequence has of its own, as caches ask for it."""
    mask = (k <= q + lookup("start", (b,))) & (k < lookup("end", (b,)))
    places = (lookup("pages", (b, k // page)), h // GROUP, k % page) if page else (b, h // GROUP, k)
    key, value = (lookup(n, places, FLOAT) for n in ("k_scale", "v_scale"))
    pages = Pages("pages", page) if page else None
    return make_plan(
        ProgramExprs(mask, score * key if kv else None), value_scale=value if kv else None, pages=pages, unwritten=True
    )


def loops(text):
    """The bytes of the tensors that every innermost loop of a module loads in a repetition, its dots' loops alone."""
    found, open_ = [], []
    for line in text.splitlines():
        if "scf.for" in line:
            open_.append((len(line) - len(line.lstrip()), [], []))
        elif open_ and re.match(r" *}", line) and len(line) - len(line.lstrip()) == open_[-1][0]:
            _, loaded, dots = open_.pop()
            found += [sum(loaded)] * bool(dots)
        elif open_ and "tt.dot" in line:
            open_[-1][2].append(line)
        elif open_ and "tt.load" in line:
            tensor = re.search(r": tensor<([0-9x]+)x!tt\.ptr<(\w+)>", line)
            if tensor:
                open_[-1][1].append(math.prod(map(int, tensor[1].split("x"))) * BYTES[tensor[2]])
    assert not open_
    return found


@pytest.mark.parametrize(
    ("queries", "kv", "page"), [(n, *x) for n in (1, 4, 16) for x in STORES[:: 1 if n == 1 else 2]]
)
def test_a_tile_loads_its_keys_and_values_once(queries, kv, page):
    plan, dims = plan_of(kv, page), Dims(DIM, DIM, "bfloat16", GROUP, kv)
    g = Geometry(1, GROUP * KEY_HEADS, KEY_HEADS, queries, LENGTH, DIM, DIM, DIM**-0.5, k=Operand(kv), v=Operand(kv))
    traits = ProgramTraits(keys=MEDIUM, stored=bool(kv or page), paged=bool(page))
    tile = default_target(g, "bfloat16", traits, arch="sm_90")
    few = shares(plan, None, g, tile, dims, PROCESSORS)
    assert few.pack == GROUP
    assert few.queries >= queries  # one tile of queries: keys are read once
    own = replace(few.target, splits=0)
    kernel = vars(load_from_file(forward.emit_decode(plan, own, dims)))["attention_decode"]
    found = loops(compiled_for("sm_90", kernel, plan, own, dims).asm["ttir"])
    need = own.block_k * 2 * (DIM * (1 if kv else 2) + 4 * bool(kv))
    assert len(found) == 2  # border tiles and full ones
    assert all(need <= x <= ALLOWED * need for x in found), (found, need)


@pytest.mark.parametrize(("heads", "queries", "length", "rows"), [
    (16, 1, 8192, 16), (128, 1, 8192, 64), (16, 4, 131_072, 64), (128, 4, 131_072, 64),
])  # fmt: skip
@pytest.mark.parametrize("page", [0, 64])
def test_a_tile_loads_a_latent_once(heads, queries, length, rows, page):
    """Values of multi-head latent attention come with the keys: no spill, and 64 rows take warp groups."""
    dims = Dims(576, 512, "bfloat16", heads, shared_values=True)
    plan, traits = plan_of("", page), ProgramTraits(keys=MEDIUM, stored=page > 0, paged=page > 0, unwritten=True)
    g = Geometry(8, heads, 1, queries, length, 576, 512, 576**-0.5)
    few = shares(plan, None, g, default_target(g, "bfloat16", traits, arch="sm_90"), dims, PROCESSORS)
    assert (few.target.block_q, few.balanced) == (rows, rows == 16 or length > 8192)
    own = replace(few.target, splits=0)
    text = forward.emit_decode(plan, own, dims, packs=few.pack > 1, balanced=few.balanced)
    compiled = compiled_for("sm_90", vars(load_from_file(text))["attention_decode"], plan, own, dims)
    assert loops(compiled.asm["ttir"]) == [own.block_k * 576 * 2] * 2
    assert resources(compiled, GPUS["sm_90"].mma)[1] == 0
    assert ("wgmma" in compiled.asm["ptx"]) == (rows == 64)
    assert compiled.metadata.shared <= GPUS["sm_90"].shared
