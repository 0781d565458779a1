"""frisket.sdpa has the arguments and the results of torch's scaled_dot_product_attention."""

import contextlib
import inspect
import weakref

import numpy as np
import pytest
import torch
from support.tiers import default_only
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as theirs

import frisket as fk
from frisket.integrations import sdpa as front
from frisket.integrations.sdpa import parted, row_ranges
from frisket.runtime.attention.attention import Attention

LENGTH, DIM = 40, 16
CLOSE = {"rtol": 2e-6, "atol": 5e-6}
PLACE = torch.arange(LENGTH)
DOCUMENTS = (PLACE[:, None] // 16 == PLACE // 16).tril()
BIAS = -0.1 * (PLACE[:, None] - PLACE).abs()


def arrays(*shape, kv=None, grad=True):
    torch.manual_seed(0)
    shapes = (shape, kv or shape, kv or shape)
    return tuple(torch.randn(*s, LENGTH, DIM, requires_grad=grad) for s in shapes)


def check(q, k, v, mask=None, learned=False, **keywords):
    """Output and gradients equal torch's in float64; `mask` may be learned."""
    found = []
    for f, dtype in ((fk.sdpa, None), (theirs, torch.float64)):
        qkv = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (q, k, v)]
        m = mask
        if learned or (isinstance(mask, torch.Tensor) and type(mask) is torch.Tensor and mask.is_floating_point()):
            m = mask.detach().to(dtype or mask.dtype).requires_grad_(learned)
        out = f(*qkv, attn_mask=m, **keywords)
        torch.manual_seed(1)
        out.backward(torch.randn(out.shape, dtype=torch.float64).to(out.dtype))
        found.append([out, *(x.grad for x in qkv), *([m.grad] if learned else [])])
    for ours, other in zip(*found, strict=True):
        assert ours.shape == other.shape
        torch.testing.assert_close(ours.double(), other, **CLOSE)


MASKS = {
    "rows and keys": DOCUMENTS,
    "batch": torch.stack([DOCUMENTS, PLACE[:, None] >= PLACE])[:, None],
    "heads": torch.stack([DOCUMENTS, PLACE[:, None] < PLACE + 5])[None],
    "batch and heads": torch.stack([DOCUMENTS, ~DOCUMENTS, DOCUMENTS.T, DOCUMENTS | DOCUMENTS.T]).view(2, 2, 40, 40),
    "padding": (torch.tensor([[30], [17]]) > PLACE)[:, None, None],
    "one axis of rows": (PLACE % 3 > 0)[:, None],
    "expanded": DOCUMENTS.expand(2, 2, LENGTH, LENGTH),
    "all": torch.ones(LENGTH, LENGTH, dtype=torch.bool),
    "none": torch.zeros(LENGTH, LENGTH, dtype=torch.bool),
    "random": torch.from_numpy(np.random.default_rng(0).random((2, 1, LENGTH, LENGTH)) > 0.5),
    "bias": BIAS,
    "bias and causal": BIAS.masked_fill(PLACE[:, None] < PLACE, -torch.inf),
    "-inf": torch.zeros(LENGTH, LENGTH).masked_fill(~DOCUMENTS, -torch.inf),
    "finfo.min": torch.zeros(LENGTH, LENGTH).masked_fill(~DOCUMENTS, torch.finfo(torch.float32).min),
    "bias of heads": torch.stack([BIAS, 2 * BIAS])[None],
    "a row of -inf": torch.zeros(LENGTH, LENGTH).index_fill_(0, torch.tensor([3]), -torch.inf),
}


@pytest.mark.parametrize("name", MASKS)
def test_sdpa_under_a_mask_equals_that_of_torch(name):
    check(*arrays(2, 2), MASKS[name])


def test_sdpa_has_the_parameters_of_torch():
    assert str(inspect.signature(fk.sdpa)).startswith("(query")
    names = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
    have = inspect.signature(fk.sdpa).parameters
    assert list(have) == names
    assert [have[n].default for n in names[3:]] == [None, 0.0, False, None, False]


