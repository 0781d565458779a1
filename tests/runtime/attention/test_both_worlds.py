"""The library's masks and score mods in torch and in JAX, on the same numbers: results and every gradient are those of
the interpreter in float64, and of one another."""

import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import peer_cases
import pytest
import torch
from support.tiers import thinned

import frisket as fk
from frisket.lowering import dense
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.calls.program import program_of
from frisket.runtime.machine import cpp_build as native_build

LENGTH, DIM = 40, 8
MASKS, MODS = cases.masks(LENGTH), cases.mods(LENGTH)
PEERS, PEER_MODS = peer_cases.masks(LENGTH), peer_cases.mods(LENGTH)
LEARNED = {  # numbers of score mods, by name, so that they have a gradient
    "rope_bias(qr, kr, n, c)": ("rope_bias(qr, kr, 4, gain)", 0.25),
    "inverse_distance(e)": ("inverse_distance(gain)", 0.5),
    "softcap(c)": ("softcap(gain)", 2.0),
    "softcap_fraction(c)": ("softcap_fraction(gain)", 2.0),
    "activation(f, n)": ("activation(relu(score), gain)", 0.8),
    "soft_window(w)": ("gain * soft_window(5)", 0.7),
    "alibi": ("gain * alibi", 1.3),
}
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # to compile


