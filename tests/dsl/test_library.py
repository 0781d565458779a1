"""The library: every mask against its words, every entry documented, named, shown, and laid out exactly."""

from __future__ import annotations

import re

import cases
import numpy as np
import pytest
from support import words
from support.lowering import brute
from support.tiers import thinned

import frisket as fk
from frisket.dsl.library import library
from frisket.dsl.parse import parse
from frisket.dsl.program import parse_expression, read
from frisket.lowering.analysis.layout import bind
from frisket.lowering.plan import needs_int64
from frisket.lowering.simplify import simplify
from frisket.runtime.cli.main import main

MASKS, MODS, WEIGHTS = cases.masks(40), cases.mods(24), cases.weights(24)
# for use in others
NUMBERS = {"tiled_row", "tiled_col", "morton_row", "morton_col", "t5_bucket", "tanh_fraction", "document_start"}
ENTRIES = library()


def case(signature, length):
    return cases.masks(length)[signature]


# -- what the masks mean ----------------------------------------------------------------------------

LENGTHS = (40, 100)


def test_library_masks_each_have_a_reference_in_words():
    assert {e.name for e in ENTRIES.values() if e.signature in MASKS} == {*words.WORDS, "random_keep"}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("signature", [s for s in MASKS if s != "random_keep(seed, p)"])
def test_masks_mean_what_their_words_say(signature, length):
    one = case(signature, length)
    np.testing.assert_array_equal(one.mask.dense(**one.lengths), words.dense(one))


OTHER = [  # ragged, not square, at and beyond the edges
    ("causal(7)", 20, 30), ("bottom_right", 30, 20), ("bi_causal", 20, 20), ("block_causal(7)", 25, 40),
    ("mini_causal(6)", 25, 40), ("window(1)", 9, 12), ("window(0)", 9, 12), ("sliding(0, 0)", 12, 9),
    ("sliding(30, 2)", 12, 40), ("local(3, 1, 12)", 12, 20), ("flash_window(5, 2)", 12, 31), ("dilated(9, 4)", 21, 17),
    ("dilated(3, 7)", 21, 17), ("strided(5)", 23, 23), ("prefix(50)", 9, 20), ("both_prefix(9)", 20, 15),
    ("prefix_lm(0)", 11, 11), ("chunked(9)", 31, 25), ("chunked_causal(40)", 30, 30), ("block_diagonal(8)", 19, 30),
    ("streaming(3, 5)", 20, 20), ("outside_window(4)", 9, 20), ("draft_blocks(0, 5)", 15, 15),
    ("rectangle_causal(3, 9, 2, 12)", 12, 14), ("rectangle_causal(3, 12, 2, 6)", 14, 14),
    ("rectangle_bi_causal(2, 7, 3, 6)", 12, 14), ("draft_blocks(11, 4)", 12, 23), ("block_diffusion(12, 5)", 24, 24),
    ("block_diffusion(16, 4)", 32, 32), ("svg_spatial(20, 70, 4)", 300, 300), ("svg_spatial_sink(20, 70, 4)", 300, 300),
    ("svg_temporal(9, 11, 4, 1)", 53, 53), ("svg_temporal(9, 11, 4, 3)", 53, 53), ("morton(5, 7, 3, 3)", 64, 64),
    ("morton(8, 4, 3, 2)", 50, 64), ("tiled_natten(6, 8, 3, 3, 2, 4)", 48, 48),
    ("tiled_natten(5, 7, 3, 5, 2, 3)", 54, 54), ("tiled_natten(6, 8, 5, 3, 3, 2, 2, 4)", 48, 48),
    ("tiled_natten(4, 6, 3, 3, 1, 6, 2, 2)", 24, 24), ("sta2d(8, 12, 6, 4, 2, 4)", 96, 96),
    ("sta2d(8, 12, 4, 8, 2, 4, 5)", 101, 101), ("sta2d(6, 6, 6, 6, 2, 2)", 40, 36),
    ("sta3d(4, 4, 8, 4, 2, 4, 2, 2, 4)", 128, 128), ("sta3d(3, 4, 4, 1, 4, 2, 1, 4, 2, 3)", 51, 51),
    ("natten1d(17, 4, 3, true)", 17, 17), ("natten1d(13, 5, 4, true)", 13, 13), ("natten1d(17, 4, 3, false)", 17, 17),
    ("natten1d(11, 4, 4, false)", 11, 11), ("sta2d(4, 8, 2, 4, 2, 4, 5)", 37, 45),
    ("sta3d(2, 4, 4, 1, 2, 4, 1, 2, 2, 3)", 35, 41),
    ("natten3d(3, 4, 5, 3, 3, 3)", 60, 60), ("natten3d(4, 3, 4, 2, 3, 1)", 48, 48),
]  # fmt: skip


