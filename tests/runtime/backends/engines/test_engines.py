"""Engines: torch's SDPA runs here and equals the reference, gradients and lse too; cuDNN's arguments are what its
documentation says of the mask; and the choice is a proof, shown, and refused in words."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import frisket as fk  # noqa: E402
from frisket.dsl.errors import BackendError  # noqa: E402
from frisket.lowering.engines.flags import Flags, flags_of  # noqa: E402
from frisket.lowering.engines.forms import EngineForm, form_of  # noqa: E402
from frisket.lowering.pipeline import simplified_program  # noqa: E402
from frisket.lowering.plan import Geometry  # noqa: E402
from frisket.runtime.backends import sdpa  # noqa: E402
from frisket.runtime.backends.base import RECORDS, register  # noqa: E402
from frisket.runtime.backends.cudnn import CudnnArguments, fitted  # noqa: E402
from frisket.runtime.backends.engines import SquareMask, proof, square  # noqa: E402
from frisket.runtime.backends.engines.proof import EngineCall, choose_engine  # noqa: E402
from frisket.runtime.calls.options import CallArgs  # noqa: E402
from frisket.runtime.calls.program import program_of  # noqa: E402
from frisket.runtime.torch.op import engine_call  # noqa: E402
from frisket.runtime.torch.ready import PreparedCall  # noqa: E402

KNOWN = [("full", None), ("causal", None), ("k < 33", None), ("causal & k < 33", None), ("k >= 5 & k < 40", None),
         ("causal", "2 * score"), ("full", "score / 3")]  # fmt: skip


def facts(mask: fk.Mask | None, g: Geometry, score: fk.ScoreMod | None = None, **more: object) -> EngineCall:
    how = {"dtype": "bfloat16", "framework": "torch", "platform": "cuda", **more}
    return EngineCall(program_of(mask, score, {}), g, **how)  # type: ignore[arg-type]


def flags(call: EngineCall) -> Flags:
    form = form_of(simplified_program(call.program).simplified)
    assert isinstance(form, EngineForm), form
    found = flags_of(form, call.geometry, call.program.scalars, call.program.tables)
    assert isinstance(found, Flags), found
    return found


def place(q_len: int, kv_len: int, **more: object) -> Geometry:
    return replace(Geometry(2, 4, 2, q_len, kv_len, 64, 64, 0.125), **more)  # type: ignore[arg-type]


# -- SDPA, which runs here --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(("mask", "score"), KNOWN)
def test_sdpa_is_the_oracle(mask: str, score: str | None, dtype: str, layout: str) -> None:
    """Results, lse, and gradients of both. SDPA rounds bfloat16 gradients of every query head before it adds those of
    a group: one draw in thirty, dv misses the bound of `check`, twice the error of dense attention, by a hair."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, dtype=getattr(torch, dtype)) for h, n in ((4, 50), (2, 70), (2, 70)))
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    report = fk.compile(mask, score, backend="sdpa").check(q, k, v, layout=layout)
    assert set(report.gradients) == {"dq", "dk", "dv"}


