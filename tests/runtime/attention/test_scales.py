"""The scale of scores: any scalar of Python, numpy, torch and JAX, traced ones and learned ones with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.operations import AttentionMetadata, AttentionRegistry

rng = np.random.default_rng(6)
ARRAYS = tuple(rng.standard_normal((1, 6, 2, 8)).astype(np.float32) for _ in range(3))
JAX = tuple(map(jnp.asarray, ARRAYS))
TORCH = tuple(torch.tensor(x).transpose(1, 2) for x in ARRAYS)
SCALE, MOD = 0.3, "score + k - q then softcap(2)"
WANT = fk.reference(*ARRAYS, "causal", MOD, scale=SCALE, layout="bshd")
OP = AttentionRegistry.create("frisket")


def flax(scale):
    return pytest.importorskip("frisket.integrations.flax").attention_fn("causal", MOD, scale=scale)(*JAX)


WAYS = {
    "compile": lambda x: fk.compile("causal", MOD, scale=x)(*JAX),
    "attention": lambda x: fk.attention(*JAX, "causal", MOD, scale=x),
    "operator": lambda x: OP(*JAX, "causal", score=MOD, softmax_scale=x).attention_outputs,
    "ring": lambda x: AttentionRegistry.create("ring")(*JAX, "causal", score=MOD, softmax_scale=x).attention_outputs,
    "flax": flax,
}
SCALARS = {
    "python": SCALE, "numpy": np.float32(SCALE), "numpy array": np.array(SCALE), "jax": jnp.float32(SCALE),
    "torch": torch.tensor(SCALE),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_scales_of_any_kind_of_scalar(way):
    for scale in SCALARS.values():
        np.testing.assert_allclose(WAYS[way](scale), WANT, atol=2e-6)


def slope_of_scale(call, step=1e-3):
    return (np.asarray(call(SCALE + step), "f8") - np.asarray(call(SCALE - step), "f8")).sum() / (2 * step)


def reference(scale):
    return fk.reference(*ARRAYS, "causal", MOD, scale=scale, layout="bshd")


@pytest.mark.parametrize("way", WAYS)
def test_traced_scales_have_gradients(way):
    np.testing.assert_allclose(jax.jit(WAYS[way])(SCALE), WANT, atol=2e-6)
    got = jax.jit(jax.grad(lambda x: WAYS[way](x).sum()))(SCALE)
    np.testing.assert_allclose(got, slope_of_scale(reference), rtol=1e-4)


def test_traced_whole_numbers_and_mapped_scales():
    want = fk.reference(*ARRAYS, "causal", scale=2, layout="bshd")
    np.testing.assert_allclose(jax.jit(lambda x: fk.attention(*JAX, "causal", scale=x))(2), want, atol=2e-6)
    both = jax.jit(jax.vmap(lambda x: fk.attention(*JAX, "causal", scale=x)))(jnp.array([2.0, 0.5]))
    np.testing.assert_allclose(both[0], want, atol=2e-6)
    np.testing.assert_allclose(both[1], fk.reference(*ARRAYS, "causal", scale=0.5, layout="bshd"), atol=2e-6)


def test_new_traced_scales_of_one_attention_share_its_program():
    trace = []

    @jax.jit
    def call(x):
        trace.append(x)
        return fk.attention(*JAX, "causal", scale=x)

    for x in (0.1, 0.2, 0.3):
        call(x)
    assert len(trace) == 1


@pytest.mark.parametrize("how", ["attention", "compile"])
@pytest.mark.parametrize("run", ["eager", "graph", "func"])
@pytest.mark.parametrize("made", ["leaf", "computed"])
def test_learned_scales_of_torch_have_gradients(how, run, made):
    log = torch.nn.Parameter(torch.tensor(SCALE).log())
    leaf = torch.nn.Parameter(torch.tensor(SCALE))

    def loss(x):
        scale = x if made == "leaf" else x.exp()
        if how == "compile":
            return fk.compile("causal", MOD, scale=scale)(*TORCH).sum()
        return fk.attention(*TORCH, "causal", MOD, scale=scale).sum()

    x = leaf if made == "leaf" else log
    if run == "graph" and how == "compile":
        att = fk.compile("causal", MOD, scale=leaf)  # made outside of the graph
        x, step = leaf, torch.compile(lambda x: att(*TORCH).sum(), backend="aot_eager")
        got = torch.autograd.grad(step(x), x)[0]
    elif run == "graph":
        got = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), x)[0]
    else:
        got = torch.func.grad(loss)(x.detach()) if run == "func" else torch.autograd.grad(loss(x), x)[0]
    want = slope_of_scale(reference) * (1 if x is leaf else SCALE)
    torch.testing.assert_close(got.item(), float(want), rtol=1e-4, atol=1e-4)


def test_learned_scales_are_read_at_every_call():
    scale = torch.nn.Parameter(torch.tensor(1.0))
    att = fk.compile("causal", MOD, scale=scale)
    att(*TORCH)
    with torch.no_grad():
        scale.fill_(SCALE)
    np.testing.assert_allclose(att(*TORCH).detach().transpose(1, 2), WANT, atol=2e-6)
    att.check(*TORCH).require()


def test_score_mods_without_a_score_ignore_a_learned_scale():
    scale = torch.nn.Parameter(torch.tensor(1.0))
    got = fk.compile("causal", "float(k - q)", scale=scale)(*TORCH)
    torch.testing.assert_close(got, fk.compile("causal", "float(k - q)")(*TORCH))


def test_traced_soft_caps_of_operators_have_gradients():
    def call(c):
        return OP(*JAX, causal=True, logits_soft_cap=c).attention_outputs

    want = fk.reference(*ARRAYS, "causal", "softcap(0.5)", layout="bshd")
    for cap in (0.5, np.array(0.5), jnp.float32(0.5)):
        np.testing.assert_allclose(call(cap), want, atol=2e-6)
    np.testing.assert_allclose(jax.jit(call)(0.5), want, atol=2e-6)
    near = [fk.reference(*ARRAYS, "causal", f"softcap({c})", layout="bshd").sum() for c in (0.499, 0.501)]
    got = jax.jit(jax.grad(lambda c: call(c).sum()))(0.5)
    np.testing.assert_allclose(got, (near[1] - near[0]) / 0.002, rtol=1e-3)


Q = TORCH[0]
WRONG = {
    "text": (lambda: fk.compile("causal", scale="1"), "scale is '1'; it is one finite number"),
    "bool": (lambda: fk.compile("causal", scale=True), "scale is True; it is one finite number"),
    "list": (lambda: fk.attention(*JAX, "causal", scale=[0.3]), r"scale is \[0.3\]; it is one finite number"),
    "axes": (lambda: fk.attention(*JAX, "causal", scale=jnp.ones(2)), "an array of one without axes"),
    "traced axes": (
        lambda: jax.jit(lambda x: fk.attention(*JAX, "causal", scale=x))(jnp.ones(2)), "an array of one without axes",
    ),
    "learned axes": (lambda: fk.attention(Q, Q, Q, scale=torch.nn.Parameter(torch.ones(2))), "of one without axes"),
    "nan": (lambda: fk.compile(scale=float("nan")), "scale is nan"),
    "flax": (lambda: flax("1"), "scale is '1'"),
    "operator": (lambda: OP(*JAX, softmax_scale="1"), "softmax_scale is '1'"),
    "soft cap": (lambda: OP(*JAX, logits_soft_cap="1"), "logits_soft_cap is '1'"),
    "metadata": (lambda: AttentionMetadata(softmax_scale="1"), "softmax_scale is '1'"),
    "traced metadata": (
        lambda: jax.jit(lambda x: AttentionMetadata(softmax_scale=x).tile)(1.0), "multiply q by a factor",
    ),
    "reference": (lambda: fk.reference(*ARRAYS, scale="1", layout="bshd"), "scale is '1'"),
    "lse": (lambda: fk.attention(*JAX, "causal", return_lse="yes"), "return_lse is 'yes'; it is True or False"),
    "lse of an attention": (lambda: fk.compile("causal")(Q, Q, Q, return_lse="yes"), "return_lse is 'yes'"),
    "max": (lambda: fk.compile("causal")(Q, Q, Q, return_max=1), "return_max is 1; it is True or False"),
    "groups": (lambda: fk.compile("causal", enable_gqa="no"), "enable_gqa is 'no'; it is True or False"),
    "groups of a call": (lambda: fk.attention(Q, Q, Q, enable_gqa=1), "enable_gqa is 1; it is True or False"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_options_of_wrong_types_have_an_error(name):
    call, message = WRONG[name]
    with pytest.raises(fk.ParameterError, match=message):
        call()


def test_plain_scales_stay_in_one_graph_of_torch():
    q = torch.randn(1, 1, 24, 16)
    run = torch.compile(lambda q: fk.attention(q, q, q, "causal", scale=0.5), backend="eager", fullgraph=True)
    torch.testing.assert_close(run(q), fk.attention(q, q, q, "causal", scale=0.5))