@pytest.mark.parametrize(("text", "q_len", "kv_len"), OTHER, ids=[t for t, *_ in OTHER])
def test_masks_of_other_shapes(text, q_len, kv_len):
    one = cases.Case(text, q_len, kv_len)
    np.testing.assert_array_equal(one.mask.dense(**one.lengths), words.dense(one))


@pytest.mark.parametrize("is_causal", ["true", "false"])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_neighborhoods_with_dilation_stride_and_causal(dilation, stride, is_causal):
    for size, n in ((12, 3), (13, 4), (17, 4), (19, 5), (11, 3)):
        if n * dilation <= size and stride <= n:
            one = cases.Case(f"natten1d({size}, {n}, {dilation}, {stride}, {is_causal})", size, size)
            np.testing.assert_array_equal(one.mask.dense(**one.lengths), words.dense(one))
            if not is_causal:
                assert (one.mask.dense(**one.lengths).sum(-1) == n).all()


def test_neighborhoods_on_each_axis_of_a_canvas():
    for text in (
        "natten2d(7, 9, 3, 2, 2, 3, 1, 2, false, false)",
        "natten2d(6, 10, 4, 3, 1, 2, 3, 1, true, false)",
        "natten3d(4, 5, 6, 2, 3, 3, 1, 1, 2, 2, 1, 3, true, false, false)",
    ):
        size = int(np.prod([int(n) for n in re.findall(r"\d+", text)][1 : 3 + (text[6] == "3")]))
        one = cases.Case(text, size, size)
        np.testing.assert_array_equal(one.mask.dense(**one.lengths), words.dense(one))


def test_random_keep_keeps_a_share_and_depends_on_the_seed_alone():
    def kept(seed, p):
        return fk.mask(f"random_keep({seed}, {p})").dense(60, 70, batch=2, heads=3)

    assert abs(kept(7, 0.2).mean() - 0.2) < 0.02
    assert (kept(7, 0.2) <= kept(7, 0.3)).all()
    assert (kept(7, 0.2) == kept(7, 0.2)).all()
    assert not (kept(7, 0.2) == kept(8, 0.2)).all()
    assert not (kept(7, 0.2)[0, 0] == kept(7, 0.2)[1, 2]).all()


def test_tables_of_any_length_serve_as_arguments():
    """A left width per query; offsets per batch entry; a mask inside documents inside a mask."""
    left = np.random.default_rng(0).integers(0, 9, 30)
    have = fk.mask("sliding(left[q], 1)", left=left).dense(30, 30)[0, 0]
    assert all(set(np.flatnonzero(have[q])) == {k for k in range(q - left[q], q + 2) if 0 <= k < 30} for q in range(30))
    shift = np.array([0, 5])
    have = fk.mask("causal(shift[b] * 2)", shift=shift).dense(12, 30, batch=2)[:, 0]
    assert [[int(row.sum()) for row in one] for one in have] == [[*range(1, 13)], [*range(11, 23)]]
    nested = fk.mask("document(off, batchify(causal, 4))", off=np.array([0, 6, 20]))
    assert (
        nested == fk.mask("document(off, chunked_causal(4))", off=np.array([0, 6, 20]))
        or (
            nested.dense(20, 20) == fk.mask("document(off, chunked_causal(4))", off=np.array([0, 6, 20])).dense(20, 20)
        ).all()
    )


# -- every entry ------------------------------------------------------------------------------------


