"""flex_attention's arguments, results, errors, and what it keeps between calls."""

from __future__ import annotations

import gc
import os
import types
import weakref
from enum import Enum

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.attention.flex_attention as theirs  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.dsl.errors import BackendError, FrisketError  # noqa: E402
from frisket.flex import AuxRequest, create_block_mask, flex_attention  # noqa: E402
from frisket.runtime.calls import arrays as arrays_of_calls  # noqa: E402
from frisket.runtime.flex import score_mod  # noqa: E402
from frisket.runtime.flex import score_mod as score_mods  # noqa: E402


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "aten")
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def arrays(s=24, heads=4, kv_heads=4, batch=2, dim=16, v_dim=16):
    g = torch.Generator().manual_seed(4)
    shapes = (batch, heads, s, dim), (batch, kv_heads, s, dim), (batch, kv_heads, s, v_dim)
    return [torch.randn(x, generator=g) for x in shapes]


def causal(b, h, q, k):
    return q >= k


def mask_of(fn=causal, batch=None, heads=None, s=24, make=create_block_mask):
    return make(fn, batch, heads, s, s, device="cpu")


# -- shapes and results -------------------------------------------------------------------------------------------


def test_shared_heads_other_values_and_one_batch_entry_of_keys():
    q, k, v = arrays(kv_heads=2, v_dim=8)
    relative = lambda s, b, h, q, k: s + (q - k) * h / 16  # noqa: E731 - of 70, rounding alone moves weights by 1e-5
    for batch in (2, 1):
        given = q, k[:batch], v[:batch], relative
        want, lse = theirs.flex_attention(
            *given, mask_of(make=theirs.create_block_mask, batch=2), 0.3, True, return_lse=True
        )
        out, found = flex_attention(*given, mask_of(batch=2), 0.3, True, True)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(found, lse)
    k, v = k[:1].requires_grad_(), v[:1].requires_grad_()
    flex_attention(q, k, v, enable_gqa=True).sum().backward()
    assert k.grad.shape == k.shape
    torch.testing.assert_close(v.grad.sum(), torch.tensor(2.0 * 4 * 24 * 8))


@pytest.mark.parametrize("mod", [None, lambda score, b, h, q, k: score + q - k])
def test_scale_that_learns_gets_the_gradient_of_a_factor(mod):
    q, k, v = arrays(s=8, dim=4, v_dim=4)
    mask = mask_of(s=8)

    def loss(scale, factor=1.0):
        return flex_attention(q * factor, k, v, mod, mask, scale=scale).square().sum()

    factor = torch.tensor(0.3, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(1.0, factor), factor)
    scale = torch.nn.Parameter(torch.tensor(0.3))
    loss(scale).backward()
    torch.testing.assert_close(scale.grad, expected)
    torch.testing.assert_close(torch.func.grad(loss)(torch.tensor(0.3)), expected)
    torch.testing.assert_close(loss(torch.tensor(0.3)), loss(0.3))
    for scale in ("1", [1, 2], torch.ones(1, requires_grad=True)):
        with pytest.raises(FrisketError, match="it is one finite number, or an array of one without axes"):
            loss(scale)


def test_five_arguments_by_place():
    q, k, v = arrays()
    want = flex_attention(q, k, v, lambda score, b, h, q, k: score + 2 * q - k)
    for mod in (lambda s, b, h, k, q: s + 2 * k - q, lambda s, *at: s + 2 * at[2] - at[3],
                lambda s, b, h, q_idx, kv_idx, k=2: s + k * q_idx - kv_idx):  # fmt: skip
        torch.testing.assert_close(flex_attention(q, k, v, mod), want)
    with pytest.raises(FrisketError, match="takes score, b; "):
        flex_attention(q, k, v, lambda score, b: score)