@pytest.mark.parametrize("mask", ["causal", "k < 33"])
def test_gradients_of_sdpa_without_lse(mask: str) -> None:
    """The engine's own backward, without the wider arrays that the gradient of lse takes."""
    arrays = [torch.randn(2, h, 40, 16, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    cotangent = torch.randn(2, 4, 40, 16, dtype=torch.float64)
    found, want = (
        torch.autograd.grad(fk.compile(mask, backend=b)(*arrays), arrays, cotangent) for b in ("sdpa", "aten")
    )
    for got, wanted in zip(found, want, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("mask", "score", "said"),
    [
        ("bottom_right", None, "causal from the bottom right: SDPA begins a causal mask at the first query"),
        ("causal & window(4)", None, "window 3 to the left from the top left: SDPA has no window"),
        ("q + 3 >= k & k >= 5", None, "some query sees no key, and SDPA says nothing about its result"),
        ("q // 7 == k // 7", None, "documents as cu_seqlens of 18 sequences: SDPA has no documents"),
        ("causal", "softcap(3)", "causal from the top left, soft cap 3: SDPA has no score mod"),
        ("q >= k | k < 4", None, "`q >= k | k <= 3` bounds neither q - k nor k, and compares no documents"),
        ("q < 4", None, "SDPA has no queries that see nothing"),
        ("causal & k < n[b]", None, "SDPA has one length for all batch entries"),
        ("full", "score + t[q]", "`score + t[q]` as a score mod is no factor, soft cap or penalty by distance"),
    ],
)
def test_sdpa_engine_refuses_unsupported_masks(mask: str, score: str | None, said: str) -> None:
    q, k, v = (torch.randn(2, 2, n, 16) for n in (50, 70, 70))
    values = {"n": [30, 70]} if "n[b]" in mask else {"t": np.ones(50, np.float32)} if score == "score + t[q]" else {}
    att = fk.compile(mask, score, backend="sdpa", **values)
    with pytest.raises(BackendError) as error:
        att(q, k, v)
    assert said in str(error.value)
    assert str(error.value).endswith("leave out the backend")


def test_named_engine_refuses_sinks_and_largest_scores() -> None:
    """Sinks, and the largest score of a row: of a named engine an error, of one that was chosen the others'."""
    q, k, v = torch.randn(3, 1, 2, 30, 16)
    att = fk.compile("causal", backend="sdpa")
    for how, what in (({"sinks": 0.5}, "sinks"), ({"return_max": True}, "the largest score")):
        with pytest.raises(BackendError, match=what):
            att(q, k, v, **how)
    att(q, k, v)
    with pytest.raises(BackendError, match="sinks"):
        att(q, k, v, sinks=0.5)  # the same kind of call, which is known by now
    with pytest.raises(BackendError, match="dropout is drawn by position"):
        fk.compile("causal", backend="sdpa", dropout=0.1)(q, k, v, seed=1)


# -- the choice -------------------------------------------------------------------------------------


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA is taken on the CPU wherever it is proved."""
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    row = proof.CostRow(engine="sdpa", platform="cpu", dtypes=("float32",))
    monkeypatch.setattr(proof, "COSTS", (row,))


@pytest.mark.usefixtures("chosen")
def test_an_engine_is_chosen_and_shown() -> None:
    q, k, v = (torch.randn(1, 2, 30, 16, requires_grad=True) for _ in range(3))
    att = fk.compile("causal")
    stages = att.stages(q, k, v)
    assert (stages.target.backend, stages.source) == ("sdpa", "")
    assert stages.text("target") == "sdpa: causal; proved"
    out, lse = att(q, k, v, return_lse=True)
    want = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    att.check(q.detach(), k.detach(), v.detach())
    *_, top = att(q, k, v, return_max=True)
    assert torch.isfinite(top).all()
    assert torch.equal(att(q, k, v, sinks=1.0), fk.compile("causal", engines=False)(q, k, v, sinks=1.0))


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("how", ["engines", "variable", "backend", "tile", "window"])
def test_when_generated_kernels_run(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 2, 30, 16)
    given: dict[str, object] = {
        "engines": {"engines": False}, "backend": {"backend": "aten"}, "tile": {"tile": 64},
    }.get(how, {})  # fmt: skip
    if how == "variable":
        monkeypatch.setenv("FRISKET_ENGINES", "0")
    att = fk.compile("causal & window(5)" if how == "window" else "causal", **given)
    stages = att.stages(q, k, v)
    assert stages.target.backend in ("cpp", "aten")
    att(q, k, v)
    (ready,) = (x for x in att.calls.values() if isinstance(x, PreparedCall))
    assert ready.generated is ready
    said = "sdpa: causal, window 4 to the left: SDPA has no window" if how == "window" else ""
    assert stages.engines == said


def test_a_warm_call_asks_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 2, 30, 16)
    att = fk.compile("causal")
    att(q, k, v)
    asked = "frisket.runtime.backends.engines.proof.choose_engine"
    monkeypatch.setattr(asked, lambda call, explain: pytest.fail("asked again"))
    att(q, k, v)


def test_a_call_proves_no_engine_that_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of decoding with a growing cache proved that SDPA could run it, which is slower there."""
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    monkeypatch.setattr("frisket.runtime.backends.engines.proof.prove", lambda *given: pytest.fail("proved"))
    q, k, v = torch.randn(3, 1, 2, 30, 16)
    att = fk.compile("causal")
    call = replace(att.call(CallArgs(q, k, v, None, None, None, False, None, None, None, {})), backend="cpp")
    assert engine_call(call, att.options) is None


def test_without_a_compiler_library_calls_have_sdpa_beside_them() -> None:
    g = place(256, 256, head_dim=64, v_dim=64)
    for generated, taken in (("cpp", None), ("aten", "sdpa")):
        found = choose_engine(facts(fk.mask("causal"), g, dtype="float32", platform="cpu", generated=generated))
        assert (found.proof and found.proof.backend) == taken
    assert "proved, and generated kernels are faster here" in str(
        choose_engine(facts(fk.mask("causal"), g, dtype="float32", platform="cpu", generated="cpp"))
    )


# -- cuDNN, by its documentation --------------------------------------------------------------------


def stand_in(mask: SquareMask, q_len: int, kv_len: int) -> np.ndarray:
    """What cuDNN and torch document: keys of the slice, and where it is causal, key j for queries from j on."""
    seen = np.zeros((q_len, kv_len), bool)
    part = seen[:, mask.start : mask.stop]
    part[:] = np.tri(*part.shape, dtype=bool) if mask.causal else True
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_a_square_mask_shows_what_the_mask_shows(seed: int) -> None:
    draw = np.random.default_rng(seed)
    q_len, kv_len, n, m = (int(x) for x in draw.integers(1, 20, 4))
    text = ["full", "causal", "k < n", "causal & k < n", "k >= n & k < n + m", "q + n >= k", "q + n >= k & k >= n",
            "sliding(n, m)"][seed % 8]  # fmt: skip
    names = {name: x for name, x in (("n", n), ("m", m)) if name in text.replace("sliding", "")}
    mask = fk.mask(text, **names)
    g = place(q_len, kv_len)
    call = facts(mask, g)
    found = square(flags(call), g, "it")
    dense = mask.dense(q_len, kv_len)[0, 0]
    if isinstance(found, str):
        wanted = [stand_in(SquareMask(c, a, z), q_len, kv_len) for c in (False, True)
                  for a in range(kv_len) for z in range(a + 1, kv_len + 1)]  # fmt: skip
        assert not dense.any(-1).all() or not any((dense == w).all() for w in wanted), (text, found)
    else:
        np.testing.assert_array_equal(stand_in(found, q_len, kv_len), dense)


@pytest.mark.parametrize(
    ("mask", "how", "found"),
    [
        ("causal", {}, CudnnArguments(SquareMask(True, 0, 2048), 0.125, (9, 0), False)),
        ("causal", {"deterministic": False}, CudnnArguments(SquareMask(True, 0, 2048), 0.125, (9, 0), True)),
        ("k < 99", {}, CudnnArguments(SquareMask(False, 0, 99), 0.125, (9, 0), False)),
    ],
)
def test_cudnn_arguments_follow_the_mask(mask: str, how: dict[str, object], found: CudnnArguments) -> None:
    call = facts(fk.mask(mask), place(2048, 2048), **how)
    assert fitted(flags(call), call, (9, 0)) == found


@pytest.mark.parametrize(
    ("mask", "g", "capability", "said"),
    [
        ("causal & k < 99", place(200, 200), (9, 0), "cuDNN has a causal mask of as many keys as queries"),
        ("causal", place(200, 200, head_dim=192, v_dim=128), (9, 0), "up to 256 on this GPU, not 192 and 128"),
        ("causal", place(200, 200, head_dim=256, v_dim=256), (8, 0), "up to 128 on this GPU, not 256"),
        ("causal", place(200, 200), (7, 5), "takes compute capability 8.0 and later"),
    ],
)
def test_cudnn_engine_refuses_unsupported_calls(mask: str, g: Geometry, capability: tuple[int, int], said: str) -> None:
    call = facts(fk.mask(mask), g)
    found = fitted(flags(call), call, capability)
    assert isinstance(found, str)
    assert said in found


def test_where_cudnn_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the table: long sequences on Hopper."""
    was = RECORDS["cudnn"]
    register(replace(was, reason=lambda framework: ""))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    try:
        for capability, length, taken in (((9, 0), 4096, "cudnn"), ((9, 0), 512, None), ((8, 0), 4096, None)):
            monkeypatch.setattr("torch.cuda.get_device_capability", lambda c=capability: c)
            call = facts(fk.mask("causal"), place(length, length), generated="triton", engines=("cudnn",))
            found = choose_engine(call)
            assert (found.proof and found.proof.backend) == taken, str(found)
        found = choose_engine(facts(fk.mask("causal & window(9)"), place(4096, 4096)))
        assert found.why["cudnn"] == "causal, window 8 to the left: cuDNN has no window"
    finally:
        register(was)


def test_operators_have_the_arguments_that_adapters_give() -> None:
    """Names and order of the operators' schemas, in this version of torch."""
    aten = torch.ops.aten
    for run, names in (
        (aten._scaled_dot_product_cudnn_attention, "query key value attn_bias compute_log_sumexp dropout_p is_causal"),
        (
            aten._scaled_dot_product_cudnn_attention_backward,
            "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q "
            "max_k dropout_p is_causal",
        ),
        (aten._scaled_dot_product_flash_attention, "query key value dropout_p is_causal"),
        (
            aten._scaled_dot_product_flash_attention_backward,
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
            "philox_offset",
        ),
    ):
        have = [a.name for a in run.default._schema.arguments]
        assert have[: len(names.split())] == names.split()
        assert "scale" in have


def test_sdpa_on_a_gpu_takes_squares_of_halves() -> None:
    call = facts(fk.mask("causal"), place(100, 200), dtype="bfloat16")
    assert sdpa.arguments(flags(call), call) == (
        "causal from the top left: SDPA has a causal mask of as many keys as queries"
    )
    call = facts(fk.mask("causal"), place(100, 100), dtype="float32")
    assert sdpa.arguments(flags(call), call) == ("SDPA's flash kernel takes float16 and bfloat16 on a GPU, not float32")