SHAPES = {  # of q, and of k and v
    "two axes": ((), ()),
    "three axes": ((4,), (4,)),
    "five axes": ((3, 2, 2), (3, 2, 2)),
    "six axes": ((2, 1, 3, 2), (2, 1, 3, 2)),
    "one batch entry of keys": ((2, 2), (1, 2)),
    "one head of keys": ((2, 2), (2, 1)),
    "fewer axes of keys": ((2, 2), (2,)),
    "one head of queries": ((2, 1), (2, 3)),
    "one batch entry of queries": ((1, 2), (3, 2)),
    "leading axes of keys": ((3, 1, 2), (1, 2, 2)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_takes_every_number_of_axes(name, masked):
    shape, kv = SHAPES[name]
    check(*arrays(*shape, kv=kv), DOCUMENTS if masked else None, is_causal=not masked)


def test_sdpa_takes_masks_of_five_axes():
    qkv = arrays(3, 2, 2)
    for shape in ((3, 2, 2), (3, 1, 1), (1, 2, 2), (1, 1, 2), (2, 1)):
        check(*qkv, torch.from_numpy(np.random.default_rng(0).random((*shape, LENGTH, LENGTH)) > 0.5))


@pytest.mark.parametrize("kv", [4, 2, 1])
def test_sdpa_shares_heads_of_keys_in_groups(kv):
    check(*arrays(2, 4, kv=(2, kv)), DOCUMENTS, enable_gqa=True)
    check(*arrays(4, kv=(kv,)), enable_gqa=True)


def test_sdpa_repeats_keys_and_values_each_by_themselves():
    q, k, v = arrays(2, 4, kv=(2, 2))
    check(q, k, v[:, :1], enable_gqa=True)


@pytest.mark.parametrize("q_len", [1, 7, LENGTH])
@pytest.mark.parametrize("kv_len", [1, 7, LENGTH])
def test_causal_sdpa_begins_at_the_top_left(q_len, kv_len):
    q, k, v = arrays(2, 2)
    check(q[:, :, :q_len], k[:, :, :kv_len], v[:, :, :kv_len], is_causal=True)


def test_sdpa_applies_a_mask_and_causality_both():
    mask = PLACE[:, None] // 16 == PLACE // 16
    check(*arrays(2, 2), mask & (PLACE[:, None] >= PLACE))
    qkv = arrays(2, 2, grad=False)
    assert torch.equal(fk.sdpa(*qkv, mask, is_causal=True), fk.sdpa(*qkv, mask.tril()))


def test_sdpa_reads_biases_of_torch_without_their_entries():
    q, k, v = arrays(2, 2, grad=False)
    for made in (causal_upper_left, causal_lower_right):
        for q_len, kv_len in ((LENGTH, LENGTH), (9, LENGTH)):
            args = q[:, :, :q_len], k[:, :, :kv_len], v[:, :, :kv_len], made(q_len, kv_len)
            torch.testing.assert_close(fk.sdpa(*args), theirs(*args), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mask", ["rows and keys", "bias and causal"])
def test_sdpa_takes_every_float_dtype(dtype, mask):
    q, k, v = (x.to(dtype) for x in arrays(2, 2, grad=False))
    mask = MASKS[mask]
    masks = [mask] if mask.dtype == torch.bool else [mask.to(dtype), mask.float()]
    want = theirs(q.double(), k.double(), v.double(), mask if mask.dtype == torch.bool else mask.double())
    for one in masks:
        found = fk.sdpa(q, k, v, one)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), want, rtol=0, atol={2: 2e-2, 8: 1e-6}[dtype.itemsize])


def test_sdpa_takes_values_of_another_size():
    q, k, v = arrays(2, 2)
    check(q, k, v[..., :5], DOCUMENTS)


@pytest.mark.parametrize("scale", [0.3, 1, 0.0])
def test_sdpa_takes_a_scale(scale):
    check(*arrays(2, 2), DOCUMENTS, scale=scale)


def test_learned_scale_and_masked_sdpa_have_gradients():
    q, k, v = arrays(2, 2)
    for mask in (DOCUMENTS, BIAS):
        found = []
        for f in (fk.sdpa, lambda q, k, v, m, scale: theirs(q * scale, k, v, m, scale=1.0)):
            scale = torch.tensor(0.3, requires_grad=True)
            f(q, k, v, mask, scale=scale).square().sum().backward()
            found.append(scale.grad)
        torch.testing.assert_close(*found, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["bias", "bias of heads", "bias and causal", "finfo.min"])
def test_float_masks_get_gradients(name):
    check(*arrays(2, 2), MASKS[name], learned=True)


def test_float_masks_of_one_batch_entry_or_row_get_gradients():
    check(*arrays(3, 2, 2), torch.randn(2, 1, LENGTH), learned=True)
    check(*arrays(2, 2), torch.randn(LENGTH, 1), learned=True)


def test_gradient_of_an_expanded_mask_has_every_entry():
    q, k, v = arrays(2, 2, grad=False)
    found = []
    for f in (fk.sdpa, theirs):
        bias = BIAS.expand(2, 2, LENGTH, LENGTH).requires_grad_()
        found.append(torch.autograd.grad(f(q, k, v, bias).square().sum(), bias)[0])
    torch.testing.assert_close(*found, **CLOSE)


def test_sdpa_drops_weights_with_torchs_generator():
    q, k, v = arrays(2, 2, grad=False)
    v = torch.ones_like(v)
    torch.manual_seed(3)
    first = fk.sdpa(q, k, v, DOCUMENTS, dropout_p=0.5)
    second = fk.sdpa(q, k, v, DOCUMENTS, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(fk.sdpa(q, k, v, DOCUMENTS, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    assert abs(float(first.mean()) - 1) < 0.2
    check(*arrays(2, 2), dropout_p=1.0)


def test_sdpa_of_no_queries_keys_or_batch_is_that_of_torch():
    q, k, v = arrays(2, 2, grad=False)
    for args in ((q[:, :, :0], k, v), (q, k[:, :, :0], v[:, :, :0]), (q[:0], k[:0], v[:0])):
        assert torch.equal(fk.sdpa(*args), theirs(*args))
        mask = torch.ones(args[0].shape[2], args[1].shape[2], dtype=torch.bool)
        for m in (mask, mask.float()):
            assert torch.equal(fk.sdpa(*args, m), theirs(*args, m))


def test_nan_in_a_mask_reaches_the_result():
    q, k, v = arrays(1, 1, grad=False)
    mask = torch.zeros(LENGTH, LENGTH)
    mask[5, 7] = torch.nan
    found = fk.sdpa(q, k, v, mask).isnan().any(-1)[0, 0]
    assert found.nonzero().flatten().tolist() == [5]


# -- a mask that is remembered ----------------------------------------------------------------------------------------


def write_in_place(mask):
    mask[:, :8] = 0


def write_through_numpy(mask):
    mask.numpy()[:, :8] = 0


def write_through_data(mask):
    mask.data[:, :8] = 0


@pytest.mark.parametrize("write", [write_in_place, write_through_numpy, write_through_data])
@pytest.mark.parametrize("name", ["rows and keys", "random", "bias"])
@pytest.mark.parametrize("inference", [False, True])
def test_sdpa_sees_writes_to_a_mask(write, name, inference):
    q, k, v = arrays(2, 2, grad=False)
    with torch.inference_mode(inference):
        mask = MASKS[name].clone()
        mask = mask[0, 0] if mask.ndim == 4 else mask
        for _ in range(3):
            torch.testing.assert_close(fk.sdpa(q, k, v, mask), theirs(q, k, v, mask), **CLOSE)
        write(mask)
        torch.testing.assert_close(fk.sdpa(q, k, v, mask), theirs(q, k, v, mask), **CLOSE)
        mask.copy_(MASKS[name].reshape(-1, LENGTH, LENGTH)[0])
        torch.testing.assert_close(fk.sdpa(q, k, v, mask), theirs(q, k, v, mask), **CLOSE)


def test_sdpa_sees_another_mask_at_the_same_address():
    q, k, v = arrays(1, 1, grad=False)
    memory, rng, addresses = np.empty(LENGTH * LENGTH, bool), np.random.default_rng(0), set()
    for _ in range(6):
        memory[:] = rng.random(memory.shape) > 0.5
        mask = torch.from_numpy(memory).view(LENGTH, LENGTH)
        addresses.add(mask.data_ptr())
        torch.testing.assert_close(fk.sdpa(q, k, v, mask), theirs(q, k, v, mask), **CLOSE)
        del mask
    assert len(addresses) == 1


def test_equal_masks_share_one_plan(monkeypatch):
    planned = []
    plan = Attention.plan
    monkeypatch.setattr(Attention, "plan", lambda *given, **named: planned.append(1) or plan(*given, **named))
    q, k, v = arrays(2, 2, grad=False)
    front._latest.clear()
    for mask in (DOCUMENTS, DOCUMENTS.clone(), DOCUMENTS.expand(2, 2, LENGTH, LENGTH), DOCUMENTS.float().log()):
        for _ in range(2):
            fk.sdpa(q, k, v, mask)
    assert len(planned) == 2  # Bools, and Floats
    fk.sdpa(q, k, v, DOCUMENTS, scale=0.5)
    assert len(planned) == 3


def test_copies_of_masks_are_bounded(monkeypatch):
    q, k, v = arrays(1, 1, grad=False)
    for most, bound in ((4, front.COPIED), (2, 2 * LENGTH * LENGTH + 2), (1, 0)):
        monkeypatch.setattr(front, "COPIED", bound)
        front._latest.clear()
        for i in range(6):
            fk.sdpa(q, k, v, torch.arange(LENGTH * LENGTH).view(LENGTH, LENGTH) % 7 != i)
        ((latest, *_),) = front._latest._entries.values()
        assert len(latest) == most


def test_masks_of_a_device_are_remembered_by_version(monkeypatch):
    monkeypatch.setattr(front, "version_of", lambda x: x._version)  # what it is on a device
    mask = DOCUMENTS.clone()
    first = front.by_version(mask, mask[None, None].detach())
    assert first.mask == "seen[0, 0, q, k]"
    assert front.by_version(mask, mask[None, None].detach()) is first
    mask[0, 0] = False
    assert front.by_version(mask, mask[None, None].detach()) is not first
    gone = weakref.ref(mask)
    del mask
    assert gone() is None  # nothing that is remembered holds it


RANGES = {
    "all": (PLACE[:, None] >= PLACE - 99, None),
    "causal": (PLACE[:, None] >= PLACE, "q >= k"),
    "window": ((PLACE[:, None] >= PLACE) & (PLACE[:, None] - PLACE < 5), "k >= first[0, 0, q] & q >= k"),
    "documents": (DOCUMENTS, "k >= first[0, 0, q] & q >= k"),
    "chunks": (PLACE[:, None] // 16 == PLACE // 16, "k >= first[0, 0, q] & k < last[0, 0, q]"),
    "prefix": ((PLACE[:, None] >= PLACE) | (PLACE < 9), "k < last[0, 0, q]"),
    "two ranges": ((PLACE[:, None] >= PLACE) & ((PLACE[:, None] - PLACE < 5) | (PLACE < 2)), "seen"),
    "left padding": ((PLACE >= 7) & (PLACE[:, None] >= PLACE), "k >= first[0, 0, q] & q >= k"),
    "none": (PLACE[:, None] < PLACE - 99, "k < last[0, 0, q]"),
}


@pytest.mark.parametrize("name", RANGES)
def test_row_ranges_are_read_from_a_dense_mask(name):
    dense, text = RANGES[name]
    found = row_ranges(dense[None, None])
    if text == "seen":
        assert found is None
        return
    assert found[0] == text
    made = np.ones((LENGTH, LENGTH)) if text is None else fk.mask(text, **found[1]).dense(LENGTH, LENGTH)[0, 0]
    np.testing.assert_array_equal(made, dense)


@pytest.mark.parametrize("name", ["documents", "all", "two ranges"])
def test_large_masks_are_read_by_ranges(name, monkeypatch):
    monkeypatch.setattr(front, "LOOKED_AT", LENGTH * LENGTH)
    front._latest.clear()
    dense, text = RANGES[name]
    for mask in (dense, torch.zeros(LENGTH, LENGTH).masked_fill(~dense, -torch.inf)):
        check(*arrays(2, 2), mask)
        facts = front._facts_of(mask, mask[None, None])
        assert facts.mask == ("seen[0, 0, q, k]" if text == "seen" else text)
        assert facts.score is None
    front._latest.clear()


def test_row_ranges_of_equal_heads_are_one_table():
    dense = torch.stack([DOCUMENTS, DOCUMENTS.T])[:, None].expand(2, 3, LENGTH, LENGTH).contiguous()
    text, tables = row_ranges(dense)
    assert text == "k >= first[b, 0, q] & k < last[b, 0, q]"
    assert [x.shape for x in tables.values()] == [(2, 1, LENGTH)] * 2


def test_hidden_entries_of_a_bias_need_a_visible_one():
    low = torch.finfo(torch.float32).min
    bias = torch.tensor([[0.0, low, low / 2, -torch.inf], [low, low, -torch.inf, -torch.inf]])
    seen, bias = parted(bias)
    assert seen.tolist() == [[True, False, False, False], [True, True, False, False]]
    assert bias[1].tolist() == [low / 2, low / 2, -torch.inf, -torch.inf]


def test_row_of_least_numbers_is_the_mean_of_all_values():
    """torch's forward agrees; its gradient on the CPU is as many times too large as there are keys."""
    x, mask = arrays(1, 1)[0], torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min)
    found = [
        (y, *torch.autograd.grad(y.square().sum(), x))
        for y in (fk.sdpa(x, x, x, mask), torch.softmax(x @ x.mT * DIM**-0.5 + mask, -1) @ x)
    ]
    torch.testing.assert_close(*found, **CLOSE)
    torch.testing.assert_close(found[0][0], theirs(x, x, x, mask), **CLOSE)


# -- where torch watches ----------------------------------------------------------------------------------------------


IN_GRAPHS = ["rows and keys", "expanded", "bias and causal", "padding", None]


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", default_only(IN_GRAPHS, "expanded", "bias and causal", None))
def test_sdpa_is_one_graph_of_torch_compile(name, dynamic):
    qkv = arrays(2, 2)
    mask = None if name is None else MASKS[name]
    call = torch.compile(
        lambda *x: fk.sdpa(*x, is_causal=name is None), backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    with torch.no_grad():
        torch.testing.assert_close(call(*qkv, mask), theirs(*qkv, mask, is_causal=name is None), **CLOSE)
    found = []
    for f in (call, lambda *x: theirs(*x, is_causal=name is None)):
        for x in qkv:
            x.grad = None
        f(*qkv, mask).square().sum().backward()
        found.append([x.grad for x in qkv])
    torch.testing.assert_close(*found, **CLOSE)


def test_learned_mask_gets_a_gradient_in_a_graph():
    q, k, v = arrays(2, 2, grad=False)
    bias = BIAS.clone().requires_grad_()
    found = []
    for f in (torch.compile(fk.sdpa, backend="aot_eager", fullgraph=True), theirs):
        found.append(torch.autograd.grad(f(q, k, v, bias).square().sum(), bias)[0])
    torch.testing.assert_close(*found, **CLOSE)


def test_sdpa_under_vmap_equals_that_of_torch():
    q, k, v = (torch.randn(3, 2, 2, LENGTH, DIM) for _ in range(3))
    masks = torch.stack([DOCUMENTS, DOCUMENTS.T, DOCUMENTS | DOCUMENTS.T])
    for mask, axis in ((None, None), (DOCUMENTS, None), (masks, 0)):
        found, want = (torch.vmap(f, in_dims=(0, 0, 0, axis))(q, k, v, mask) for f in (fk.sdpa, theirs))
        torch.testing.assert_close(found, want, **CLOSE)
    found, want = (torch.vmap(f)(q[:, 0], k[:, 0], v[:, 0]) for f in (fk.sdpa, theirs))
    torch.testing.assert_close(found, want, **CLOSE)


def test_sdpa_of_meta_and_fake_tensors_has_a_shape():
    q = torch.empty(2, 3, 2, LENGTH, DIM, device="meta")
    mask = torch.empty(LENGTH, LENGTH, device="meta", dtype=torch.bool)
    assert fk.sdpa(q, q, q[..., :5], mask).shape == (2, 3, 2, LENGTH, 5)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 2, LENGTH, DIM)
        for m in (None, torch.empty(LENGTH, LENGTH, dtype=torch.bool), torch.empty(2, 1, 1, LENGTH)):
            assert fk.sdpa(q, q, q, m).shape == q.shape


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_sdpa_runs_without_gradients(mode):
    q, k, v = arrays(2, 2, grad=False)
    with mode():
        for mask in (None, DOCUMENTS, BIAS, BIAS.clone().requires_grad_(not torch.is_inference_mode_enabled())):
            torch.testing.assert_close(fk.sdpa(q, k, v, mask), theirs(q, k, v, mask), **CLOSE)


def test_sdpa_under_autocast_has_its_dtype():
    q, k, v = arrays(2, 2, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        for mask in (None, DOCUMENTS, BIAS):
            found = fk.sdpa(q, k, v, mask)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, theirs(q, k, v, mask), rtol=0, atol=2e-2)


def nested(*lengths):
    parts = [torch.randn(n, 2, DIM) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2), parts


@pytest.mark.parametrize("causal", [False, True])
def test_nested_tensors_see_their_own_sequence(causal):
    q, parts = nested(9, 23)
    found = fk.sdpa(q, q, q, is_causal=causal)
    for one, part in zip(found.unbind(), parts, strict=True):
        x = part.transpose(0, 1)
        torch.testing.assert_close(one, theirs(x, x, x, is_causal=causal), **CLOSE)


# -- errors -----------------------------------------------------------------------------------------------------------

X = torch.randn(2, 2, LENGTH, DIM)
WRONG = {
    "attn_mask is torch.int32; it is Bools": lambda: fk.sdpa(X, X, X, DOCUMENTS.int()),
    "attn_mask has the shape \\[3, 1, 40, 40\\]; it broadcasts to .* = \\[2, 2, 40, 40\\]": lambda: fk.sdpa(
        X, X, X, DOCUMENTS.expand(3, 1, LENGTH, LENGTH)
    ),
    "attn_mask has the shape \\[40\\]": lambda: fk.sdpa(X, X, X, DOCUMENTS[0]),
    "attn_mask has the shape \\[1, 2, 2, 40, 40\\]": lambda: fk.sdpa(X, X, X, DOCUMENTS.expand(1, 2, 2, 40, 40)),
    "query \\[16\\], key .*: each has two axes or more": lambda: fk.sdpa(X[0, 0, 0], X, X),
    "4 query heads share 2 key heads and enable_gqa is False": lambda: fk.sdpa(torch.cat([X, X], 1), X, X),
    "is_causal is 1; it is True or False": lambda: fk.sdpa(X, X, X, is_causal=1),
    "dropout is 1.5": lambda: fk.sdpa(X, X, X, dropout_p=1.5),
    "dropout is -1": lambda: fk.sdpa(X, X, X, DOCUMENTS, dropout_p=-1),
    "q, k and v have dtypes float32, float64, float64": lambda: fk.sdpa(X, X.double(), X.double(), DOCUMENTS),
    "attn_mask is given, and q, k and v are nested tensors": lambda: fk.sdpa(*[nested(3, 5)[0]] * 3, DOCUMENTS),
    "nested tensor": lambda: fk.sdpa(*[torch.nested.nested_tensor([X[0], X[1, :, :5]])] * 3),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_of_sdpa_are_errors(message):
    with pytest.raises((fk.ShapeError, fk.ParameterError), match=message):
        WRONG[message]()


# -- in models --------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    held = staticmethod(theirs)

    def __init__(self):
        super().__init__()
        self.chosen = theirs

    def forward(self, q):
        looked_up = torch.nn.functional.scaled_dot_product_attention
        return [f(q, q, q) for f in (looked_up, theirs, self.held, self.chosen)]


def counted(monkeypatch):
    """How often frisket's attention is called from sdpa."""
    calls, inner = [], front.attend
    monkeypatch.setattr(front, "attend", lambda *given, **named: calls.append(1) or inner(*given, **named))
    return calls


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_sdpa_refuses_arrays_of_other_libraries(name):
    arrays = dict.fromkeys(("query", "key", "value"), torch.zeros(1, 2, 8, 16))
    with pytest.raises(fk.ParameterError, match=rf"{name} is ndarray; frisket\.sdpa takes tensors of torch"):
        fk.sdpa(**{**arrays, name: np.zeros((1, 2, 8, 16), np.float32)})


def test_sdpa_for_replaces_every_name_of_a_model(monkeypatch):
    calls, layer = counted(monkeypatch), Layer()
    before = layer(X)
    with fk.sdpa_for(layer) as places:
        torch.testing.assert_close(layer(X), before, **CLOSE)
    assert len(calls) == 4
    assert sorted(p.rpartition(".")[2] for p in places) == ["chosen", "held", "scaled_dot_product_attention", "theirs"]
    assert Layer.held is layer.chosen is theirs is torch.nn.functional.scaled_dot_product_attention is front.BUILTIN
    layer(X)
    assert len(calls) == 4


def test_sdpa_for_is_undone_after_an_error():
    with contextlib.suppress(KeyError), fk.sdpa_for():
        with fk.sdpa_for():
            assert torch.nn.functional.scaled_dot_product_attention is fk.sdpa
        assert torch.nn.functional.scaled_dot_product_attention is fk.sdpa
        raise KeyError
    assert torch.nn.functional.scaled_dot_product_attention is front.BUILTIN


def test_sdpa_takes_the_place_of_torchs_by_assignment(monkeypatch):
    layer = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(1, LENGTH, 32)
    want = layer(x, x, x, need_weights=False, attn_mask=~DOCUMENTS)[0]
    calls = counted(monkeypatch)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fk.sdpa)
    masked = []
    inner = front._masked
    monkeypatch.setattr(front, "_masked", lambda *given: masked.append(1) or inner(*given))
    found = layer(x, x, x, need_weights=False, attn_mask=~DOCUMENTS)[0]
    torch.testing.assert_close(found, want, **CLOSE)
    assert masked == [1]
    assert not calls


def test_compiled_models_follow_sdpa_for(monkeypatch):
    """A model compiled before the block runs frisket's operator inside it, and torch's function after it."""
    seen = []

    def backend(graph, examples):
        seen.append([str(n.target) for n in graph.graph.nodes if "frisket" in str(n.target)])
        return graph

    def layer(q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    call = torch.compile(layer, backend=backend, fullgraph=True)
    want = call(X)
    with fk.sdpa_for():
        torch.testing.assert_close(call(X), want, **CLOSE)
    assert torch.equal(call(X), want)
    assert [len(names) for names in seen] == [0, 1]
