"""Calls with backend="flash" on a stand-in of FlashAttention 4 (tests/support/flash) against the float64 reference:
every mask and every score mod of the library; what would be called; refusals."""

import cases
import numpy as np
import pytest
import torch
from support.flash import engine as stand_in
from support.tiers import default_only

import frisket as fk
from frisket.dsl.errors import BackendError, BackwardError, LoweringError
from frisket.lowering.plan import Geometry, KernelInputs
from frisket.runtime.backends.flash import call as flash_call
from frisket.runtime.backends.flash import torch as flash_torch
from frisket.runtime.backends.flash.call import call_of, flags_for, tensors_of, write_order

LENGTH = 300
MASKS, MODS = cases.masks(LENGTH), cases.mods(LENGTH)
DOC = np.arange(300) // 70
OFTEN = ("causal", "window(w)", "bottom_right", "same(t)", "padding(len)", "natten1d(size, n)", "global_tokens(t)")


@pytest.fixture(autouse=True, params=["sm_90", pytest.param("sm_100", marks=pytest.mark.exhaustive)])
def arch(monkeypatch, request):
    """The backend runs here, on such a GPU."""
    monkeypatch.setattr(flash_call, "architecture", lambda device=None: request.param)
    undo = stand_in.install(monkeypatch)
    yield request.param
    undo()


def arrays(case, dtype=torch.float16, kv_heads=1, dim=64):
    draw = torch.Generator().manual_seed(5)
    shapes = ((case.heads, case.q_len), (kv_heads, case.kv_len), (kv_heads, case.kv_len))
    return [torch.randn(case.batch, n, length, dim, generator=draw).to(dtype) for n, length in shapes]


@pytest.mark.parametrize("name", default_only(MASKS, *OFTEN))
def test_flash_engine_runs_each_mask_of_the_library(name):
    case = MASKS[name]
    fk.compile(case.mask, backend="flash", deterministic=False).check(*arrays(case)).require()


@pytest.mark.parametrize("name", default_only(MODS, "alibi", "softcap(c)", "relative_bias(table)"))
def test_flash_engine_runs_each_score_mod_of_the_library(name):
    """With gradients of q, k and v where the score mod reads no learnable table, which has none here."""
    case = MODS[name]
    att = fk.compile("causal", case.score, backend="flash", deterministic=False)
    att.check(*arrays(case, kv_heads=2), gradients=not att.program.learnable).require()


@pytest.mark.parametrize("mask", ["causal", "(causal | k < 40) & same(doc)"])
def test_flash_engine_takes_sinks_and_their_gradient(mask):
    """A row that sees no key has the sink for its lse; the sinks' own gradient is frisket's."""
    case = cases.Case(mask, 130, 150, lambda: {"doc": DOC} if "doc" in mask else {}, 2, 4)
    sinks = torch.linspace(-1, 2, 4)
    fk.compile(case.mask, backend="flash", sinks=sinks, deterministic=False).check(*arrays(case)).require()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 64), (192, 128), (256, 256)])
def test_heads_at_their_tiles(dims, arch):
    """Ragged lengths at the tiles that each head size asks for."""
    draw = torch.Generator().manual_seed(5)
    shapes = (4, 300, dims[0]), (2, 413, dims[0]), (2, 413, dims[1])
    qkv = [torch.randn(1, *s, generator=draw).half() for s in shapes]
    att = fk.compile("q + 113 >= k & (q % 7 < 6 | k < 9)", backend="flash", deterministic=False)
    att.check(*qkv, gradients=not (arch == "sm_100" and dims[0] == 256)).require()


def test_a_part_of_a_larger_problem():
    case = cases.Case("causal & window(70) & (k + Q_LEN) % 3 > 0", 130, 150)
    att = fk.compile(case.mask, backend="flash", deterministic=False)
    q, k, v = arrays(case)
    place = {"origin": (1, 1, 37, 11), "sizes": (4, 4, 500, 500)}
    right = fk.reference(*(x.double().numpy() for x in (q, k, v)), mask=case.mask, layout="bhsd", **place)
    np.testing.assert_allclose(att(q, k, v, **place).float().numpy(), right, atol=2e-3)


