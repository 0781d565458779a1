"""The Pallas TPU forward kernel on keys and values of 8 bits, with scales, in pages of a pool."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from support import attention_cases as cases
from support import stored_cases
from support.stored_cases import STORED, Stored, decode
from support.tiers import default_only

from frisket.dsl.errors import LoweringError
from frisket.lowering.kernels.pallas_tpu import forward as pallas_tpu
from frisket.lowering.kernels.pallas_tpu.kernel import fits
from frisket.lowering.plan import Geometry, Pages, Target, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.pallas_tpu import jax as runtime

TARGET = Target("pallas-tpu", 128, 128)
PAGED = {
    "one page a tile": Stored(decode((256, 70), 2, kv_len=384), "int8", page=128),
    "tiles of a page": Stored(decode((256, 470, 0), 2, kv_len=512), "int8", page=256),
    "many queries": Stored(decode((256, 140), 130, kv_len=256, heads=2, kv_heads=1), "float8_e4m3fn", page=64),
}
ALL = {n: s for n, s in STORED.items() if n not in ("odd pages", "many queries", "many queries, small pages")} | PAGED


def run(stored, made, **options):
    tables = {n: jax.device_put(x) for n, x in made.plan.table_values(made.tables).items()}
    case = stored.case.but(block=(128, 128))
    inputs = cases.kernel_inputs(case, TARGET, made.plan, slots={}, tables=tables, **options)
    return runtime.forward(inputs, *map(jax.device_put, (made.q, made.k, made.v)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", default_only(ALL, "small pages", "no end"))
def test_pallas_tpu_reads_each_storage_format(name):
    stored = ALL[name]
    made = stored_cases.problem(stored, "bshd")
    out, lse, _ = run(stored, made)
    assert out.dtype == stored.case.dtype
    stored_cases.check(stored, made, out.transpose(0, 2, 1, 3), lse)


@pytest.mark.exhaustive
def test_pallas_tpu_stored_keys_are_read_inside_the_pool(monkeypatch):
    """Behind the edges of blocks lies NaN, as in test_pallas_tpu.py."""
    stored = ALL["small pages"]
    made = stored_cases.problem(stored, "bshd")
    careful = pltpu.InterpretParams(out_of_bounds_reads="raise", uninitialized_memory="nan")
    kernel = runtime.kernel

    def carefully(*args):
        run = kernel(*args)
        return lambda *arrays, interpret: run(*arrays, interpret=careful)

    monkeypatch.setattr(runtime, "kernel", carefully)
    try:
        out, lse, _ = run(stored, made)
        stored_cases.check(stored, made, out.transpose(0, 2, 1, 3), lse)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("name", ["small pages", "float8"])
def test_pallas_tpu_stored_keys_lower_for_a_tpu(name):
    stored = ALL[name]
    made = stored_cases.problem(stored, "bshd")

    def call(q, k, v, tables):
        return run(stored, replace(made, q=q, k=k, v=v, tables=tables), platform="tpu")

    text = export.export(jax.jit(call), platforms=["tpu"])(made.q, made.k, made.v, made.tables).mlir_module()
    assert "tpu_custom_call" in text


@pytest.mark.parametrize(("page", "tile"), [(16, 128), (32, 256), (64, 512), (128, 512), (256, 512), (384, 384)])
def test_tiles_that_fit_pages(page, tile):
    plan = make_plan(ProgramExprs(), pages=Pages("pages", page))
    assert runtime.target(plan, Geometry(1, 1, 1, 1, 2304, 64, 64, 1.0), "bfloat16").block_k == tile
    assert fits(page, tile)


def test_pallas_tpu_refuses_storage_that_a_tpu_lacks():
    pages = {n: make_plan(ProgramExprs(), pages=Pages("pages", n)) for n in (16, 144)}
    g, few = Geometry(1, 1, 1, 1, 288, 64, 64, 1.0), {"t0": (4, 8)}
    assert runtime.refuses(pages[16], g, "bfloat16", few) == ""
    assert runtime.refuses(pages[144], g, "bfloat16", few) == (
        "a TPU kernel takes 128 keys or a multiple at a time, in at most 8 pages, and none of them is whole pages of "
        '144 tokens. Use a page of 16, 32, 64, or a multiple of 128, or backend="xla"'
    )
    assert runtime.refuses(pages[16], g, "float16", few) == (
        "TPUs have no float16, and a pool of pages would be converted whole at every call; "
        'use bfloat16 or float32, or backend="xla"'
    )
    assert runtime.refuses(pages[16], g, "bfloat16", {"t0": (64, 2048)}) == (
        "a table of 131072 pages takes 512 KiB of a TPU's scalar memory, at most 256; "
        'use larger pages, fewer sequences in a call, or backend="xla"'
    )
    with pytest.raises(LoweringError) as caught:
        pallas_tpu.emit(pages[16], Target("pallas-tpu", 128, 256), g, "float32")
    assert str(caught.value) == (
        "a tile of 256 keys is no whole number of pages of 16 tokens up to 8, nor a page of tiles; "
        "pass tile=(128, 128), or none"
    )


def test_golden_pallas_tpu_forward_of_stored_keys(golden):
    made = stored_cases.problem(STORED["small pages"], "bshd")
    geometry, options = Geometry(2, 4, 2, 3, 160, 32, 32, 0.25), pallas_tpu.ForwardOptions(kv_8bit=True)
    golden("stored.py", pallas_tpu.emit(made.plan, TARGET, geometry, "bfloat16", options))


def test_pallas_tpu_never_converts_the_whole_pool():
    """The only arrays of the pool's size have its dtype."""
    stored = PAGED["one page a tile"]
    made = stored_cases.problem(stored, "bshd")
    text = str(jax.make_jaxpr(lambda k, v: run(stored, replace(made, k=k, v=v)))(made.k, made.v))
    pool = ",".join(str(n) for n in np.swapaxes(made.k, 1, 2).shape)
    assert f"i8[{pool}]" in text
    assert f"f32[{pool}]" not in text
