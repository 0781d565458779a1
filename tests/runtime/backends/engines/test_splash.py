"""Splash attention: Pallas' interpreter runs it here, and it equals the reference; its arguments show what the mask
shows, by an independent reading of its documentation."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import frisket as fk  # noqa: E402
from frisket.dsl.errors import BackendError  # noqa: E402
from frisket.lowering.engines.flags import Flags, flags_of  # noqa: E402
from frisket.lowering.engines.forms import EngineForm, form_of  # noqa: E402
from frisket.lowering.pipeline import simplified_program  # noqa: E402
from frisket.lowering.plan import Geometry  # noqa: E402
from frisket.runtime.backends.engines.proof import EngineCall  # noqa: E402
from frisket.runtime.backends.splash import SplashArguments, arguments  # noqa: E402
from frisket.runtime.calls.program import program_of  # noqa: E402

DOC = np.repeat([0, 1, 2], [100, 70, 86])
pytestmark = pytest.mark.filterwarnings("ignore:backend 'splash' runs in Pallas' interpreter")


def qkv(q_len: int, kv_len: int, dtype: str = "float32", dim: int = 64) -> list:
    draw = np.random.default_rng(0).standard_normal
    return [jax.numpy.asarray(draw((2, n, h, dim)).astype(dtype)) for n, h in ((q_len, 4), (kv_len, 2), (kv_len, 2))]


WHOLE = ("causal & window(30) & same(doc)", "2 * score", (256, 256), {"doc": DOC})
CASES = [
    ("full", None, (128, 256), {}),
    ("causal", None, (256, 256), {}),
    ("bottom_right & window(50)", "softcap(3)", (128, 256), {}),
    WHOLE,
    ("k < n[b]", None, (128, 256), {"n": [100, 230]}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mask", "score", "lengths", "given", "dtype"), [
    pytest.param(*case, dtype, marks=() if case is WHOLE else pytest.mark.exhaustive)
    for dtype in ("float32", "bfloat16") for case in CASES
])  # fmt: skip
def test_splash_is_the_oracle(mask: str, score: str | None, lengths: tuple, given: dict, dtype: str) -> None:
    report = fk.compile(mask, score, backend="splash", **given).check(
        *qkv(*lengths, dtype), gradients=dtype == "float32"
    )
    assert len(report.gradients) == (3 if dtype == "float32" else 0)  # by generated kernels, of splash's out and lse


def found(text: str, g: Geometry, score: str | None = None, dtype: str = "float32", **given: object) -> object:
    mask = fk.mask(text, **given)
    program = program_of(mask, None if score is None else fk.score(score), {})
    form = form_of(simplified_program(program).simplified)
    assert isinstance(form, EngineForm)
    flags = flags_of(form, g, program.scalars, program.tables)
    assert isinstance(flags, Flags), flags
    return arguments(flags, EngineCall(program, g, dtype, "jax", "tpu"))


def stand_in(a: SplashArguments, batch: int) -> np.ndarray:
    """What splash attention documents: keys from q + offset - left to q + offset + right, of the query's segment."""
    q, k = np.ogrid[: a.shape[0], : a.shape[1]]
    seen = np.ones((batch, *a.shape), bool)
    if a.window is not None:
        left, right = a.window
        seen &= (left is None or q + a.offset - left <= k) & (right is None or k <= q + a.offset + right)
    if a.segments is not None:
        seen &= a.segments[0][:, :, None] == a.segments[1][:, None, :]
    return seen


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("full", {}), ("causal", {}), ("bottom_right", {}), ("sliding(40, 7)", {}), ("window(9)", {}),
        ("chunked(50)", {}), ("chunked_causal(50)", {}), ("k < n[b]", {"n": np.array([30, 256])}),
        ("bottom_right & flash_window(30, 0)", {}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lengths", [(256, 256), (128, 256)])
def test_arguments_show_what_the_mask_shows(text: str, given: dict, lengths: tuple[int, int]) -> None:
    g = Geometry(2, 4, 2, *lengths, 64, 64, 0.125)
    if "chunked" in text and lengths[0] != lengths[1]:
        return  # their last chunks are cut, and need a window of their own
    made = found(text, g, **given)
    assert isinstance(made, SplashArguments), made
    want = fk.mask(text, **given).dense(*lengths, batch=2)[:, 0]
    np.testing.assert_array_equal(stand_in(made, 2), np.broadcast_to(want, (2, *lengths)))


@pytest.mark.parametrize(
    ("text", "score", "lengths", "dtype", "said"),
    [
        ("causal", None, (100, 100), "float32", "lengths are whole tiles of 128 there, not 100 and 100"),
        ("bottom_right", None, (256, 128), "float32", "some query sees no key"),
        ("q < 5", None, (128, 128), "float32", "some query sees no key"),
        ("causal", "alibi", (128, 128), "float32", "splash attention has no ALiBi"),
        ("q + n[b] + 2 >= k", None, (128, 128), "float32", "one window for all batch entries"),
        (
            "causal",
            "0.3 * score",
            (128, 128),
            "bfloat16",
            "rounds bfloat16 where the scale, 0.0375, is no power of two",
        ),
    ],
)
def test_splash_engine_refuses_unsupported_calls(
    text: str, score: str | None, lengths: tuple, dtype: str, said: str
) -> None:
    given = {"n": np.array([-1, 3])} if "n[b]" in text else {}
    made = found(text, Geometry(2, 4, 4, *lengths, 64, 64, 0.125), score, dtype, **given)
    assert isinstance(made, str)
    assert said in made


def test_calls_that_splash_refuses() -> None:
    q, k, v = qkv(128, 128)
    with pytest.raises(BackendError, match=r"`q >= k \| k <= 3` bounds neither q - k nor k"):
        fk.compile("q >= k | k < 4", backend="splash")(q, k, v)
    with pytest.raises(BackendError, match="does not do the largest score of each row"):
        fk.compile("causal", backend="splash")(q, k, v, return_max=True)
    with pytest.raises(BackendError, match="sinks are the generated kernels'"):
        fk.compile("causal", backend="splash")(q, k, v, sinks=0.5)


def test_splash_under_jit_and_grad() -> None:
    q, k, v = qkv(128, 128, dim=16)
    grads = []
    for backend in ("splash", "xla"):
        att = fk.compile("causal", backend=backend)
        grads.append(jax.jit(jax.grad(lambda q, k, v, att=att: (att(q, k, v) ** 2).sum()))(q, k, v))
    np.testing.assert_allclose(*grads, rtol=2e-4, atol=2e-5)


def test_cudnn_on_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX rounds cuDNN's lse to the dtype of q: gradients, and results merged by it, would be wrong.
    Once JAX does not, cuDNN may become an engine here."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    q, k, v = qkv(128, 128, "bfloat16")
    with pytest.raises(BackendError, match="backend 'cudnn' does not take jax arrays"):
        fk.compile("causal", backend="cudnn")(q, k, v)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *given: True)

    def attend(q: object, k: object, v: object) -> object:
        how = {"implementation": "cudnn", "return_residual": True}
        return jax.nn.dot_product_attention(q, k, v, **how)

    out, lse = jax.eval_shape(attend, q, k, v)
    assert lse.dtype == out.dtype == jax.numpy.bfloat16