def test_flex_call_returns_the_requested_results():
    q, k, v = arrays()
    block_mask = mask_of(lambda b, h, q, k: q - k > 5)
    out = flex_attention(q, k, v, None, block_mask)
    both = flex_attention(q, k, v, None, block_mask, return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert type(both) is tuple
    for request in (AuxRequest(), AuxRequest(lse=True), AuxRequest(max_scores=True), AuxRequest(True, True)):
        found, aux = flex_attention(q, k, v, None, block_mask, return_aux=request)
        assert type(aux) is theirs.AuxOutput
        assert [x is not None for x in aux] == list(request)
        torch.testing.assert_close(found, out)
    assert (aux.lse[:, :, :6] == -torch.inf).all()
    assert (aux.max_scores[:, :, :6] == -torch.inf).all()
    assert (out[:, :, :6] == 0).all()
    scores = (q @ k.mT / 4).masked_fill(~(torch.arange(24)[:, None] - torch.arange(24) > 5), -torch.inf)
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))


def test_a_mask_for_any_batch_entry_is_read_for_each():
    first = lambda b, h, q, k: (q >= k) & ((b == 0) | (k < 4))  # noqa: E731
    out = flex_attention(*arrays(), None, mask_of(first))
    torch.testing.assert_close(out, flex_attention(*arrays(), None, mask_of(first, batch=2)))
    assert not torch.equal(out, flex_attention(*arrays(), None, mask_of()))


MIXED = [
    (torch.float32, torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32, torch.float32),
    (torch.float16, torch.bfloat16, torch.float16), (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.float8_e4m3fn, torch.bfloat16), (torch.bfloat16, torch.float8_e5m2, torch.float8_e5m2),
]  # fmt: skip


@pytest.mark.parametrize("dtypes", [x if i in (0, 4) else pytest.param(x, marks=pytest.mark.exhaustive)
                                     for i, x in enumerate(MIXED)])  # fmt: skip
def test_keys_and_values_of_another_dtype(dtypes):
    """Results and gradients in the dtypes that torch gives; its own CPU attention has no gradients."""
    given = [x.to(d) for x, d in zip(arrays(), dtypes, strict=True)]
    mask = mask_of()
    want = theirs.flex_attention(*given, block_mask=theirs.create_block_mask(causal, None, None, 24, 24, "cpu"))
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    for run in (flex_attention, compiled) if dtypes == MIXED[0] else (flex_attention,):
        out = run(*given, block_mask=mask)
        assert out.dtype == want.dtype == dtypes[0]
        wide = [x.double().requires_grad_() for x in given]
        exact = flex_attention(*wide, block_mask=mask)
        errors = [(x.double() - exact).abs().max() for x in (out, want)]
        assert errors[0] <= 2 * errors[1] + 1e-6  # torch rounds weights and values to query's dtype
        leaves = [x.detach().requires_grad_() for x in given]
        run(*leaves, block_mask=mask).float().square().sum().backward()
        exact.square().sum().backward()
        for x, y in zip(leaves, wide, strict=True):
            assert x.grad.dtype == x.dtype
            share = (x.grad.double() - y.grad).norm() / y.grad.norm()
            assert share < (0.1 if x.dtype.itemsize == 1 or torch.float8_e5m2 in dtypes else 0.02)


# -- errors -------------------------------------------------------------------------------------------------------