def test_tables_that_live_on_the_device():
    """Planned there: the records become lists without a look at them, and documents are code."""
    case = cases.Case("causal & same(doc)", 300, 300, heads=2)
    q, k, v = arrays(case)
    att = fk.compile(case.text, backend="flash", deterministic=False)
    doc = torch.from_numpy(DOC)
    plan = att.plan(300, 300, 1, 2, doc=doc, flat=True)
    assert plan.on_device
    right = fk.reference(*(x.double().numpy() for x in (q, k, v)), mask=case.text, doc=DOC, layout="bhsd")
    np.testing.assert_allclose(att(q, k, v, plan=plan).float().numpy(), right, atol=2e-3)


@pytest.mark.parametrize("score", [None, "param t: float[_]\nscore = score + t[k]"])
def test_tables_in_inference_mode(score):
    """torch counts no writes to tensors made there: each call reads tables anew."""
    case = cases.Case("causal & same(doc)", 300, 300, heads=2)
    q, k, v = arrays(case)
    att = fk.compile(case.text, score, backend="flash", deterministic=False)
    with torch.inference_mode():
        doc = torch.from_numpy(DOC.copy()) + 0
        given = {"t": torch.linspace(0, 1, 300)} if score else {}
        for step in range(3):
            right = fk.reference(
                *(x.double().numpy() for x in (q, k, v)), mask=case.text, score=score, layout="bhsd",
                doc=doc.numpy(), **{n: x.numpy() for n, x in given.items()},
            )  # fmt: skip
            np.testing.assert_allclose(att(q, k, v, doc=doc, **given).float().numpy(), right, atol=2e-3)
            plan = att.plan(300, 300, 1, 2, doc=doc, flat=True, **given)
            np.testing.assert_allclose(att(q, k, v, plan=plan).float().numpy(), right, atol=2e-3)
            doc[100 + step :] += 1
            for x in given.values():
                x += torch.arange(300) % 3


# -- what would be called ---------------------------------------------------------------------------

GOLDEN = {
    "causal": ("causal", None, {}), "window": ("causal & window(256)", None, {}),
    "documents": ("causal & same(doc)", None, {"doc": DOC}), "padding": ("k < n", None, {"n": 200}),
    "prefix": ("causal | k < n", None, {"n": 64}),
    "documents, alibi": ("causal & same(doc)", "alibi", {"doc": DOC}),
}  # fmt: skip


def called(mask, score, values, arch, gradients=False, deterministic=False):
    plan = fk.compile(mask, score, **values).plan(300, 300, 2, 4)
    g = Geometry(2, 4, 2, 300, 300, 128, 128, 0.125)
    target = flash_call.call_target(plan, g, "bfloat16", arch=arch)
    work = plan.work((target.block_q, target.block_k), proofs=True)
    read = {n: torch.as_tensor(np.asarray(x)) for n, x in work.tables.items()}
    inputs = KernelInputs(work.plan, plan, g, target, work.slots, read, deterministic=deterministic)
    return call_of(inputs, torch.device("cpu"), gradients=gradients)


def test_golden_calls_of_the_flash_engine(golden, arch):
    """Flags where they are the whole mask, code and tiles elsewhere."""
    text = []
    for name, (mask, score, values) in GOLDEN.items():
        for gradients in (False, True):
            call = called(mask, score, values, arch, gradients, deterministic=arch == "sm_100")
            text.append(
                f"-- {name}, {'backward' if gradients else 'forward'}{call.proof and f': {call.proof}'}\n{call}\n"
            )
    golden(f"calls_{arch}.txt", "\n".join(text))


def test_a_window_of_another_width_is_the_same_kernel():
    one, two = (called(f"q - k < {w} | k < 3", None, {}, "sm_90") for w in (256, 200))
    assert one.mods.body == two.mods.body
    assert (one.scalars, two.scalars) == ((255, 2), (199, 2))


