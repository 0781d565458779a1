"""Offsets of segments begin with 0, never decrease, and hold every position. The host refuses others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk

S = 96
TEXTS = ["document(off)", "document(off, causal)", "causal & document(off)", "causal_document(off)"]
LENGTHS = r"these look like lengths: give numpy.cumsum\(\[0, \*off\]\)"
WRONG = {  # what is wrong with the offsets -> the offsets, and the error
    "no end": ([0, 20, 50], r"segment\(off, q\) leaves the offsets 0..50: q = 50 .*\n  .* give the end, \[\*off, 96\]"),
    "lengths": ([20, 30, 46], r"leaves the offsets 20..46: q = 0 .*\n  " + LENGTHS),
    "lengths that decrease": ([30, 20, 46], r"entry \[1\] is 20 after 30; " + LENGTHS),
    "not in order": (
        [0, 50, 20, 96],
        r"`off` holds offsets, which never decrease, and entry \[2\] is 20 after 50; give",
    ),
    "no start": ([20, 50, 96], r"leaves the offsets 20..96: q = 0 .*\n  offsets begin with 0: \[0, \*off\](\n|$)"),
    "neither start nor end": ([20, 50], r"offsets begin with 0: \[0, \*off\]; or these look like lengths"),
}


def arrays(framework, length=S):
    x = np.random.default_rng(0).standard_normal((3, 1, 1, length, 16)).astype(np.float32)
    return torch.from_numpy(x) if framework == "torch" else jnp.asarray(x.swapaxes(2, 3))


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("text", TEXTS)
def test_wrong_offsets_are_refused_with_the_remedy(text, wrong):
    off, error = WRONG[wrong]
    with pytest.raises(fk.ParameterError, match=error):
        fk.mask(text, off=off).layout(S, S)
    with pytest.raises(fk.ParameterError, match=error):
        fk.mask(text, off=np.array(off, np.uint8)).dense(S, S)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_wrong_offsets_are_refused_in_calls(framework):
    convert = {"torch": torch.tensor, "jax": jnp.asarray}[framework]
    att, qkv = fk.compile("causal_document(off)"), arrays(framework)
    for off, error in WRONG.values():
        with pytest.raises(fk.ParameterError, match=error):
            att(*qkv, off=convert(off))
        with pytest.raises(fk.ParameterError, match=error):
            att.plan(S, S, off=convert(off)).work((64, 64))


def test_offsets_that_hold_every_visible_position_are_taken():
    counts = [fk.mask(t, off=[0, 20, 20, 50, S]).layout(S, S).visible_pairs for t in TEXTS[1:]]
    assert len(set(counts)) == 1
    assert fk.mask("document(off) & q < 50 & k < 50", off=[0, 20, 50]).layout(S, S).visible_pairs == 1300
    assert fk.mask("causal & document(off)", off=[0, 20, 50]).layout(50, S).visible_pairs  # keys past the last query
    assert fk.mask("document(off)", off=[0, 20, 50, 200]).layout(S, S).visible_pairs  # the last document is cut
    assert fk.mask("document(off)", off=[20, 50, S]).layout(S - 20, S - 20, origin=(0, 0, 20, 20)).visible_pairs


def test_offsets_of_keys_are_as_many_and_in_order():
    off = {"qoff": [0, 20, 50, S]}
    for text in ("block_diagonal(qoff, koff)", "block_diagonal_bottom_right(qoff, koff)"):
        with pytest.raises(fk.ParameterError, match=r"`koff` .* entry \[2\] is 20 after 50"):
            fk.mask(text, koff=[0, 50, 20, 90], **off)
        with pytest.raises(fk.ParameterError, match="`koff` has 3 offsets and `qoff` has 4"):
            fk.mask(text, koff=[0, 20, 50], **off)
        assert fk.mask(text, koff=[0, 10, 10, 40], **off).layout(S, 64).visible_pairs


RANGES = [
    "off[q // 32] <= k & k < off[q // 32 + 1]",
    "off[q // 32] <= k < off[1 + q // 32]",
    "k >= off[b] & off[b + 1] > k",
]


@pytest.mark.parametrize("text", RANGES)
def test_offsets_read_at_computed_indices_never_decrease(text):
    with pytest.raises(fk.ParameterError, match=r"`off` holds offsets, .* entry \[2\] is 20 after 50"):
        fk.mask(text, off=[0, 50, 20, S])
    with pytest.raises(fk.ParameterError, match=LENGTHS):
        fk.compile(text)(*arrays("torch"), off=torch.tensor([30, 20, 46]))
    assert fk.mask(text, off=[0, 20, 50, S]).layout(S, S).visible_pairs
    assert fk.compile(text).plan(S, S, flat=True, off=torch.tensor([0, 50, S])).unchecked == ("the offsets `off`",)


def test_tables_of_neighbours_are_no_offsets():
    for text in ("t[q] <= k & k < t[k + 1]", "t[q] < t[q + 1]", "t[q] <= k & q < t[q + 1]"):
        assert fk.mask(text, t=[3, 1, 2] * 32).layout(S, S)


def test_score_mods_read_offsets_where_the_mask_shows():
    with pytest.raises(fk.ParameterError, match=r"segment\(off, k\) leaves the offsets 0..50: k = 50"):
        fk.attention(*arrays("torch"), "causal", "score + t[segment(off, k)]", off=[0, 20, 50], t=[0.0, 1.0])
    with pytest.raises(fk.ParameterError, match=r"`off` holds offsets"):
        fk.score("score + t[segment(off, k)]", off=[0, 50, 20], t=[0.0, 1.0])
    out = fk.attention(*arrays("torch"), "k < 50", "score + t[segment(off, k)]", off=[0, 20, 50], t=[0.0, 1.0])
    assert out.isfinite().all()


def test_computed_positions_past_the_offsets_are_a_fact():
    found = fk.mask("document(off, q = q + 3, k = k)", off=[0, 20, S]).layout(S, S).lookups
    (one,) = (str(x) for x in found if not x.proved)
    assert one.startswith("segment(off, q + 3) leaves the offsets 0..96: q + 3 = 96 at query 93, key 0 (b 0, h 0)")


def test_later_offsets_of_repeated_calls_are_checked():
    """After some plans of the host, a planner in C++ or the program of an earlier call serves later tables."""
    att, (q, k, v) = fk.compile("causal_document(off)"), arrays("torch")
    for n in range(1, 12):
        att(q, k, v, off=torch.tensor([0, n, 50, S]))
    with pytest.raises(fk.ParameterError, match=r"entry \[2\] is 20 after 50"):
        att(q, k, v, off=torch.tensor([0, 50, 20, S]))
    with pytest.raises(fk.ParameterError, match="give the end"):
        att(q, k, v, off=torch.tensor([0, 20, 50, 90]))
    with pytest.raises(fk.ParameterError, match="offsets begin with 0"):
        att(q, k, v, off=torch.tensor([1, 20, 50, S]))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_plans_of_a_device_say_what_is_not_checked(framework):
    convert = {"torch": torch.tensor, "jax": jnp.asarray}[framework]
    att, (q, k, v) = fk.compile("causal & document(off)"), arrays(framework)
    for off, error in (([0, 50, 20, S], "is 20 after 50"), ([0, 10, 20, 50], "give the end")):
        plan = att.plan(S, S, heads=1, flat=True, off=convert(off))
        assert plan.unchecked == ("the offsets `off`",)
        assert plan.work((64, 64)).facts == "planned on the device; not checked, but by `att.check`: the offsets `off`"
        with pytest.raises(fk.ParameterError, match=error):
            att.check(q, k, v, plan=plan, gradients=False)
    plan = fk.compile("param doc: sorted int[_]\nmask = same(doc)").plan(9, 9, flat=True, doc=convert([0] * 9))
    assert plan.unchecked == ("the order of `doc`",)


def test_traced_offsets_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("FRISKET_CHECK", "1")
    att, (q, k, v) = fk.compile("causal & document(off)", backend="xla"), arrays("jax")

    def run(off):
        jax.jit(lambda off: att(q, k, v, off=off))(jnp.asarray(off)).block_until_ready()
        jax.effects_barrier()

    run([0, 20, 50, S])
    with pytest.raises(Exception, match="`off` holds offsets, which never decrease"):
        run([0, 50, 20, S])
    with pytest.raises(Exception, match="give the end"):
        run([0, 10, 20, 50])
    with pytest.raises(RuntimeError, match="`off` holds offsets, which never decrease"):
        fk.compile("document(off)").plan(S, S, flat=True, off=torch.tensor([0, 50, 20, S]))
