"""What cannot be run is refused, with a way out. The texts are pinned."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize_per_tensor")


def t(*shape, **more):
    return torch.zeros(shape, **more)


Q, K = t(1, 4, 8, 16), t(1, 2, 8, 16)
READ = '\n  read as (batch, heads, length, head_dim); axes="bhsd" or "bshd" says otherwise'
DOC = np.zeros(8, int)


def shapes(*qkv):
    return "".join(f"\n  {n} {s}" for n, s in zip("qkv", qkv)) + READ


GOOD = ((1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16))

BAD = {
    "three axes": (
        lambda: fk.attention(t(4, 8, 16), K, K), fk.ShapeError,
        "q has 3 axes, shape (4, 8, 16); it needs four: (batch, heads, length, head_dim)\n"
        "  q[None] has one batch entry, q[:, None] one head; k and v likewise",
    ),
    "batch": (
        lambda: fk.attention(t(2, 4, 8, 16), K, K), fk.ShapeError,
        "q, k and v have 2, 1 and 1 batch entries" + shapes((2, 4, 8, 16), *GOOD[1:]),
    ),
    "keys": (
        lambda: fk.attention(Q, K, t(1, 2, 9, 16)), fk.ShapeError,
        "k and v have 8 and 9 keys" + shapes(*GOOD[:2], (1, 2, 9, 16)),
    ),
    "key heads": (
        lambda: fk.attention(Q, K, t(1, 4, 8, 16)), fk.ShapeError,
        "k and v have 2 and 4 heads" + shapes(*GOOD[:2], (1, 4, 8, 16)),
    ),
    "head size": (
        lambda: fk.attention(Q, t(1, 2, 8, 8), K), fk.ShapeError,
        "q and k have head sizes 16 and 8" + shapes(GOOD[0], (1, 2, 8, 8), GOOD[2]),
    ),
    "heads that do not divide": (
        lambda: fk.attention(Q, t(1, 3, 8, 16), t(1, 3, 8, 16)), fk.ShapeError,
        "4 query heads do not divide among 3 key heads" + shapes(GOOD[0], (1, 3, 8, 16), (1, 3, 8, 16)),
    ),
    "no gqa": (
        lambda: fk.attention(Q, K, K, enable_gqa=False), fk.ShapeError,
        "4 query heads share 2 key heads and enable_gqa is False" + shapes(*GOOD),
    ),
    "zero head size": (
        lambda: fk.attention(t(1, 4, 8, 0), K, K), fk.ShapeError,
        "a head size is zero" + shapes((1, 4, 8, 0), *GOOD[1:]),
    ),
    "dtypes": (
        lambda: fk.attention(Q, K.half(), K), fk.ShapeError,
        "q, k and v have dtypes float32, float16, float32; convert them to one",
    ),
    "integers": (
        lambda: fk.attention(Q.int(), K.int(), K.int()), fk.ShapeError,
        "q, k and v are int32; attention takes float16, bfloat16, float32, float64, or float8_e4m3fn for all three",
    ),
    "frameworks": (
        lambda: fk.attention(Q, jnp.zeros((1, 8, 2, 16)), K), fk.ShapeError,
        "q, k and v come from different frameworks: q from torch, k from jax, v from torch; convert them to one",
    ),
    "devices": (
        lambda: fk.attention(Q, t(1, 2, 8, 16, device="meta"), K), fk.ShapeError,
        "q, k and v are on different devices: q on cpu, k on meta, v on cpu; move them to one",
    ),
    "numpy": (
        lambda: fk.attention(*[np.zeros((1, 2, 8, 16))] * 3), fk.ShapeError,
        "q, k and v are numpy arrays; give torch tensors (torch.from_numpy(q)) or JAX arrays (jax.numpy.asarray(q)), "
        "or use frisket.reference for numpy",
    ),
    "numpy without a layout": (
        lambda: fk.reference(*[np.zeros((1, 2, 8, 16))] * 3), fk.ShapeError,
        'numpy arrays have no usual axis order; give axes="bhsd" or axes="bshd"',
    ),
    "lists": (
        lambda: fk.attention([[1.0]], K, K), fk.ShapeError, "q is a list; give torch tensors or JAX arrays",
    ),
    "layout": (
        lambda: fk.attention(Q, K, K, layout="sbhd"), fk.ShapeError,
        "the axis order is 'sbhd'; it is \"bhsd\" (batch, heads, length, head_dim) or "
        '"bshd" (batch, length, heads, head_dim)',
    ),
    "layout in a list": (
        lambda: fk.attention(Q, K, K, layout=["bhsd"]), fk.ShapeError,
        "the axis order is ['bhsd']; it is \"bhsd\" (batch, heads, length, head_dim) or "
        '"bshd" (batch, length, heads, head_dim)',
    ),
    "tile": (
        lambda: fk.compile("causal", tile=(128, 0)), fk.ShapeError,
        "tile is (128, 0); tile sizes are two positive integers (queries, keys), in tokens",
    ),
    "large tile": (
        lambda: fk.compile("causal", tile=10**9), fk.ShapeError,
        "tile is 1000000000; a tile has at most 65,536 queries or keys and 16,777,216 pairs of them\n"
        "  its scores are held at once: tiles of 32 to 256 are usual",
    ),
    "sparse": (
        lambda: fk.attention(Q.to_sparse(), K, K), fk.ShapeError,
        "q is sparse, of layout torch.sparse_coo\n  attention takes dense tensors: q.to_dense()",
    ),
    "origin": (
        lambda: fk.attention(Q, K, K, "causal", origin=(0, 0)), fk.ShapeError,
        "origin is (0, 0)\n  it is (b, h, q, k), in global positions",
    ),
    "origin, one number": (
        lambda: fk.attention(Q, K, K, "causal", origin=5), fk.ShapeError,
        "origin is 5\n  it is (b, h, q, k), in global positions",
    ),
    "sizes": (
        lambda: fk.attention(Q, K, K, "causal", origin=(0, 0, 8, 0), sizes=(1, 4, 12, 8)), fk.ShapeError,
        "the crop ends at 16 but Q_LEN is 12\n  `sizes` are the lengths of the whole problem: (B, H, Q_LEN, KV_LEN)",
    ),
    "origin of a float": (
        lambda: fk.attention(Q, K, K, "causal", origin=(0, 0, 1.5, 0)), fk.ShapeError,
        "origin has 1.5\n  it is (b, h, q, k), integers, q and k also one per batch entry",
    ),
    "plan of another mask": (
        lambda: fk.compile("causal")(Q, K, K, plan=fk.compile("window(3)").plan(8, 8, 1, 4)), fk.ParameterError,
        "the plan is for another mask or score mod:\n  mask = window(3)\n"
        "  make it with this attention's own `plan`",
    ),
    "plan without the score mod": (
        lambda: fk.compile("causal", "softcap(5)")(Q, K, K, plan=fk.compile("causal").plan(8, 8, 1, 4)),
        fk.ParameterError,
        "the plan is for another mask or score mod:\n  mask = causal\n  make it with this attention's own `plan`",
    ),
    "no plan": (
        lambda: fk.compile("causal")(Q, K, K, plan=3), fk.ParameterError,
        "plan is 3; `plan` of an attention makes one",
    ),
    "score mod": (
        lambda: fk.compile("causal", 3), fk.TraceError,
        "a score mod is a text or a function, not int",
    ),
    "unsigned table": (
        lambda: fk.mask("t[q] > k", t=np.array([1 << 63], np.uint64)), fk.ParameterError,
        "table `t` has 9223372036854775808, which does not fit 64 bits with a sign",
    ),
    "dropout": (
        lambda: fk.attention(Q, K, K, dropout=1.0), fk.ParameterError,
        "dropout is 1.0; it is the share of weights to drop, at least 0 and below 1",
    ),
    "sinks": (
        lambda: fk.compile("causal", sinks=[1.0])(Q, K, K), fk.ShapeError,
        "sinks are float64[1]; they are one number, or one for each of the 4 query heads",
    ),
    "seed": (
        lambda: fk.attention(Q, K, K, dropout=0.5, seed=-3), fk.ParameterError,
        "seed is -3; it is an integer, 0 <= seed < 2**31",
    ),
    "unknown backend": (
        lambda: fk.attention(Q, K, K, backend="cuda"), fk.BackendError,
        "no backend 'cuda' (did you mean 'triton'?); there are aten, xla, cpp, triton, gluon, flash, pallas-tpu, "
        "pallas-mosaic-gpu, sdpa, cudnn, splash, dense, library, native",
    ),
    "unbound": (
        lambda: fk.attention(Q, K, K, "window(w)"), fk.ParameterError,
        "`w` has no value; give it: w=...",
    ),
    "a sum of the row outside of the divisor": (
        lambda: fk.attention(Q, K, K, weight="score / total"), fk.ParameterError,
        "`total` has no value (it is the row's in `divide` alone); give it: total=...",
    ),
    "unused": (
        lambda: fk.attention(Q, K, K, "causal", w=3), fk.ParameterError,
        "`w` is given and no mask, score mod or weight uses it; the parameters are none",
    ),
    "unused beside an unbound one": (
        lambda: fk.attention(Q, K, K, "window(w)", x=3), fk.ParameterError,
        "`x` is given and no mask, score mod or weight uses it; the parameters are w",
    ),
    "a misspelt keyword of another library": (
        lambda: fk.attention(Q, K, K, casual=True), fk.ParameterError,
        '`casual` is given and no mask, score mod or weight uses it; write mask="causal"',
    ),
    "misspelt in one call": (
        lambda: fk.attention(Q, K, K, "same(doc)", docs=DOC), fk.ParameterError,
        "`docs` is given and no mask, score mod or weight uses it; did you mean `doc`?",
    ),
    "a class in place of the function": (
        lambda: fk.Mask("causal"), fk.ParameterError,
        "Mask takes an expression; write frisket.mask('causal') for a text",
    ),
    "misspelt": (
        lambda: fk.compile("same(doc)")(Q, K, K, docs=DOC), fk.ParameterError,
        "`docs` is given and no mask, score mod or weight uses it; did you mean `doc`?",
    ),
    "keyword of another library": (
        lambda: fk.attention(Q, K, K, is_causal=True), fk.ParameterError,
        "`is_causal` is given and no mask, score mod or weight uses it; write mask=\"causal\"",
    ),
    "misspelt keyword": (
        lambda: fk.attention(Q, K, K, "causal", scal=0.5), fk.ParameterError,
        "`scal` is given and no mask, score mod or weight uses it; did you mean the keyword `scale`?",
    ),
    "divisor under another name": (
        lambda: fk.attention(Q, K, K, "causal", weight="relu2", divisor="count"), fk.ParameterError,
        "`divisor` is a str; write divide=",
    ),
    "score mod under another name": (
        lambda: fk.attention(Q, K, K, "causal", score_mod="softcap(5)"), fk.ParameterError,
        "`score_mod` is a str; give it as score=",
    ),
    "mask under another name": (
        lambda: fk.compile(mask_mod="causal"), fk.ParameterError, "`mask_mod` is a str; give it as mask=",
    ),
    "dense mask": (
        lambda: fk.attention(Q, K, K, torch.ones(8, 8, dtype=torch.bool)), fk.TraceError,
        "a mask is a text or a function, not Tensor\n  an array is a table of the text: "
        'frisket.mask("t[q, k]", t=...)',
    ),
    "dense bias": (
        lambda: fk.attention(Q, K, K, score=np.zeros((1, 4, 8, 8))), fk.TraceError,
        "a score mod is a text or a function, not ndarray\n  an array is a table of the text: "
        'frisket.score("score + t[b, h, q, k]", t=...)',
    ),
    "documents of a batch": (
        lambda: fk.attention(Q, K, K, "same(doc)", doc=np.zeros((2, 8), int)), fk.MaskSyntaxError,
        "in `same(t)`: `doc` is a table with 2 axes, indexed with 1\n  mask 1:1\n    same(doc)\n    ^^^^^^^^^\n"
        "  for a table [batch, length] write `same_by_batch(doc)`; it is `def same(t) = t[q] == t[k]`",
    ),
    "a table that is called": (
        lambda: fk.mask("doc(q) == 1", doc=[0, 1]), fk.MaskSyntaxError,
        "`doc` is not a function\n  mask 1:1\n    doc(q) == 1\n    ^^^^^^\n  it is a table: write `doc[q]`",
    ),
    "q on meta": (
        lambda: fk.attention(Q.to("meta"), K, K, "causal"), fk.ShapeError,
        "q, k and v are on different devices: q on meta, k on cpu, v on cpu; move them to one",
    ),
    "k on meta": (
        lambda: fk.attention(Q, K.to("meta"), K, "causal"), fk.ShapeError,
        "q, k and v are on different devices: q on cpu, k on meta, v on cpu; move them to one",
    ),
    "table on meta": (
        lambda: fk.attention(Q, K, K, "same(doc)", doc=torch.zeros(8, dtype=torch.int, device="meta")),
        fk.ParameterError,
        "`doc` is a meta tensor, which has no values; give values, or q, k, v and every table on meta",
    ),
    "short table": (
        lambda: fk.attention(Q, K, K, "same(doc)", doc=DOC[:5]), fk.ParameterError,
        "table `doc` has 5 entries on axis 0 and is read at `q` = 0..7; give 8, or hide what lies beyond: "
        "`q < 5 & ...`",
    ),
    "short bias": (
        lambda: fk.attention(Q, K, K, score="score + bias[q, k]", bias=np.zeros((8, 5))), fk.ParameterError,
        "table `bias` has 5 entries on axis 1 and is read at `k` = 0..7; give 8, or hide what lies beyond: "
        "`k < 5 & ...`",
    ),
    "rank": (
        lambda: fk.compile("same(doc)")(Q, K, K, doc=np.zeros((8, 8), int)), fk.ParameterError,
        "`doc` is a table with 1 axis in the text, the value is a table with 2 axes; for [batch, length] write "
        "`same_by_batch(doc)`, or `doc[b, q]`; for offsets `document_by_batch(doc)`",
    ),
    "dtype of a table": (
        lambda: fk.attention(Q, K, K, "same(doc)", doc=np.zeros(8, complex)), fk.ParameterError,
        None,
    ),
    "program and score": (
        lambda: fk.compile(fk.Program(fk.mask("causal")), "softcap(5)"), fk.ParameterError,
        "a Program has its score mod already; give score= or the Program, not both",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_refused_with_a_way_out(name):
    run, kind, text = BAD[name]
    with pytest.raises(kind) as error:
        run()
    assert isinstance(error.value, fk.FrisketError)
    if text is not None:
        assert str(error.value) == text


TABLE = torch.zeros(8, 8)
STRANGE = {
    "nested": (lambda: torch.nested.nested_tensor(list(TABLE)), "is a nested tensor; give a dense one"),
    "sparse": (TABLE.to_sparse, "is a tensor of layout torch.sparse_coo; give a dense one, bias.to_dense()"),
    "mkldnn": (TABLE.to_mkldnn, "is a tensor of layout torch._mkldnn; give a dense one, bias.to_dense()"),
    "quantized": (
        lambda: torch.quantize_per_tensor(TABLE, 0.1, 0, torch.qint8),
        "is of torch.qint8; give its numbers, bias.dequantize()",
    ),
    "masked": (
        lambda: np.ma.array(TABLE.numpy(), mask=np.eye(8)),
        "has masked entries; say what they are: bias.filled(0)",
    ),
}  # fmt: skip
ATT = fk.compile(score="score + bias[q, k]")
ENTRIES = {
    "call": lambda x: ATT(Q, K, K, bias=x),
    "plan": lambda x: ATT.plan(8, 8, bias=x),
    "table of a mask": lambda x: fk.attention(Q, K, K, "bias[q, k] > 0", bias=x),
    "value of a mask": lambda x: fk.mask("bias[q, k] > 0", bias=x),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", STRANGE)
def test_tables_without_plain_entries_are_refused(kind, entry):
    ENTRIES[entry](TABLE)  # what is remembered of a dense one does not let another in
    made, text = STRANGE[kind]
    with pytest.raises(fk.ParameterError) as error:
        ENTRIES[entry](made())
    assert str(error.value).startswith("`bias` " + text)


@pytest.mark.parametrize("kind", ["sparse", "quantized", "masked"])
def test_sinks_and_origins_without_plain_entries_are_refused(kind):
    x = {"sparse": torch.ones(1).to_sparse, "masked": lambda: np.ma.array([1], mask=[1])}.get(kind, STRANGE[kind][0])()
    for name, given in (("sinks", {"sinks": x}), ("origin", {"origin": (0, 0, x, 0)})):
        with pytest.raises(fk.ParameterError, match=f"`{name}` "):
            fk.attention(Q, K, K, "causal", **given)


def test_masked_arrays_that_hide_nothing_are_arrays():
    bias = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    assert torch.equal(ATT(Q, K, K, bias=np.ma.array(bias)), ATT(Q, K, K, bias=bias))