# -- tiles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block", [(192, 128), (128, 128), (128, 80), (128, 112), (256, 128), (64, 96), (64, 64), (128, 256)]
)
@pytest.mark.parametrize(
    "mask", ["causal", "causal & same(doc)", "(q - k) % 96 == 0 | k // 64 == 1", "k < 0", "k < 20 * (h + 1)"]
)
def test_tiles_equal_brute_force(mask, block):
    """Each way, at the engine's tiles, for ragged lengths: tiles in no list are hidden, full ones wholly seen."""
    q_len, kv_len, heads = 700, 530, 3
    bound = fk.mask(mask, **{"doc": np.arange(900) // 77} if "doc" in mask else {})
    plan = fk.compile(bound).plan(q_len, kv_len, 1, heads)
    seen = bound.dense(q_len, kv_len, batch=1, heads=heads)
    for backward in (False, True):
        lengths = (kv_len, q_len) if backward else (q_len, kv_len)
        size = block[::-1] if backward else block
        columns = -(-lengths[1] // size[1])
        found = tensors_of((plan.columns if backward else plan.rows)(block), columns, block, "cpu")
        dense = seen.swapaxes(2, 3) if backward else seen
        kinds = np.zeros((1, heads, -(-lengths[0] // size[0]), columns), int)
        for h in range(heads):
            for kind, count, index in ((1, *found[:2]), (2, *found[2:4])):
                at = min(h, count.shape[1] - 1)
                for row, n in enumerate(count[0, at].tolist()):
                    picked = index[0, at, row].tolist()
                    assert picked[:n] == sorted(set(picked[:n]))
                    assert not any(picked[n:])
                    kinds[0, h, row, picked[:n]] += kind
        right = np.zeros_like(kinds)
        for row in range(kinds.shape[2]):
            for column in range(columns):
                part = dense[:, :, row * size[0] : (row + 1) * size[0], column * size[1] : (column + 1) * size[1]]
                whole = part.all((2, 3)) & (part.shape[2:] == size)  # a ragged tile is partial: its ends are looked at
                right[:, :, row, column] = np.where(whole, 2, part.any((2, 3)))
        np.testing.assert_array_equal(kinds, right)
        if backward:
            check_order(found, kinds)


def check_order(found, kinds):
    """Tiles that add to the same queries have turns 0, 1, 2 ... by their keys."""
    turns = {}
    for order, count, index in zip(write_order(found, kinds.shape[3]), found[0:4:2], found[1:4:2], strict=True):
        for h in range(count.shape[1]):
            for key, n in enumerate(count[0, h].tolist()):
                for query, turn in zip(index[0, h, key, :n].tolist(), order[0, h, key, :n].tolist(), strict=True):
                    turns.setdefault((h, query), []).append((key, turn))
    for said in turns.values():
        assert [turn for _, turn in sorted(said)] == list(range(len(said)))


# -- refusals ---------------------------------------------------------------------------------------


def test_flash_engine_refuses_unsupported_calls(arch):
    case = cases.Case("causal", 64, 64, heads=4)
    q, k, v = arrays(case, dim=64)
    odd = "causal & (q % 7 < 6)"
    refused = [
        (fk.compile("causal", backend="flash"), (q.float(), k.float(), v.float()), "takes float16 and bfloat16"),
        (fk.compile("causal", backend="flash", dropout=0.1), (q, k, v), "no dropout"),
        (fk.compile("causal", backend="flash"), [x[..., :60] for x in (q, k, v)], "multiples of 8, not 60 and 60"),
        (fk.compile("causal", backend="flash", tile=(64, 64)), (q, k, v), "leave out `tile`"),
        (fk.compile("q * 100000000 >= k", backend="flash"), (q, k, v), "integers of 32 bits"),
    ]
    for att, given, words in refused:
        with pytest.raises((BackendError, LoweringError), match=words):
            att(*given)
    wide = [torch.zeros(1, 2, 64, d).half() for d in (264, 264, 264)]
    with pytest.raises(BackendError, match="not 264 and 264"):
        fk.compile("causal", backend="flash")(*wide)
    with pytest.raises(BackendError, match="one origin for all batch entries"):
        fk.compile(odd, backend="flash")(q, k, v, origin=(0, 0, np.array([3]), 0), sizes=(1, 4, 80, 80))


# -- pages ------------------------------------------------------------------------------------------


def paged(mask, page, score=None, **values):
    """Three sequences of 192 keys in pages of a pool, and the same by library calls; hidden entries are NaN."""
    draw = torch.Generator().manual_seed(5)
    width = 192 // page
    pages = torch.randperm(3 * width + 2, generator=draw)[: 3 * width].view(3, width).int()
    q = torch.randn(3, 4, 50, 64, generator=draw).half()
    k, v = torch.randn(2, 3 * width + 2, 2, page, 64, generator=draw).half()
    seen = np.ones((3, 192), bool) if mask is None else fk.mask(mask, **values).dense(50, 192, batch=3).any((1, 2))
    for row, hidden in zip(pages.tolist(), ~seen.reshape(3, width, page), strict=True):
        for place, gone in zip(row, hidden, strict=True):
            for x in (k, v):
                x[place, :, torch.from_numpy(gone)] = torch.nan
    both = []
    for backend in ("flash", "aten"):
        att = fk.compile(mask, score, backend=backend, **values)
        both.append(att(q, k, v, pages=pages, return_lse=True))
    return both


@pytest.mark.parametrize("page", [16, 32, 48])
@pytest.mark.parametrize("mask", [None, "bottom_right", "k < n", "k < len[b]"])
def test_flash_engine_reads_keys_in_pages(mask, page):
    values = {} if mask is None else {"n": 77} if "n" in mask.split() else {}
    values |= {"len": np.array([192, 33, 0])} if mask and "len[b]" in mask else {}
    (out, lse), (want, want_lse) = paged(mask, page, **values)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, want_lse, atol=2e-3, rtol=2e-3)


def test_flash_engine_passes_the_page_table(monkeypatch):
    calls = []
    monkeypatch.setattr(flash_torch, "attend", lambda call, *given: calls.append(call) or stand_in.attend(call, *given))
    paged("k < n", 16, n=77)
    said = ["softmax_scale = 0.125", "seqused_k int32 [3]", "page_table int32 [3, 12]"]
    assert [str(call).splitlines() for call in calls] == [said]
    assert calls[0].used.tolist() == [77, 77, 77]


@pytest.mark.parametrize("mask", [None, "bottom_right"])
def test_pages_of_a_tile_whose_keys_are_all_seen(mask):
    (out, _), (want, _) = paged(mask, 64)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("mask", "page", "score", "words"),
    [
        ("k < n", 64, None, "loads pages of 64 keys whole"), ("k < 70 | q % 3 > k", 16, None, "flags are the whole"),
        ("flash_window(9, 0)", 16, None, "loads whole tiles of keys"),
        ("bottom_right", 16, "softcap(3)", "without score mods"), ("causal", 16, None, "hold the diagonal"),
    ],
)  # fmt: skip
def test_pages_that_flash_does_not_read(mask, page, score, words):
    with pytest.raises(BackendError, match=words):
        paged(mask, page, score, **({"n": 70} if mask == "k < n" else {}))


def test_gradients_are_refused_before_the_forward(arch, monkeypatch):
    """Where one would be asked for; under no_grad the forward runs."""
    ran = []
    monkeypatch.setattr(flash_torch, "attend", lambda *given: ran.append(1) or stand_in.attend(*given))
    q, k, v = arrays(cases.Case("causal", 64, 64, heads=4))
    odd, learned = "causal & (q % 7 < 6)", torch.zeros(4, requires_grad=True)
    att = fk.compile("causal", "alibi(slopes)", slopes=learned, backend="flash", deterministic=False)
    with pytest.raises(BackwardError, match="no gradient of slopes"):
        att(q, k, v)
    assert not ran
    with torch.no_grad():
        att(q, k, v)
    assert ran.pop()
    q.requires_grad_()
    fk.compile("causal", backend="flash")(q, k, v).sum().backward()  # flags: Hopper's sums have an order
    assert ran.pop()
    if arch == "sm_90":
        for _ in range(2):  # the second call is known
            with pytest.raises(BackendError, match=r"in any order on Hopper.*\n.*deterministic=False"):
                fk.compile(odd, backend="flash")(q, k, v)
        assert not ran
    else:
        fk.compile(odd, backend="flash")(q, k, v).sum().backward()


@pytest.mark.parametrize("mask", [None, "causal & window(20)"])
def test_tables_of_a_score_mod_leave_a_mask_its_flags(mask, arch):
    """Flags have gradients that add up in an order, also on Hopper; `t` comes with the call, on its device."""
    q, k, v = (x.requires_grad_() for x in arrays(cases.Case("causal", 64, 64, heads=4)))
    t = torch.linspace(-1, 1, 64)
    with torch.enable_grad():
        found = fk.compile(mask, "score + t[k]", backend="flash")(q, k, v, t=t)
        wanted = fk.compile(mask, "score + t[k]", backend="aten")(q, k, v, t=t)
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
        found.sum().backward()


def test_why_a_mask_is_no_flag(arch):
    for mask, words in {
        "q > k": "hold the diagonal", "causal & k < 60": "stand without a window", "q < 60": "no flag",
        "q % 3 >= k": "not documents", "(causal | k < 5) & window(9)": "bounds neither",
    }.items():  # fmt: skip
        plan = fk.compile(mask).plan(100, 100)
        work = plan.work((128, 128))
        assert words in flags_for(work.plan, plan, Geometry(1, 1, 1, 100, 100, 64, 64, 1.0), work.slots), mask