def test_cases_and_numbers_are_the_whole_library():
    numbers = {e.signature for e in ENTRIES.values() if e.name in NUMBERS}
    assert {*MASKS, *MODS, *WEIGHTS, *numbers} == set(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_entries_are_documented(entry):
    assert re.fullmatch(r"[A-Z].*[.:]", entry.sentence), entry.sentence
    assert entry.formula
    assert len(entry.source) > 10
    assert entry.section
    assert entry.text.startswith("def " + entry.name)
    assert all(len(line) <= 120 for line in (entry.sentence, entry.formula, entry.source, *entry.text.splitlines()))
    assert entry.params == tuple(p.text for p in parse(entry.text, "entry").args[0].args[0])


@pytest.mark.parametrize("signature", {**MASKS, **MODS, **WEIGHTS})
def test_a_definition_by_another_name_is_the_same_expr(signature):
    """The library's own text, as a program of the user's under a new name."""
    one = {**MASKS, **MODS, **WEIGHTS}[signature]
    entry = ENTRIES[signature]
    text = re.sub(rf"^def {entry.name}\b", "def other", entry.text)
    called = re.sub(rf"^{entry.name}\b", "other", one.text)
    kind = "score" if signature in MODS else "weight" if signature in WEIGHTS else "mask"
    here = read(f"{text}\n{called}", kind=kind, params=one.params)
    there = read(one.text, kind=kind, params=one.params)
    assert getattr(here, kind) is not None
    assert getattr(here, kind) is getattr(there, kind)


@pytest.mark.parametrize(("signature", "block"), [
    *((signature, (8, 16)) for signature in MASKS), *thinned((signature, (5, 3)) for signature in MASKS),
])  # fmt: skip
def test_layouts_are_exact(signature, block):
    one = MASKS[signature]
    layout = one.mask.layout(**one.lengths, block=block)
    sizes = {"batch": one.batch, "heads": one.heads, "params": one.mask.scalars, "tables": one.mask.tables}
    want = brute.kinds(one.mask.expr, one.q_len, one.kv_len, block=block, **sizes)
    assert layout.exact
    np.testing.assert_array_equal(layout.kinds(), want)
    assert layout.visible_pairs == one.mask.dense(**one.lengths).sum()


@pytest.mark.parametrize("signature", {**MASKS, **MODS})
def test_show_knows_every_entry(signature, tmp_path, capsys):
    one = {**MASKS, **MODS}[signature]
    args = ["show", one.text, "--json", "--q-len", str(one.q_len), "--kv-len", str(one.kv_len)]
    args += ["--batch", str(one.batch), "--heads", str(one.heads), "--block", "8"]
    for name, value in one.params.items():
        np.save(tmp_path / f"{name}.npy", value)
        args += ["--table", f"{name}={tmp_path / name}.npy"]
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert f'"{"score" if signature in MODS else "mask"}": ' in shown


def test_mods_and_numbers_are_reached_by_name():
    assert parse_expression("morton_col(q) < morton_row(k)").type.value == "Bool"
    assert parse_expression("tiled_row(q, 8, 2, 4) == tiled_col(k, 8, 2, 4)").type.value == "Bool"


@pytest.mark.parametrize("signature", MASKS)
def test_library_masks_need_no_64_bit_integers(signature):
    """With positions and table entries below 2^20, every mask runs in 32 bits: JAX has no others by default."""
    one = MASKS[signature]
    limits = dict.fromkeys(("b", "h", "q", "k", "B", "H", "Q_LEN", "KV_LEN", *one.params), 2.0**20)
    assert not needs_int64([simplify(bind(one.mask.expr, one.mask.tables))], limits)


def test_library_entry_has_its_fields_and_is_read_only():
    entry = fk.library()["causal(offset)"]
    assert (entry.name, entry.params, entry.section) == ("causal", ("offset",), "Order")
    assert entry.text == "def causal(offset) = q + offset >= k"
    assert entry.formula == "q + offset >= k"
    assert entry.source.startswith("decoding with a key cache")
    with pytest.raises(TypeError):
        fk.library()["mine"] = entry