Q, K, V = arrays()
TABLE = torch.zeros(24)
REFUSED = {
    "heads": (lambda: flex_attention(*arrays(kv_heads=2)), ValueError, "query has 4 heads, key and value 2\n.*gqa"),
    "heads that do not divide": (
        lambda: flex_attention(*arrays(kv_heads=3), enable_gqa=True), ValueError, "key and value 3\n.*divides"),
    "dims": (lambda: flex_attention(Q, K[..., :8], V), ValueError, "an embedding of 16, key of 8"),
    "keys": (lambda: flex_attention(Q, K, V[:, :, :9]), ValueError, r"key is .*\(2, 4, 24\), value \(2, 4, 9\)"),
    "batch": (lambda: flex_attention(torch.cat([Q, Q]), K, V), ValueError, "4 batch entries, key and value 2"),
    "numpy": (lambda: flex_attention(Q.numpy(), K, V), NotImplementedError, "query is a ndarray\n.*torch.Tensor"),
    "no head size": (lambda: flex_attention(Q[..., :0], K[..., :0], V), ValueError, "query has a head size of 0"),
    "sparse": (lambda: flex_attention(Q.to_sparse(), K, V), NotImplementedError, "query is sparse.*\n.*to_dense"),
    "devices": (
        lambda: flex_attention(Q.to("meta"), K, V), ValueError,
        "query is on meta, key on cpu, value on cpu\n  move them to one"),
    "aux": (lambda: flex_attention(Q, K, V, return_aux=True), ValueError, r"return_aux is True\n.*AuxRequest\(lse"),
    "axes": (lambda: flex_attention(Q[0], K[0], V[0]), NotImplementedError, "query has 3 axes"),
    "nested": (
        lambda: flex_attention(torch.nested.nested_tensor([Q[0]]), K, V), NotImplementedError,
        r"query is a nested tensor of layout torch.strided, with 4 axes\n.*\(sequences, heads, j, dim\)"),
    "one nested": (
        lambda: flex_attention(Q, torch.nested.nested_tensor([K[0]]), V), NotImplementedError,
        "key is a nested tensor, and query is none\n.*all or none"),
    "dtypes": (lambda: flex_attention(Q, K.long(), V), NotImplementedError, "key torch.int64, value torch.float32"),
    "lse twice": (lambda: flex_attention(Q, K, V, return_lse=True, return_aux=AuxRequest()), ValueError, "both given"),
    "longer mask": (
        lambda: flex_attention(Q, K, V, None, mask_of(s=32)), ValueError,
        r"created for q_len=32 and kv_len=32, query and key have 24 and 24\n.*_adjust\(24, 24\)"),
    "shorter mask": (lambda: flex_attention(Q, K, V, None, mask_of(s=16)), ValueError, "it says nothing of the rest"),
    "mask's batch": (
        lambda: flex_attention(Q, K, V, None, mask_of(batch=5)), ValueError, "for 5 batch entries, query has 2"),
    "mask's heads": (lambda: flex_attention(Q, K, V, None, mask_of(heads=3)), ValueError, "for 3 heads, query has 4"),
    "torch's mask's heads": (
        lambda: flex_attention(Q, K, V, None, mask_of(heads=3, make=theirs.create_block_mask)), ValueError,
        "for 3 heads, query has 4"),
    "a function as the mask": (lambda: flex_attention(Q, K, V, None, causal), ValueError, "create_block_mask"),
    "a mask as score_mod": (lambda: flex_attention(Q, K, V, causal), RuntimeError, "returns a Bool; is it a mask?"),
    "no score": (
        lambda: flex_attention(Q, K, V, lambda b, h, q, k: (q - k).float()), RuntimeError, "score_mod takes no score"),
    "Bool": (lambda: flex_attention(Q, K, V, lambda s, b, h, q, k: q > k), RuntimeError, "returns a Bool"),
    "Int": (lambda: flex_attention(Q, K, V, lambda s, b, h, q, k: q - k), RuntimeError, "returns an Int\n.*Float"),
    "three arguments": (
        lambda: flex_attention(Q, K, V, lambda a, c, d: a), AssertionError, "takes a, c, d; .* a score_mod five"),
    "atan": (lambda: flex_attention(Q, K, V, lambda s, b, h, q, k: torch.atan(s)), RuntimeError, "atan"),
    "in place": (
        lambda: flex_attention(Q, K, V, lambda s, b, h, q, k: s.mul_(2)), RuntimeError, "`mul_` changes .* in place"),
    "negative gather": (
        lambda: flex_attention(Q, K, V, lambda s, b, h, q, k: s + TABLE[q - k]), IndexError,
        r"reads `TABLE` at -1 on axis 0, which has entries 0..23, at query 0, key 1 .*torch would read from the end"),
    "gather beyond": (
        lambda: flex_attention(Q, K, V, lambda s, b, h, q, k: s + TABLE[q + k], mask_of()), IndexError,
        "at 24 on axis 0, .*at query 12, key 12"),
    "device": (
        lambda: flex_attention(*(x.to("meta") for x in (Q, K, V)), None, mask_of()), RuntimeError,
        r"query is on meta, block_mask on cpu\n  block_mask.to\('meta'\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_flex_calls_refuse_bad_arguments(name):
    call, kind, text = REFUSED[name]
    for _ in range(2):  # what is kept between calls forgets no error
        with pytest.raises(FrisketError, match="(?s)" + text) as found:
            call()
        assert isinstance(found.value, kind)


def test_hidden_gathers_are_no_gathers():
    out = flex_attention(Q, K, V, lambda s, b, h, q, k: s + TABLE[q - k], mask_of())
    torch.testing.assert_close(out, flex_attention(Q, K, V, None, mask_of()))


# -- what is kept between calls -----------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch):
    """The functions traced since."""
    seen = []
    trace = score_mods.trace
    monkeypatch.setattr(score_mods, "trace", lambda fn, *rest, **more: seen.append(fn) or trace(fn, *rest, **more))
    return seen


def alibi(slopes, factor=1.0):
    return lambda score, b, h, q, k: score + factor * slopes[h] * (k - q)


def dense(score):
    """Causal attention, its scores with something added."""
    keep = torch.ones(24, 24).tril().bool()
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, torch.where(keep, score, -torch.inf))


def distance():
    return torch.arange(24) - torch.arange(24)[:, None]


def test_flex_mod_of_new_tensors_is_not_traced_again(traces):
    block_mask = mask_of()
    for seed in range(3):
        slopes = torch.nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(seed)))
        fresh = (slopes * 2).exp()  # a tensor of the graph at hand
        out = flex_attention(Q, K, V, alibi(fresh), block_mask)
        torch.testing.assert_close(out, dense(fresh[:, None, None] * distance()))
        out.sum().backward()
        want = torch.autograd.grad(dense((slopes * 2).exp()[:, None, None] * distance()).sum(), slopes)[0]
        torch.testing.assert_close(slopes.grad, want, rtol=1e-4, atol=1e-4)
    assert len(traces) == 1


