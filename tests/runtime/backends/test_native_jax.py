"""JAX's way to native kernels, tested with a kernel that anyone can read."""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from threading import Thread

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_cases as cases
from support.attention_cases import DOC, Case, causal

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.errors import LoweringError, ParameterError
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.grammar import memo
from frisket.lowering import dense
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs, ProgramFacts, Target, make_plan
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.cpp import jax as native_jax
from frisket.runtime.machine import cpp_build as native_build
from runtime.backends import scalar_kernel

TESTS = Path(__file__).parents[2]
rng = np.random.default_rng(11)
CASE = Case(
    causal & (q - k <= ir.param("w")) & cases.same_doc,
    score * ir.param("c", FLOAT) + lookup("bias", (h, k), FLOAT),
    slots={"w": 40, "c": 0.7}, tables={"doc": DOC, "bias": rng.standard_normal((4, 90)).astype(np.float32)},
    q_len=80, kv_len=70, batch=2, heads=4, kv_heads=2, dim=8, v_dim=16, block=(32, 16),
)  # fmt: skip
PLAN = cases.plan(CASE)
SINKS = np.array([0.5, -1.0, 2.0, -np.inf], np.float32)

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())


@pytest.fixture(autouse=True)
def _readable(monkeypatch):
    """The hand-written kernel in place of emitted ones."""
    native_jax.target_name.memo.clear()
    monkeypatch.setattr(native_jax, "KERNELS", {"forward": scalar_kernel.forward, "backward": scalar_kernel.backward})
    yield
    native_jax.target_name.memo.clear()


def parts(case=CASE, made=PLAN, **changes):
    """What an executor is called with, by name."""
    given = {
        "plan": made, "spans": cases.spans(case), "geometry": cases.geometry(case), "slots": cases.slots(case, made),
        "tables": made.table_values(case.tables), "target": Target("cpp", *case.block),
    }  # fmt: skip
    return given | dict(zip("qkv", cases.arrays(case))) | changes


def taken(**given):
    """What an executor takes of `parts`."""
    qkv = [given.pop(n) for n in "qkv"]
    return KernelInputs(**given), *qkv


def forward(**given):
    """(out, lse, top)"""
    return native_jax.forward(*taken(**given))[:3]


def run(case=CASE, made=PLAN, **changes):
    return forward(**parts(case, made, **changes))


def check(case, found, sinks=None, exact=2e-6):
    q_, k_, v_ = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in cases.arrays(case))
    known = {"params": case.slots, "tables": case.tables, "problem": case.problem}
    known["scale"] = case.dim**-0.5
    out, lse = dense.attention(q_, k_, v_, dense.DenseCall(ProgramExprs(case.mask, case.score), sinks=sinks, **known))
    top = dense.top(q_, k_, dense.DenseCall(ProgramExprs(case.mask, case.score), **known))
    np.testing.assert_allclose(found[0], out.transpose(0, 2, 1, 3), atol=exact)
    np.testing.assert_allclose(found[1], lse, atol=exact, rtol=exact)
    np.testing.assert_allclose(found[2], top, atol=exact, rtol=exact)


def test_plan_of_the_handwritten_jax_kernel_is_as_listed():
    assert str(PLAN) == textwrap.dedent(
        """\
        mask     q >= k & q - k <= s0 & t0[q] == t0[k]
        score    score * s1 + t1[h, k]
        bounds   read from the span table
        guard    a row may be empty: -inf is checked
        slot     s0 = w
        slot     s1 = c
        table    t0 = doc
        table    t1 = bias
        table    t2 = run first of doc
        table    t3 = run last of doc
        integers 32 bits"""
    )


# -- forward ----------------------------------------------------------------------------------------


def test_jax_calls_the_native_forward():
    check(CASE, run())