class Pair:
    """One mask with one score mod: arrays as JAX has them, values by name."""

    def __init__(self, mask, mod):
        case = (MASKS | PEERS)[mask]
        longest = max(case.q_len, case.kv_len)
        change = (cases.mods(longest) | peer_cases.mods(longest))[mod]
        batch, heads = case.batch, 4 if case.heads == 1 else case.heads
        text, number = LEARNED.get(mod, (change.text, None))
        params = {n: np.repeat(x, batch, 0) if np.shape(x)[:1] == (1,) else x for n, x in change.params.items()}
        params |= {} if number is None else {"gain": number}
        shared = set(params) & set(case.params)
        self.mask = case.text
        self.score = re.sub(rf"\b({'|'.join(shared)})\b", r"\1_of_score", text) if shared else text
        params = {n + "_of_score" * (n in shared): x for n, x in params.items()}
        self.learned = {n: np.asarray(x, np.float32) for n, x in params.items() if np.asarray(x).dtype.kind == "f"}
        self.fixed = case.params | {n: x for n, x in params.items() if n not in self.learned}
        draw = np.random.default_rng(len(mask) + 100 * len(mod))
        shapes = [(batch, n, h, DIM) for n, h in ((case.q_len, heads), *[(case.kv_len, heads // 2)] * 2)]
        *self.qkv, self.dout = (draw.standard_normal(s).astype(np.float32) for s in (*shapes, shapes[0]))
        self.dlse = draw.standard_normal((batch, heads, case.q_len)).astype(np.float32)

    def interpreted(self):
        """out, lse and gradients by name, in float64."""
        numbers = {n: x.item() if x.ndim == 0 else x for n, x in self.learned.items()}
        program = program_of(self.mask, self.score, self.fixed | numbers)
        mask, score = program.mask.expr, program.score.expr
        q, k, v, dout = (x.swapaxes(1, 2) for x in (*self.qkv, self.dout))
        given = {"scale": DIM**-0.5, "params": program.scalars, "tables": program.tables}
        out, lse = dense.attention(q, k, v, dense.DenseCall(ProgramExprs(mask, score), **given))
        found = dense.gradients(
            q, k, v, dense.DenseCall(ProgramExprs(mask, score), **given), dout, np.where(lse > -np.inf, self.dlse, 0)
        )
        by_name = found["dtables"] | found["dscalars"]
        grads = {x: found[f"d{x}"].swapaxes(1, 2) for x in "qkv"}
        grads |= {n: by_name.get(n, np.zeros(x.shape)) for n, x in self.learned.items()}
        return out.swapaxes(1, 2), lse, grads

    def torch(self, backend):
        given = {n: torch.from_numpy(x.copy()).requires_grad_() for n, x in self.arrays().items()}
        out, lse = self.attention(backend, **given, layout="bshd")
        seen = torch.where(lse > -torch.inf, lse, 0)
        ((out * torch.from_numpy(self.dout)).sum() + (seen * torch.from_numpy(self.dlse)).sum()).backward()
        return out.detach().numpy(), lse.detach().numpy(), {n: x.grad.numpy() for n, x in given.items()}

    def jax(self, backend):
        def loss(given):
            out, lse = self.attention(backend, **given)
            seen = jnp.where(lse > -jnp.inf, lse, 0)
            return (out * self.dout).sum() + (seen * self.dlse).sum(), (out, lse)

        grads, (out, lse) = jax.jit(jax.grad(loss, has_aux=True), compiler_options=FAST)(self.arrays())
        return np.asarray(out), np.asarray(lse), {n: np.asarray(x) for n, x in grads.items()}

    def torch_forward(self, backend):
        given = {n: torch.from_numpy(x) for n, x in self.arrays().items()}
        return *(x.numpy() for x in self.attention(backend, **given, layout="bshd")), {}

    def jax_forward(self, backend):
        run = jax.jit(lambda given: self.attention(backend, **given), compiler_options=FAST)
        return *map(np.asarray, run(self.arrays())), {}

    def arrays(self):
        """What has a gradient."""
        return dict(zip("qkv", self.qkv)) | self.learned

    def attention(self, backend, *, q, k, v, **more):
        return fk.attention(q, k, v, self.mask, self.score, backend=backend, return_lse=True, **self.fixed, **more)

    def check(self, *runs):
        """Each of the runs, a world and a backend, against the interpreter and against the first of them."""
        out, lse, grads = self.interpreted()
        first = None
        for world, backend in runs:
            found = getattr(self, world)(backend)
            assert set(found[2]) == (set() if "forward" in world else set(grads))
            for right in (right for right in ((out, lse, grads), first) if right):
                near("out", found[0], right[0])
                near("lse", found[1], right[1])
                for name, one in found[2].items():
                    near(name, one, right[2][name])
            first = first or found


def near(name, found, want, tolerance=2e-5):
    assert found.dtype == np.float32
    assert found.shape == np.shape(want)
    size = np.abs(np.where(np.isfinite(want), want, 0)).max(initial=1)
    np.testing.assert_allclose(found, want, rtol=0, atol=tolerance * size, err_msg=name)


LIBRARY, NATIVE = (("torch", "aten"), ("jax", "xla")), (("torch", "cpp"), ("jax", "cpp"))
SPREAD = list(zip([*MASKS][::5], MODS))  # every mod, beside masks from all over the library
PAIRS = [(mask, [*MODS][i % len(MODS)]) for i, mask in enumerate(MASKS) if mask not in dict(SPREAD)]
SCARCE = ["inverted", "natten_by_fractions(w, n)"]  # digits: 1 / score, and fractions that a mask compares at equality
OTHERS = [mod for mod in PEER_MODS if mod not in SCARCE]
OF_PEERS = [(m, OTHERS[i % len(OTHERS)]) for i, m in enumerate([*MASKS, *PEERS]) if m not in SCARCE]
NAMES = "mask", "mod"
needs_compiler = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(NAMES, thinned(SPREAD))
def test_library_pairs_agree_in_torch_and_jax(mask, mod):
    Pair(mask, mod).check(*LIBRARY)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(  # the others with their gradients, below
    NAMES, [pytest.param(*p, marks=pytest.mark.exhaustive if i % 6 else ()) for i, p in enumerate(PAIRS[::2])]
)
def test_results_of_every_other_mask(mask, mod):
    Pair(mask, mod).check(("torch_forward", "aten"), ("jax_forward", "xla"))


@pytest.mark.parametrize(
    NAMES, [pytest.param(*p, marks=pytest.mark.exhaustive if i % 2 else pytest.mark.slow) for i, p in enumerate(PAIRS)]
)
def test_gradients_of_every_mask(mask, mod):
    Pair(mask, mod).check(*LIBRARY)


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize(
    NAMES, [pytest.param(*p, marks=() if p == SPREAD[1] else pytest.mark.exhaustive) for p in SPREAD]
)
def test_library_pairs_agree_on_native_kernels(mask, mod):
    Pair(mask, mod).check(*LIBRARY[:1], *NATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mod", MODS)
def test_library_masks_with_each_score_mod_agree(mask, mod):
    Pair(mask, mod).check(*LIBRARY)


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, OF_PEERS)
def test_peer_masks_and_mods_agree_in_torch_and_jax(mask, mod):
    Pair(mask, mod).check(*LIBRARY)