@pytest.mark.parametrize("view", [False, True])
def test_tables_that_were_one_tensor_may_differ_later(view, traces):
    one, two = torch.full((24,), 1.0), torch.full((24,), 2.0)

    def mod(x, y):
        return lambda score, b, h, q, k: score * x[k] + y[k] * k

    shared = (one[:], one[:]) if view else (one, one)
    for x, y in (shared, (one, two), (two, one), (two, two), (one, two)):
        want = dense((Q @ K.mT / 4) * (x[0] - 1) + y[0] * torch.arange(24.0))
        torch.testing.assert_close(flex_attention(Q, K, V, mod(x, y), mask_of()), want)
    assert len(traces) <= 2  # of one table, and of two


def test_numbers_that_change_are_seen(traces):
    slopes, factor, held = torch.ones(4), 0.5, {"shift": 1.0}

    def mod(score, b, h, q, k):
        return score + factor * slopes[h] * (k - q) + held["shift"] * (k - q)

    for factor, shift in ((0.5, 1.0), (0.25, 1.0), (0.25, 3.0)):
        held["shift"] = shift
        torch.testing.assert_close(flex_attention(Q, K, V, mod, mask_of()), dense((factor + shift) * distance()))
    assert len(traces) == 3


class Held(torch.nn.Module):
    """Its width is an attribute that is read through a property."""

    def __init__(self):
        super().__init__()
        self.wide, self.bias = 2.0, torch.nn.Parameter(torch.zeros(4))

    @property
    def width(self):
        return self.wide

    def mod(self, score, b, h, q, k):
        return score + self.width * (k - q) + self.bias[h]


def test_a_slice_that_is_captured_may_change(traces):
    table, part = torch.arange(48.0), slice(24)
    mod = lambda score, b, h, q, k: score + table[part][k]  # noqa: E731
    for part in (slice(24), slice(None, 24), slice(24, None)):
        want = dense(torch.arange(24.0) + (part.start or 0))
        torch.testing.assert_close(flex_attention(Q, K, V, mod, mask_of()), want)
    assert len(traces) == 2


