"""`invariant=True`: the bits of a row in any batch, chunk, order of padding, number of threads, and form of a cache."""

import numpy as np
import pytest
from support.native.compiler import needs_compiler

import frisket as fk
from frisket.dsl.errors import BackendError, ParameterError, ShapeError
from frisket.runtime.backends.base import RECORDS, backends_of
from frisket.runtime.backends.registry import ORDER

torch = pytest.importorskip("torch")
pytestmark = [needs_compiler, pytest.mark.usefixtures("automatic")]
LENGTH, LONG = 640, 2000  # more than one part of 512 keys, and positions that tables of masks have
FROM_FIRST = "causal & window(w) & k >= first"
CHUNKS = (1, 2, 3, 5, 16, 17, 64, 100, 512)
DOC = np.arange(LONG) // 90
# window and document masks, a mask with many runs, score mods, and a score mod that short calls simplify away
PROGRAMS = {
    "causal": ("causal", None, {}),
    "window": ("causal & window(w)", None, {"w": 100}),
    "documents": ("causal & doc[q] == doc[k]", "alibi", {"doc": DOC}),
    "holes": ("causal & (q - k) % 3 != 1", "softcap(20)", {}),
    "far": ("causal", "where(q - k > 600, score - 1, score)", {}),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
OTHERS = [pytest.param(x, marks=pytest.mark.exhaustive) for x in DTYPES if x != "float32"]


def drawn(batch, heads, kv_heads, dim, v_dim=None, dtype=torch.float32, length=LENGTH):
    draw = torch.Generator().manual_seed(3)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, v_dim or dim)
    return [torch.randn(batch, n, length, d, generator=draw, dtype=torch.float64).to(dtype) for n, d in shapes]


def equal(found, wanted, what):
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y), f"{what}: off by {(x - y).abs().max():.1e}"


def chunks_of(length):
    """Places of chunks: each size at the end, and at a place inside."""
    return [(end - n, end) for n in CHUNKS for end in {length, max(n, 65), max(n, 513)} if n <= end]


def check_chunks(att, qkv, more=None):
    """Each chunk of queries of one entry of the batch, over the keys before it, has the rows of the whole call."""
    q, k, v = qkv
    more = {"sizes": (q.shape[0], q.shape[1], LONG, LONG), **(more or {})}
    out, lse = att(q, k, v, return_lse=True, **more)
    for start, end in chunks_of(q.shape[2]):
        arrays = q[1:2, :, start:end], k[1:2, :, :end], v[1:2, :, :end]
        found = att(*arrays, return_lse=True, origin=(0, 0, start, 0), **more)
        equal(found, (out[1:2, :, start:end], lse[1:2, :, start:end]), (start, end))
    return out


@pytest.mark.parametrize("name", ["window", "far"])
def test_chunks_of_any_size_have_the_bits_of_a_prompt(name):
    mask, score, values = PROGRAMS[name]
    qkv = drawn(2, 8, 2, 64)
    out = check_chunks(fk.compile(mask, score, invariant=True, **values), qkv)
    usual = fk.compile(mask, score, backend="library", **values)(*qkv, sizes=(2, 8, LONG, LONG))
    torch.testing.assert_close(out, usual, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(8, 2, 64), (4, 4, 40, 24), (6, 1, 128), (3, 3, 20, 33)], ids=str)
def test_chunks_have_equal_bits_in_each_program_and_dtype(name, dtype, sizes):
    mask, score, values = PROGRAMS[name]
    check_chunks(fk.compile(mask, score, invariant=True, **values), drawn(2, *sizes, dtype=DTYPES[dtype]))


def test_batches_of_one_to_eight_have_equal_rows():
    att, (q, k, v) = fk.compile("causal", invariant=True), drawn(8, 8, 2, 64)
    out = att(q, k, v)
    for n in range(1, 9):
        assert torch.equal(att(q[:n], k[:n], v[:n]), out[:n])
        assert torch.equal(att(q[8 - n :], k[8 - n :], v[8 - n :]), out[8 - n :])