def test_under_jit_with_everything_traced():
    given = parts(sinks=SINKS)
    static = {name: given.pop(name) for name in ("plan", "target", "spans", "geometry")}
    spans, shape = static.pop("spans"), static.pop("geometry")
    sizes = (2, 4, 1100, 1100)
    moved = CASE.but(origin=(1, 0, 1000, 1003), sizes=sizes, tables=CASE.tables | {"doc": np.arange(1100) // 50})
    given["tables"] = PLAN.table_values(moved.tables)
    spans = cases.spans(moved)

    @jax.jit
    def call(origin, runs, given):
        placed = replace(shape, origin=origin, sizes=sizes)
        held = DeviceSpans(*runs, False, spans.slice_of)
        return forward(**static, spans=held, geometry=placed, **given)

    check(moved, call(moved.origin, (spans.bounds, spans.count), given), SINKS)
    static["spans"] = spans
    check(moved, forward(**static | {"geometry": cases.geometry(moved)}, **given), SINKS)


def test_an_origin_for_each_batch_entry():
    case = CASE.but(origin=(0, 0, np.array([30, 13]), np.array([0, 25])), sizes=(2, 4, 200, 200))
    check(case, run(case))


def test_jax_calls_the_native_forward_in_float64():
    with jax.enable_x64(True):
        case = CASE.but(dtype="float64")
        found = run(case, sinks=SINKS)
        assert all(x.dtype == np.float64 for x in found)
        check(case, found, SINKS, exact=1e-13)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("x64", [False, True])
def test_numbers_beyond_32_bits(x64, traced):
    """The kernel has 64 bits though JAX may not: 2^32 apart are two documents."""
    doc = (np.arange(90) // 20 % 2) << 32
    case = CASE.but(slots={"w": 1 << 40, "c": 0.7}, tables={**CASE.tables, "doc": doc})
    made = make_plan(ProgramExprs(case.mask, case.score), facts=ProgramFacts(limits={"doc": 2.0**33, "w": 2.0**41}))
    assert made.int64
    with jax.enable_x64(x64):
        given = parts(case, made)
        if not traced:
            check(case, forward(**given))
        elif x64:
            table = given["tables"].pop("t0")
            run_on = jax.jit(lambda t: forward(**given | {"tables": given["tables"] | {"t0": t}}))
            check(case, run_on(jnp.asarray(table, np.int64)))
            check(case, run_on(jnp.asarray(table, np.uint64)))
        else:  # what is traced has no more than 32 bits: negative numbers keep their sign, unsigned ones have none
            for dtype, low in ((np.int32, -7), (np.uint32, 0xF0000000)):
                doc = np.arange(90) // 20 + low
                given["tables"]["t0"] = jnp.asarray(doc.astype(dtype))
                check(case.but(tables={**case.tables, "doc": doc}), forward(**given))


def test_tables_beyond_32_bits_are_refused_in_32():
    doc = np.arange(90) << 32
    with pytest.raises(ParameterError) as caught:
        run(CASE.but(tables={**CASE.tables, "doc": doc}))
    assert str(caught.value) == (
        "table `doc` holds numbers beyond 32 bits, the kernel has 32-bit integers; renumber it"
    )


def test_tables_that_are_views():
    wide = np.broadcast_to(CASE.tables["bias"][:1], (4, 90))
    flipped = np.ascontiguousarray(DOC[::-1])[::-1]
    case = CASE.but(tables={"doc": flipped, "bias": wide})
    check(case, run(case))


def test_native_jax_calls_with_new_values_do_not_recompile():
    run()
    before = native_jax._compiled.memo.info().misses
    traces = native_jax._compiled.memo.info().entries
    for shift in range(3):
        moved = CASE.but(tables={**CASE.tables, "doc": np.roll(DOC, shift)}, slots={"w": 20 + shift, "c": 0.1 * shift})
        check(moved, run(moved))
    after = native_jax._compiled.memo.info()
    assert (after.misses, after.entries) == (before, traces)


def test_copies_of_read_only_tables_are_cached():
    doc = np.array(DOC)
    case = CASE.but(tables={**CASE.tables, "doc": doc})
    given = parts(case)
    check(case, forward(**given))
    doc[:] = doc[::-1].copy()
    check(case, forward(**given | {"spans": cases.spans(case)}))
    assert not any(key == id(doc) for key, _ in memo._on_objects._entries)
    doc.flags.writeable = False
    for _ in range(2):
        check(case, forward(**given | {"spans": cases.spans(case)}))
        assert sum(key == id(doc) for key, _ in memo._on_objects._entries) == 1
    was = id(doc)
    del doc, case, given
    assert not any(key == was for key, _ in memo._on_objects._entries)


# -- backward ---------------------------------------------------------------------------------------


def wanted_gradients(case, sinks, dout, dlse):
    q_, k_, v_ = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in cases.arrays(case))
    found = dense.gradients(
        q_,
        k_,
        v_,
        dense.DenseCall(
            ProgramExprs(case.mask, case.score),
            scale=case.dim**-0.5,
            params=case.slots,
            tables=case.tables,
            problem=case.problem,
            sinks=sinks,
        ),
        np.asarray(dout).transpose(0, 2, 1, 3),
        dlse,
    )
    turned = {n: found["d" + n].transpose(0, 2, 1, 3) for n in "qkv"}
    return turned | {"t1": found["dtables"]["bias"], "s1": found["dscalars"]["c"]}


ALL = frozenset({"q", "k", "v", "t1", "s1"})


def differentiate(dout, dlse, sinks=None, wanted=ALL, **given):
    given["sinks"] = sinks
    out, lse, _ = forward(**given)
    return native_jax.backward(*taken(**given), ForwardResults(out, lse), Cotangents(dout, dlse), grad_names=wanted)


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("with_lse", [False, True])
def test_jax_calls_the_native_backward(with_lse, sinks):
    dout = rng.standard_normal((2, 80, 4, 16)).astype(np.float32)
    dlse = rng.standard_normal((2, 4, 80)).astype(np.float32) if with_lse else None
    found = jax.jit(lambda dout, dlse: differentiate(dout, dlse, sinks, **parts()))(dout, dlse)
    want = wanted_gradients(CASE, sinks, dout, dlse)
    assert found.keys() == want.keys()
    for name, x in found.items():
        np.testing.assert_allclose(x, want[name], atol=2e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("wanted", [{"k", "s1"}, {"q"}, {"v", "t1"}, {"t1"}])
def test_only_gradients_that_are_wanted(wanted):
    dout = jnp.asarray(np.ones((2, 80, 4, 16), np.float32))
    every = differentiate(dout, None, **parts())
    found = differentiate(dout, None, wanted=frozenset(wanted), **parts())
    assert found.keys() == wanted
    assert_same(found, {name: every[name] for name in wanted})


def test_gradients_to_entries_past_32_bits_are_refused():
    arrays = cases.arrays(CASE)
    att = fk.compile("causal & same(doc)", "score * bias[doc[q]]", backend="cpp", doc=DOC << 40, tile=CASE.block)
    with pytest.raises(LoweringError) as caught:
        jax.jit(jax.grad(lambda bias: att(*arrays, bias=bias).sum()))(np.ones(5, np.float32))
    assert str(caught.value) == (
        "where a table's gradient goes may need more than 32 bits and JAX has 64-bit integers switched off; "
        'set jax.config.update("jax_enable_x64", True) or shrink the numbers in the mask'
    )


# -- transforms -------------------------------------------------------------------------------------

MAPPED = ("q", "k", "v", "sinks", "t0", "t1", "s0", "s1", "origin", "spans")


def varied(n):
    """`n` versions of everything that may be mapped, by name."""
    draw = np.random.default_rng(5)
    base = dict(zip("qkv", cases.arrays(CASE)))
    found = {name: np.stack([np.asarray(x) * np.float32(1 + 0.1 * i) for i in range(n)]) for name, x in base.items()}
    found["sinks"] = draw.standard_normal((n, 4)).astype(np.float32)
    found["t0"] = np.stack([np.roll(DOC, 3 * i)[:90] for i in range(n)]).astype(np.int32)
    found["t1"] = draw.standard_normal((n, 4, 90)).astype(np.float32)
    found["s0"] = 40 - np.arange(n, dtype=np.int32)
    found["s1"] = (0.5 + 0.1 * np.arange(n)).astype(np.float32)
    found["origin"] = np.arange(n, dtype=np.int32) % 5
    found["spans"] = np.stack([cases.spans(CASE).bounds] * n)
    return found


def everything(values):
    """Forward and backward of one version."""
    held = cases.spans(CASE)
    whole = np.zeros_like(held.bounds)  # all tiles, with the predicate
    whole[..., 0, 1:] = -(-CASE.kv_len // CASE.block[1])
    spans = DeviceSpans(
        jnp.asarray(whole) + 0 * values["spans"], np.ones_like(held.count), False, held.slice_of
    )  # fmt: skip
    at = values["origin"]
    given = parts(
        spans=spans, geometry=replace(cases.geometry(CASE), origin=(0, 0, at, at), sizes=(2, 4, 90, 90)),
        slots={"s0": values["s0"], "s1": values["s1"]}, tables={"t0": values["t0"], "t1": values["t1"]},
        sinks=values["sinks"], **{n: values[n] for n in "qkv"},
    )  # fmt: skip
    out, lse, top = forward(**given)
    cotangents = Cotangents(jnp.cos(out), jnp.where(jnp.isinf(lse), 0, lse))
    found = native_jax.backward(*taken(**given), ForwardResults(out, lse), cotangents, grad_names=ALL)
    return out, lse, top, found


single = jax.jit(everything)


def assert_same(found, want):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mapped", [*([n] for n in MAPPED), MAPPED], ids=[*MAPPED, "all"])
def test_native_jax_vmap_equals_single_calls(mapped):
    versions = varied(3)
    axes = {n: 0 if n in mapped else None for n in versions}
    first = {n: x if n in mapped else x[0] for n, x in versions.items()}
    found = jax.jit(jax.vmap(everything, in_axes=(axes,)))(first)
    one_by_one = [single({n: x[i] if n in mapped else x for n, x in first.items()}) for i in range(3)]
    assert_same(found, jax.tree.map(lambda *x: np.stack(x), *one_by_one))


def test_nested_vmap_of_more_instances_than_threads():
    versions = {n: x.reshape(2, 24, *x.shape[1:]) for n, x in varied(48).items()}
    outer = {n: 0 if n in ("q", "t1", "s0", "origin") else None for n in versions}
    inner = {n: 0 if n in ("q", "k", "sinks", "t0") else None for n in versions}
    given = {
        n: x[(slice(None) if outer[n] == 0 else 0, slice(None) if inner[n] == 0 else 0)] for n, x in versions.items()
    }
    found = jax.jit(jax.vmap(jax.vmap(everything, in_axes=(inner,)), in_axes=(outer,)))(given)
    found = list(map(np.asarray, jax.tree.leaves(found)))
    for at in ((0, 0), (1, 5), (0, 23), (1, 23)):
        picked = {n: tuple(i for i, axes in zip(at, (outer, inner)) if axes[n] == 0) for n in given}
        one = single({n: x[picked[n]] for n, x in given.items()})
        assert_same([x[at] for x in found], one)


def test_native_jax_calls_take_donated_arrays():
    """XLA may put results where q was, once the kernel has read it."""
    given, want = parts(), run()
    q_, k_, v_ = (given.pop(n) for n in "qkv")
    held = np.array(q_)
    call = jax.jit(lambda q, k, v: forward(**given, q=q, k=k, v=v)[0][..., : CASE.dim] + q, donate_argnums=0)
    got = call(jnp.array(held), k_, v_)
    np.testing.assert_array_equal(got, want[0][..., : CASE.dim] + held)


def test_calls_from_many_threads_end():
    """More callers than XLA has threads: each is the first worker of its own call."""
    given = parts()
    want = run()[0]
    call = jax.jit(lambda q: forward(**given | {"q": q})[0])
    wrong = []

    def loop():
        for _ in range(40):
            if not np.array_equal(call(given["q"]), want):
                wrong.append(1)

    threads = [Thread(target=loop) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong
    assert not any(t.is_alive() for t in threads)


def test_results_do_not_depend_on_what_memory_held():
    """XLA's results are not initialised; sums of captured gradients begin at 0 all the same."""
    dout = jnp.asarray(np.ones((2, 80, 4, 16), np.float32))
    first = differentiate(dout, None, **parts())
    for _ in range(3):
        junk = [jnp.full((2, 4, 70), np.nan) for _ in range(20)]
        del junk
        assert_same(differentiate(dout, None, **parts()), first)


# -- failures ---------------------------------------------------------------------------------------


def test_a_kernel_that_fails():
    broken = replace(cases.geometry(CASE), scale=-1.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a frisket kernel ran out of memory"):
        jax.block_until_ready(run(geometry=broken))


def child(code, timeout=120, **environment):
    """Run in a process of its own."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))  # frisket may come from there
    env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=TESTS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported(given):
    arrays = [given.pop(n) for n in "qkv"]
    call = jax.jit(lambda q, k, v: forward(**given, q=q, k=k, v=v))
    name, _ = native_jax.target_name("forward", PLAN, given["target"], CASE.dim, CASE.v_dim, "float32")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name)]
    return name, jax.export.export(call, disabled_checks=allowed)(*arrays).serialize(), arrays


def test_native_jax_modules_can_be_exported():
    _, module, arrays = exported(parts())
    check(CASE, jax.export.deserialize(module).call(*arrays))


@pytest.mark.exhaustive
def test_exported_modules_name_the_kernel_that_is_missing(tmp_path):
    name, module, _ = exported(parts())
    (tmp_path / "module").write_bytes(module)
    found = child(
        f"""\
        import jax, numpy as np
        module = jax.export.deserialize(open({str(tmp_path / "module")!r}, "rb").read())
        try:
            module.call(*(np.zeros(s, np.float32) for s in [(2, 80, 4, 8), (2, 70, 2, 8), (2, 70, 2, 16)]))
        except jax.errors.JaxRuntimeError as error:
            print(error)
        """
    )
    assert f"No FFI handler registered for {name}" in found


@pytest.mark.exhaustive
def test_devices_of_a_mesh():
    """Heads over four devices, batches over two: everything again in shards, with the types of shard_map checked."""
    found = child(
        """\
        import importlib.util, os, sys
        import jax, jax.numpy as jnp, numpy as np
        from functools import partial
        from dataclasses import replace
        from jax.sharding import Mesh, PartitionSpec as P
        spec = importlib.util.spec_from_file_location("tests_here", os.environ["TEST_FILE"])
        t = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(t)
        from support import attention_cases as cases
        from runtime.backends import scalar_kernel
        from frisket.runtime.backends.cpp import jax as native_jax
        from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs, Spans
        from frisket.lowering.planner.planner import DeviceSpans

        native_jax.KERNELS = {"forward": scalar_kernel.forward, "backward": scalar_kernel.backward}
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
        case = t.CASE.but(heads=8, kv_heads=4, tables=t.CASE.tables | {"bias": np.tile(t.CASE.tables["bias"], (2, 1))})
        made = cases.plan(case)
        given = t.parts(case, made)
        arrays = [given.pop(n) for n in "qkv"]
        dout, held = jnp.cos(jnp.ones((2, 80, 8, 16))), given.pop("spans")
        whole = given.pop("geometry")

        def both(geometry, spans, q, k, v, dout):
            inputs = KernelInputs(geometry=geometry, spans=spans, **given)
            out, lse, top, _ = native_jax.forward(inputs, q, k, v)
            of = ForwardResults(out, lse), Cotangents(dout)
            grads = native_jax.backward(inputs, q, k, v, *of, grad_names=t.ALL)
            return out, lse, top, grads

        want = jax.jit(partial(both, whole, held))(*arrays, dout)

        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=(P("data", None, "model"),) * 4,
                 out_specs=(P("data", None, "model"), P("data", "model"), P("data", "model"),
                            dict(q=P("data", None, "model"), k=P("data", None, "model"), v=P("data", None, "model"),
                                 t1=P(), s1=P())))
        def sharded(q, k, v, dout):
            place = replace(whole, batch=1, heads=2, kv_heads=1, sizes=(2, 8, 80, 80),
                            origin=(jax.lax.axis_index("data"), 2 * jax.lax.axis_index("model"), 0, 0))
            one = Spans(held.bounds, held.count, held.slice_of[:1, :2])
            out, lse, top, grads = both(place, one, q, k, v, dout)
            for name in ("t1", "s1"):
                grads[name] = jax.lax.psum(grads[name], ("data", "model"))
            return out, lse, top, grads

        for x, y in zip(jax.tree.leaves(sharded(*arrays, dout)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)
        print("same")
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        NPROC="16",
        TEST_FILE=__file__,
    )
    assert found.strip() == "same"


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_jobs_on_a_pool_under_sanitizers(sanitizer, tmp_path):
    text = tmp_path / "bridge.cpp"
    text.write_text(native_jax.bridge_source() + (TESTS / "support" / "native" / "bridge_main.cpp").read_text())
    flags = ["-std=c++17", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
    subprocess.run([*native_build.compiler(), *flags, str(text), "-o", str(tmp_path / "bridge")], check=True)
    done = subprocess.run([tmp_path / "bridge"], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