def test_attributes_that_change_are_seen(traces):
    held = Held()
    for wide in (2.0, 2.0, 5.0):
        held.wide = wide
        torch.testing.assert_close(flex_attention(Q, K, V, held.mod, mask_of()), dense(wide * distance()))
    assert len(traces) == 2


def test_flex_mod_over_numpy_arrays_is_traced_at_each_call(traces):
    table = np.zeros(24, np.float32)
    mod = lambda score, b, h, q, k: score + table[k]  # noqa: E731
    flex_attention(Q, K, V, mod, mask_of())
    table[:] = torch.arange(24)
    torch.testing.assert_close(flex_attention(Q, K, V, mod, mask_of()), dense(torch.arange(24.0)))
    assert len(traces) == 2


def test_tensors_changed_in_place_are_seen(traces):
    place, bias = torch.arange(24), torch.zeros(24)
    mod = lambda score, b, h, q, k: score + bias[place[k]]  # noqa: E731
    shown = torch.arange(24)
    block_mask = mask_of(lambda b, h, q, k: (q >= k) & (shown[k] >= 0))
    for change in (lambda: None, lambda: bias.copy_(torch.randn(24)), lambda: place.copy_(place.flip(0))):
        change()
        torch.testing.assert_close(flex_attention(Q, K, V, mod, block_mask), dense(bias[place]))
    shown[0] = -1
    changed = flex_attention(Q, K, V, mod, block_mask)
    assert (changed[:, :, 0] == 0).all()
    torch.testing.assert_close(changed[:, :, 1:], flex_attention(Q, K, V, mod, mask_of(lambda b, h, q, k: (q >= k) & (k > 0)))[:, :, 1:])  # fmt: skip # noqa: E501
    assert len(traces) == 1


class Settings:
    wide = 1.0


class Numbers(list):
    """Lists of a class of one's own."""


class Width:
    """A number that is read by special methods, which a score mod calls without naming them."""

    def __init__(self):
        self.wide = Settings.wide

    def __getitem__(self, _):
        return self.wide

    def __float__(self):
        return self.wide

    def of(self):
        return self.wide


class Below(Width):
    def of(self):
        return super().of()


class Class(type):
    width = property(lambda cls: Settings.wide)


class Named(metaclass=Class):
    def __getattribute__(self, name):
        return Settings.wide


class Layer(torch.nn.Module):
    wide = 1.0

    def forward(self, score, b, h, q, k):
        return score + self.wide * (k - q)


class Member(Enum):
    ONE = "one"

    def width(self):
        return Settings.wide


class Descriptor:
    def __get__(self, held, _):
        return held.wide


@pytest.mark.parametrize(
    "kind",
    "class module list environment item float super descriptor metaclass attribute made layers hook mode member bound "
    "attribute_of_a_function".split(),
)
def test_flex_mod_sees_changed_numbers_of_any_holder(kind, monkeypatch):
    module, numbers, below, layer = types.ModuleType("settings"), Numbers([1.0]), Below(), Layer()
    layers, named, Below.width = torch.nn.ModuleList([layer]), Named(), Descriptor()
    member, got = Member.ONE, [1.0]
    get = got.__getitem__
    mods = {
        "class": lambda score, b, h, q, k: score + Settings.wide * (k - q),
        "module": lambda score, b, h, q, k: score + module.wide * (k - q),
        "list": lambda score, b, h, q, k: score + numbers[0] * (k - q),
        "environment": lambda score, b, h, q, k: score + float(os.environ["WIDE"]) * (k - q),
        "item": lambda score, b, h, q, k: score + below[0] * (k - q),
        "float": lambda score, b, h, q, k: score + float(below) * (k - q),
        "super": lambda score, b, h, q, k: score + below.of() * (k - q),
        "descriptor": lambda score, b, h, q, k: score + below.width * (k - q),
        "metaclass": lambda score, b, h, q, k: score + Named.width * (k - q),
        "attribute": lambda score, b, h, q, k: score + named.width * (k - q),
        "made": lambda score, b, h, q, k: score + Width().wide * (k - q),
        "layers": lambda score, b, h, q, k: layers[0](score, b, h, q, k),
        "hook": Layer(),
        "member": lambda score, b, h, q, k: score + member.width() * (k - q),
        "bound": lambda score, b, h, q, k: score + get(0) * (k - q),
        "attribute_of_a_function": lambda score, b, h, q, k: score + distance.wide * (k - q),
        "mode": lambda score, b, h, q, k: score + (1.0 if torch.is_grad_enabled() else 3.0) * (k - q),
    }
    for wide in (1.0, 3.0):
        monkeypatch.setattr(Settings, "wide", wide)
        monkeypatch.setenv("WIDE", str(wide))
        module.wide = numbers[0] = below.wide = layer.wide = got[0] = distance.wide = wide
        if wide > 1:
            mods["hook"].register_forward_hook(lambda layer, given, score: score + 2.0 * (given[4] - given[3]))
        with torch.set_grad_enabled(wide == 1):
            torch.testing.assert_close(flex_attention(Q, K, V, mods[kind], mask_of()), dense(wide * distance()))