def test_threads_and_heads_of_a_group_change_no_bit():
    att, (q, k, v) = fk.compile("causal", invariant=True), drawn(2, 8, 2, 64)
    last = {"origin": (0, 0, LENGTH - 1, 0)}
    out, threads = att(q, k, v), torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            assert torch.equal(att(q, k, v), out)
            assert torch.equal(att(q[:, :, -1:], k, v, **last), out[:, :, -1:])
    finally:
        torch.set_num_threads(threads)
    for h in range(8):  # alone, without the others of its group
        alone = q[:, h : h + 1], k[:, h // 4 : h // 4 + 1], v[:, h // 4 : h // 4 + 1]
        assert torch.equal(att(*alone)[:, 0], out[:, h])
        assert torch.equal(att(alone[0][:, :, -1:], *alone[1:], **last)[:, 0], out[:, h, -1:])


def padded(x, left, length):
    """Entries of a batch behind so many tokens of padding, and padding up to a length."""
    whole = torch.full((*x.shape[:2], length, x.shape[3]), 9.0, dtype=x.dtype)
    for b, n in enumerate(left):
        whole[b, :, n : n + x.shape[2]] = x[b]
    return whole


@pytest.mark.parametrize("dtype", ["float32", *OTHERS])
def test_padding_on_either_side_changes_no_bit(dtype):
    """Positions say where a sequence begins: that of its first token is 512 wherever it lies."""
    att = fk.compile(FROM_FIRST, invariant=True, w=300)
    qkv = drawn(4, 8, 2, 64, dtype=DTYPES[dtype], length=600)
    sizes = (4, 8, LONG, LONG)
    out = att(*qkv, first=512, origin=(0, 0, 512, 512), sizes=sizes)
    assert torch.equal(att(*qkv, first=0, sizes=sizes), out)
    left = [0, 5, 64, 130]
    whole, starts = [padded(x, left, 740) for x in qkv], 512 - np.array(left)
    found = att(*whole, first=512, origin=(0, 0, starts, starts), sizes=sizes)
    for b, n in enumerate(left):
        assert torch.equal(found[b, :, n : n + 600], out[b])
        q, k, v = (x[b : b + 1, :, : n + 600] for x in whole)  # a step behind left padding
        step = att(q[:, :, -1:], k, v, first=512, origin=(0, 0, 512 + 599, 512 - n), sizes=sizes)
        assert torch.equal(step[0], out[b, :, -1:])


def test_largest_scores_sinks_and_dropout_keep_their_bits():
    att, (q, k, v) = fk.compile("causal", invariant=True, dropout=0.2), drawn(2, 4, 2, 64)
    options = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "seed": 7, "return_lse": True, "return_max": True}
    whole = att(q, k, v, **options)
    for n in (1, 70):
        arrays = q[:, :, -n:], k, v
        found = att(*arrays, origin=(0, 0, LENGTH - n, 0), **options)
        equal([*found], [x[:, :, -n:] for x in whole], n)


def test_rows_that_see_no_key_stay_zero():
    att, (q, k, v) = fk.compile(FROM_FIRST, invariant=True, w=LENGTH, first=600), drawn(1, 2, 1, 64)
    k[:, :, :64], v[:, :, :64] = torch.nan, torch.nan  # hidden keys may be anything
    out, lse = att(q, k, v, return_lse=True)
    assert (out[:, :, :600] == 0).all()
    assert lse[:, :, :600].eq(-torch.inf).all()
    assert torch.equal(att(q[:, :, -1:], k, v, origin=(0, 0, LENGTH - 1, 0)), out[:, :, -1:])
    assert out.isfinite().all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_neighbours_of_seen_keys_may_be_nan(dtype):
    att, (q, k, v) = (
        fk.compile("causal & k >= 301 & k % 8 != 4", invariant=True),
        drawn(1, 4, 2, 40, dtype=DTYPES[dtype]),
    )
    hidden = (torch.arange(LENGTH) < 301) | (torch.arange(LENGTH) % 8 == 4)
    k[:, :, hidden], v[:, :, hidden] = torch.nan, torch.nan
    out = att(q, k, v)
    assert out.isfinite().all()
    for n in (1, 2, 5, 17):
        assert torch.equal(att(q[:, :, -n:], k, v, origin=(0, 0, LENGTH - n, 0)), out[:, :, -n:])


