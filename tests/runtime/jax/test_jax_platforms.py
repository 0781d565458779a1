"""The backend of a call of JAX: that of the platform that is lowered, and nothing else is traced."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.native.compiler import needs_compiler

import frisket as fk
from frisket.runtime.backends import pallas_gpu, triton
from frisket.runtime.calls.options import CallArgs, Options
from frisket.runtime.jax import attend as jax_attend
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine.caller import SAID
from frisket.runtime.plans.device import FlatPlan

draw = np.random.default_rng(0)
Q, K, V = (jnp.asarray(draw.standard_normal((1, 200, heads, 64)).astype(jnp.bfloat16)) for heads in (4, 2, 2))
DOC = jnp.asarray(np.arange(200, dtype=np.int32) // 70)
CALLS = ("tpu_custom_call", "mosaic_gpu_v2", "triton_kernel_call")
ALLOWED = [jax.export.DisabledSafetyCheck.custom_call(name) for name in CALLS]
NATIVE = "xla" if native_build.reason() else "cpp"


@pytest.fixture(autouse=True)
def called(monkeypatch):
    """The executors that are called, in turn. Every platform has its own backend."""
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    names, found = [], jax_attend.executor

    def executor(backend, what):
        names.append(backend)
        return found(backend, what)

    monkeypatch.setattr("frisket.runtime.jax.call.executor", executor)
    return names


def attend(*args, **options):
    return fk.attention(*args[:3], "causal & same(doc)", doc=args[3], **options)


def loss(*args):
    return (attend(*args).astype("float32") ** 2).sum()


def lowered(platform, function=attend, args=(Q, K, V, DOC)):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def exported(function, *args, platforms):
    return jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=ALLOWED)(*args)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("platform", "backend", "call"), [
    ("cpu", NATIVE, ""), ("tpu", "pallas-tpu", "tpu_custom_call"), ("cuda", "pallas-mosaic-gpu", "mosaic_gpu_v2"),
])  # fmt: skip
def test_lowered_platform_decides_the_traced_backend(platform, backend, call, called):
    small = (jnp.asarray(np.asarray(x)[..., :16].astype(np.float32)) for x in (Q, K, V))  # a kernel of other tests
    text = lowered(platform, args=(Q, K, V, DOC) if call else (*small, DOC))
    assert called == [backend]
    assert {name for name in CALLS if f"@{name}" in text} == {call} - {""}


@pytest.mark.exhaustive
@pytest.mark.parametrize("function", [
    attend, pytest.param(jax.value_and_grad(loss, (0, 1, 2)), id="gradients", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_exported_function_runs_on_each_platform(function, called):
    """Without kernels that only this machine has."""
    module = exported(function, Q, K, V, DOC, platforms=["cpu", "tpu", "cuda"])
    assert called == (1 if function is attend else 2) * ["xla", "pallas-tpu", "pallas-mosaic-gpu"]
    text = module.mlir_module()
    assert {name for name in CALLS if f"@{name}" in text} == {"tpu_custom_call", "mosaic_gpu_v2"}
    assert not re.search("@frisket_(forward|backward)_[0-9a-f]{24}", text)
    again = jax.export.deserialize(module.serialize())
    want = function(Q, K, V, DOC)
    for x, y in zip(jax.tree.leaves(again.call(Q, K, V, DOC)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x.astype("float32"), y.astype("float32"), rtol=3e-2, atol=3e-2)


@pytest.mark.exhaustive
def test_gradient_of_an_export_for_several_platforms():
    module = exported(loss, Q, K, V, DOC, platforms=["cpu", "tpu"])
    again = jax.export.deserialize(module.serialize(vjp_order=1))
    found, want = (jax.grad(lambda q, f=f: f(q, K, V, DOC))(Q) for f in (again.call, loss))
    np.testing.assert_allclose(found.astype("float32"), want.astype("float32"), rtol=3e-2, atol=3e-2)


@needs_compiler
def test_a_backend_that_is_named_is_that_backend_everywhere():
    with pytest.raises(fk.BackendError) as caught:
        lowered("tpu", lambda *args: attend(*args, backend="cpp"))
    assert str(caught.value) == (
        "backend 'cpp' runs on cpu, and this is lowered for tpu\n  without a backend each platform takes its default"
    )
    assert caught.value.__notes__[0] == (
        "in attention under mask = q >= k & doc[q] == doc[k]\n"
        "  of q bfloat16[1, 200, 4, 64], k bfloat16[1, 200, 2, 64], v bfloat16[1, 200, 2, 64], lowered for tpu"
    )
    assert "tpu_custom_call" not in lowered("tpu", lambda *args: attend(*args, backend="xla"))


def test_missing_backends_are_warned_about_once(called, monkeypatch):
    SAID.clear()
    monkeypatch.setattr(jax_attend, "lowerable", lambda backend: "not here" if backend == "triton" else "")
    args = *(x.astype("float32") for x in (Q, K, V)), DOC
    with pytest.warns(UserWarning, match="for want of") as said:
        lowered("cuda", args=args)
    assert str(said[0].message).startswith(
        "on cuda this runs as backend 'xla', for want of:\n  pallas-mosaic-gpu: kernels for Hopper"
    )
    assert str(said[0].message).endswith("\n  triton: not here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered("cuda", lambda *args: 2 * attend(*args), args)
    assert called == ["xla", "xla"]


def test_a_gpu_that_is_no_hopper_has_triton(monkeypatch):
    plan = fk.compile("causal").plan(200, 200).work((128, 128)).plan
    geometry = fk.compile("causal").call(CallArgs(Q, K, V)).geometry
    monkeypatch.setattr(jax_attend, "lowerable", lambda backend: "")
    for kind, backend in (("9.0", "pallas-mosaic-gpu"), ("8.0", "triton"), ("10.3", "triton")):
        monkeypatch.setattr(pallas_gpu, "capabilities", lambda kind=kind: iter([kind]))
        found = jax_attend.backend_on("cuda", plan, geometry, "bfloat16", {}, False, frozenset())
        assert found == backend


@pytest.fixture
def stand_ins(monkeypatch):
    """jax-triton is there, and executors of either kernels give zeros; (backend, direction) of those that are
    called."""
    calls = []

    def executor(backend, direction):
        def forward(inputs, q, k, v, *, lse_residual):
            calls.append((backend, direction))
            g = inputs.geometry
            rows = jnp.zeros((g.batch, g.heads, g.q_len), jnp.float32)
            return (jnp.zeros_like(q), *[rows] * (2 + lse_residual))

        def backward(inputs, q, k, v, results, cotangents, *, grad_names):
            calls.append((backend, direction))
            return {n: jnp.zeros_like(x) for n, x in zip("qkv", (q, k, v), strict=True)}

        return forward if direction == "forward" else backward

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(jax_attend, "lowerable", lambda backend: "")
    monkeypatch.setattr("frisket.runtime.jax.call.executor", executor)
    return calls


def asked(mask, dim=64, length=1024, score=None, dtype="bfloat16", traced=None, gradients=False, **options):
    """Lowers a call, or its gradients, for a Hopper."""
    q, att = jnp.zeros((1, length, 2, dim), dtype), fk.compile(mask, score, **options)

    def run(q, table):
        given = {traced: table} if traced else {}
        return att(q, q, q, **given, **({"seed": 1} if "dropout" in options else {})).astype("float32").sum()

    lowered("cuda", jax.grad(run) if gradients else run, (q, jnp.arange(length) // 512))


@pytest.mark.parametrize("given", [
    {"mask": "causal & window(128)"}, {"mask": "causal & window(128)", "dim": 40},
    {"mask": "causal & window(700)", "dtype": "float16"}, {"mask": "causal & same(doc)", "traced": "doc"},
    {"mask": "causal & same(doc)", "doc": np.arange(1024) // 512}, {"mask": "causal & window(w)", "w": 128},
    {"mask": "causal"}, {"mask": "causal", "length": 8192}, {"mask": "causal & window(1024)", "length": 16384},
])  # fmt: skip
def test_short_rows_of_small_heads_take_triton_on_hopper(stand_ins, given):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked(**given)
    assert stand_ins == [("triton", "forward")]


@pytest.mark.parametrize("given", [
    {"mask": "causal", "length": 16384}, {"mask": None}, {"mask": "causal & window(1200)", "length": 16384},
    {"mask": "causal", "dim": 128},
    {"mask": "causal & window(128)", "dim": 128}, {"mask": "causal & window(128)", "dim": 72},
    {"mask": "causal & window(128)", "length": 1000}, {"mask": "causal & window(128)", "score": "softcap(50)"},
    {"mask": "causal & window(128)", "dropout": 0.1}, {"mask": "causal & window(128)", "tile": (128, 64)},
    {"mask": "causal & window(128)", "backend": "pallas-mosaic-gpu"},
])  # fmt: skip
def test_long_and_plain_calls_take_mosaic_on_hopper(stand_ins, given):
    asked(**given)
    assert stand_ins == [("pallas-mosaic-gpu", "forward")]


@pytest.mark.parametrize("lacking", ["jax-triton", "kernels"])
def test_short_rows_take_mosaic_without_triton(stand_ins, monkeypatch, lacking):
    if lacking == "jax-triton":
        monkeypatch.setattr(jax_attend, "lowerable", lambda backend: "no" if backend == "triton" else "")
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked("causal & window(128)")
    assert stand_ins == [("pallas-mosaic-gpu", "forward")]


def test_stages_show_the_kernels_that_run(stand_ins, monkeypatch):
    monkeypatch.setattr("frisket.runtime.attention.attention.choose", lambda *given: "pallas-mosaic-gpu")
    q = jnp.zeros((1, 1024, 2, 64), jnp.bfloat16)
    for mask, options, backend in (
        ("causal & window(128)", {}, "triton"), (None, {}, "pallas-mosaic-gpu"),
        ("causal & window(128)", {"tile": (128, 128)}, "pallas-mosaic-gpu"),
    ):  # fmt: skip
        assert fk.compile(mask, **options).stages(q, q, q).target.backend == backend


def test_a_broken_jax_triton_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (tmp_path / "jax_triton.py").write_text("raise AttributeError('of another JAX')\n")
    monkeypatch.syspath_prepend(tmp_path)
    triton._importing.cache_clear()
    assert triton.missing().startswith("jax_triton cannot be imported: of another JAX; install versions of jax")
    plan = fk.compile("causal & window(128)").plan(1024, 1024)
    geometry = fk.compile("causal").call(CallArgs(Q, K, V)).geometry
    chosen = jax_attend.quickest_of("pallas-mosaic-gpu", plan, geometry, "bfloat16", Options())
    assert chosen == "pallas-mosaic-gpu"
    triton._importing.cache_clear()


def test_gradients_of_short_rows_are_those_of_mosaic(stand_ins):
    asked("causal & window(128)", gradients=True)
    assert stand_ins == [("triton", "forward"), ("pallas-mosaic-gpu", "backward")]


def test_traced_documents_are_planned_once_for_all_layers(stand_ins, monkeypatch):
    """Once for all layers: not again in the call, which would find other tiles."""
    monkeypatch.setattr("frisket.runtime.backends.registry.automatic", lambda *given: "pallas-mosaic-gpu")
    blocks, rows = [], FlatPlan.rows

    def planned(self, block):
        blocks.append((block, (block, False) in self.spans_by_tile))
        return rows(self, block)

    def executor(backend, direction):
        def forward(inputs, q, k, v, *, lse_residual):
            stand_ins.append((backend, direction))
            g, target = inputs.geometry, inputs.target
            inputs.spans.rows((target.block_q, target.block_k))
            return (jnp.zeros_like(q), *[jnp.zeros((g.batch, g.heads, g.q_len), jnp.float32)] * 2)

        return forward

    monkeypatch.setattr("frisket.runtime.jax.call.executor", executor)
    monkeypatch.setattr(FlatPlan, "rows", planned)
    asked("causal & same(doc)", traced="doc")
    assert stand_ins == [("triton", "forward")]
    assert blocks == [((64, 64), False), ((64, 64), True)]


def test_unknown_platform_takes_xla(called):
    plan = fk.compile("causal").plan(200, 200).work((128, 128)).plan
    geometry = fk.compile("causal").call(CallArgs(Q, K, V)).geometry
    assert jax_attend.backend_on("metal", plan, geometry, "float32", {}, False, frozenset()) == "xla"


def test_errors_under_jit_say_under_which_mask():
    with pytest.raises(fk.ParameterError, match="table `doc` has 10 entries") as caught:
        lowered("cpu", args=(Q, K, V, DOC[:10]))
    assert caught.value.__notes__[0] == (
        "in attention under mask = causal & same(doc)\n"
        "  of q bfloat16[1, 200, 4, 64], k bfloat16[1, 200, 2, 64], v bfloat16[1, 200, 2, 64]"
    )