def test_objects_that_are_compared_are_not_traced_anew(traces):
    below, layers = Below(), torch.nn.ModuleList([Layer()])
    for _ in range(3):
        mod = lambda score, b, h, q, k: layers[0](score * below[0] * below.of(), b, h, q, k)  # noqa: E731
        flex_attention(Q, K, V, mod, mask_of())
    assert len(traces) == 1


WRITES = {  # which torch does not count
    "numpy": lambda x: x.numpy().__setitem__(..., x.numpy()[::-1].copy()),
    "data": lambda x: x.data.copy_(x.flip(0)),
    "dlpack": lambda x: torch.from_dlpack(x.numpy()).copy_(x.flip(0)),
    "other memory": lambda x: setattr(x, "data", x.flip(0)),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("large", [1 << 26, 9])
def test_tensors_written_to_without_a_count_are_seen(how, large, monkeypatch):
    monkeypatch.setattr(arrays_of_calls, "COPIED", large)  # bytes from which a digest is kept
    place, shown, wide = torch.arange(24), torch.arange(24), torch.tensor([2, 5])
    mod = lambda score, b, h, q, k: score + 0.1 * place[k]  # noqa: E731
    looked = lambda score, b, h, q, k: score + (wide[0].item() * (k - q))  # noqa: E731
    block_mask = mask_of(lambda b, h, q, k: (q >= k) & (shown[k] < 12))
    before = block_mask.kv_num_blocks, block_mask.mask
    for _ in range(2):
        flex_attention(Q, K, V, mod, block_mask), flex_attention(Q, K, V, looked, mask_of())
    for x in (place, shown, wide):
        WRITES[how](x)
    assert shown[0] == 23
    want = mask_of(lambda b, h, q, k: (q >= k) & (k >= 12))
    got = flex_attention(Q, K, V, mod, block_mask)
    torch.testing.assert_close(got, flex_attention(Q, K, V, "score + 0.1 * (23 - k)", want))
    torch.testing.assert_close(flex_attention(Q, K, V, looked, mask_of()), dense(5 * distance()))
    assert (block_mask.mask.dense(24, 24) == want.mask.dense(24, 24)).all()
    assert block_mask.mask != before[1]


def test_values_that_the_trace_read_are_watched(traces):
    flag, bias = torch.tensor(True), torch.ones(24)

    def mod(score, b, h, q, k):
        return score + (k - q) if flag else score + bias[k]

    torch.testing.assert_close(flex_attention(Q, K, V, mod, mask_of()), dense(distance().float()))
    flag.fill_(False)
    torch.testing.assert_close(flex_attention(Q, K, V, mod, mask_of()), dense(torch.ones(24)))
    assert len(traces) == 2


def test_torchs_mask_with_another_mask_mod():
    block_mask = theirs.create_block_mask(causal, None, None, 24, 24, device="cpu")
    flex_attention(Q, K, V, None, block_mask)
    held = {"behind": torch.tensor(0)}
    block_mask.mask_mod = lambda b, h, q, k: q == k + held["behind"]
    for behind in range(3):  # another number in the same tensor, and then another tensor
        held["behind"] = held["behind"].fill_(behind) if behind < 2 else torch.tensor(behind)
        found = flex_attention(Q, K, V, None, block_mask)
        torch.testing.assert_close(found, torch.nn.functional.pad(V, (0, 0, behind, 0))[:, :, :24])


def test_names_of_mask_and_score_mod_do_not_meet():
    def mask(t):
        return lambda b, h, q, k: t[q] >= k

    def score(t):
        return lambda s, b, h, q, k: s + t[q] * k

    places, factors = torch.arange(24), torch.linspace(0, 1, 24)
    out = flex_attention(Q, K, V, score(factors), mask_of(mask(places)))
    torch.testing.assert_close(out, dense(factors[:, None] * torch.arange(24)))


def test_score_mods_of_ours_keep_their_own_tensors():
    for _ in range(2):
        slopes = torch.nn.Parameter(torch.ones(4))
        mod = fk.score(alibi(slopes))
        flex_attention(Q, K, V, mod, mask_of()).sum().backward()
        assert slopes.grad.abs().sum() > 0
    torch.testing.assert_close(flex_attention(Q, K, V, "score + (k - q)", mask_of()), dense(distance().float()))


def test_flex_calls_keep_no_tensor_alive():
    def call():
        bias, shown = torch.randn(4, 24, 24), torch.ones(24, 24, dtype=torch.bool)
        block_mask = mask_of(lambda b, h, q, k: (q >= k) & shown[q, k])
        flex_attention(Q, K, V, lambda s, b, h, q, k: s + bias[h, q, k], block_mask)
        return [weakref.ref(x) for x in (bias, shown, block_mask.tensor_mask)]

    alive = call()
    gc.collect()
    assert [x() for x in alive] == [None] * 3


@pytest.mark.parametrize("learned", [False, True])
def test_tables_of_a_device_are_planned_there(monkeypatch, learned):
    """As on a GPU: tables of Ints stay, and reach the planner as they are."""
    monkeypatch.setattr(score_mod, "on_device", lambda x: True)
    document, factor = torch.arange(24) // 5, torch.linspace(0, 1, 24)
    block_mask = mask_of(lambda b, h, q, k: (q >= k) & (document[q] == document[k]))
    mod = (lambda s, b, h, q, k: s + factor[k]) if learned else (lambda s, b, h, q, k: s + document[k])
    for _ in range(2):
        for _ in range(2):
            out = flex_attention(Q, K, V, mod, block_mask)
            added = torch.where(document[:, None] == document, factor if learned else document, -torch.inf)
            torch.testing.assert_close(out, dense(added))
        document.copy_(torch.arange(24) // 9)


# -- transforms ---------------------------------------------------------------------------------------------------


def test_flex_attention_works_under_torch_transforms():
    block_mask, slopes = mask_of(), torch.linspace(0, 1, 4)
    out = flex_attention(Q, K, V, alibi(slopes), block_mask)
    mapped = torch.vmap(lambda s: flex_attention(Q, K, V, alibi(s), block_mask))(torch.stack([slopes, 0 * slopes]))
    torch.testing.assert_close(mapped, torch.stack([out, flex_attention(Q, K, V, None, block_mask)]))

    def loss(slopes, run=flex_attention):
        return run(Q, K, V, alibi(slopes), block_mask).square().sum()

    want = torch.autograd.functional.jacobian(loss, slopes)
    torch.testing.assert_close(torch.func.grad(loss)(slopes), want)
    slopes.requires_grad_()
    torch.utils.checkpoint.checkpoint(loss, slopes, use_reentrant=False).backward()
    torch.testing.assert_close(slopes.grad, want)
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(Q, K, V, alibi(slopes), block_mask).dtype == torch.bfloat16
    hessian = torch.autograd.functional.hessian(loss, slopes.detach())
    torch.testing.assert_close(hessian, torch.func.hessian(loss)(slopes.detach()), rtol=1e-5, atol=1e-5)


def test_backends_that_do_not_run_here(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "triton")
    with pytest.raises(BackendError, match="backend 'triton' does not run here"):
        flex_attention(Q, K, V)