def test_gradients_of_invariant_calls_are_the_usual_ones():
    qkv = [x.requires_grad_() for x in drawn(1, 4, 2, 64, length=150)]
    weight = torch.randn(1, 4, 150, 64)

    def gradients(score, **options):
        return torch.autograd.grad((fk.attention(*qkv, "causal", score, **options) * weight).sum(), qkv)

    for score in (None, "softcap(5)"):
        for found, wanted in zip(gradients(score, invariant=True), gradients(score, backend="aten"), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_graphs_of_torch_keep_the_bits():
    att, (q, k, v) = fk.compile("causal", invariant=True), drawn(1, 4, 2, 64)
    with torch.no_grad():
        assert torch.equal(torch.compile(att, backend="eager")(q, k, v), att(q, k, v))
        call = torch.compile(lambda *x: fk.attention(*x, "causal", invariant=True), backend="eager")
        assert torch.equal(call(q, k, v), att(q, k, v))


# -- what is refused ----------------------------------------------------------------------------------


def test_backends_without_one_order_of_sums_refuse():
    q, k, v = drawn(1, 2, 2, 16, length=8)
    fit = {b.name for b in backends_of() if ORDER not in b.features}
    assert fit == {"cpp", "triton"}
    for name in ("aten", "dense", "sdpa"):
        with pytest.raises(BackendError, match="one order of sums for each row"):
            fk.attention(q, k, v, "causal", invariant=True, backend=name)
        assert RECORDS[name].features[ORDER]


def test_automatic_choice_goes_on_or_says_why(monkeypatch):
    from frisket.runtime.backends import registry

    q, k, v = drawn(1, 2, 2, 16, length=8)
    monkeypatch.setattr(registry, "automatic", lambda *_: "aten")
    assert registry.choose(None, "torch", "cpu", "float32", invariant=True) == "cpp"
    monkeypatch.setattr(registry, "ranked", lambda *_: ())
    with pytest.raises(BackendError, match="leave out the backend, or invariant"):
        fk.attention(q, k, v, "causal", invariant=True)


def test_calls_without_an_invariant_form_are_refused():
    q, k, v = drawn(1, 2, 2, 16, length=8)
    with pytest.raises(ParameterError, match="leave out `weight`"):
        fk.compile("causal", weight="relu2", divide="count", invariant=True)
    with pytest.raises(ParameterError, match="reorder moves them"):
        fk.compile("causal", reorder="auto", invariant=True)
    with pytest.raises(ParameterError, match="invariant is 1; it is True or False"):
        fk.attention(q, k, v, invariant=1)
    pages = torch.zeros(1, 1, dtype=torch.int32)
    pool = [x.new_zeros(1, 2, 16, 16) for x in (k, v)]
    with pytest.raises(ShapeError, match="keys begin at position 5"):
        fk.attention(q, *pool, "causal", pages=pages, origin=(0, 0, 5, 5), invariant=True)


def test_options_show_invariant_and_travel_in_specs():
    att = fk.compile("causal", invariant=True)
    assert att.options.chosen() == [("tuning", "invariant")]
    assert att.options.tuning.choices == {"invariant": True}
    assert att.options != fk.compile("causal").options


@pytest.mark.parametrize("compiled", [False, True])
def test_nested_tensors_are_refused(compiled):
    """A sequence began in another tile where the one before it was longer."""
    att = fk.compile("causal", invariant=True, backend="cpp")
    rows = [torch.randn(n, 2, 8) for n in (45, 30)]
    q = torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    call = torch.compile(att, backend="eager") if compiled else att
    with pytest.raises(ParameterError, match="invariant=True takes no nested tensors"):
        call(q, q, q)
