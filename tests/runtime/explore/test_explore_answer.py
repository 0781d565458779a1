"""What the explorer answers, without a server: the picture is that of the layout, guesses make every entry of the
library work, and the lines to run elsewhere make the same mask."""

import json
import shlex

import numpy as np
import pytest

import frisket as fk
from frisket.dsl.library import library
from frisket.runtime.cli.main import main
from frisket.runtime.draw import html
from frisket.runtime.explore.answer import (
    CHARACTERS,
    LONGEST,
    OFFSETS,
    ProblemSize,
    amount,
    answer,
    digest,
    guess,
    offsets,
    slider,
)
from frisket.runtime.explore.server import PARTS, page, shown

DOC = np.arange(512, dtype=np.int32) // 100


def asked(text, **more):
    return answer({"text": text, "q_len": 512, "kv_len": 512, **more}, {"doc": DOC})


def test_explorer_answer_is_the_picture_of_the_layout():
    found = asked("causal & window(w) & same(doc)", values={"w": 200, "left_over": 3}, block=[64, 32])
    mask = fk.mask("causal & window(w) & same(doc)", w=200, doc=DOC)
    layout = mask.layout(512, 512, block=(64, 32))
    same = html.data(layout, html.plain)
    for name, table in found["data"]["mask"]["program"]["tables"].items():
        assert table["array"].pop("key") == digest(mask.tables[name])
    assert found["data"] == same
    assert {n: found[n] for n in ("shape", "block", "tiles", "facts")} == html.captions(layout)
    assert f"{layout.visible_pairs:,} pairs" in found["cost"]
    json.dumps(found)


def test_explorer_counts_dense_work_in_tiles():
    found = asked("bottom_right", q_len=4, kv_len=1000)["cost"]
    assert "100 %, 8 of 8" in found
    assert "33.6 MFLOP, dense 33.6 MFLOP" in found  # 4 * 64 * 8 * 128 * 128


def test_notes_are_told():
    assert "`causal` is defined here and hides the library" in asked("def causal = q > k\nmask = causal")["facts"]
    assert "note" not in asked("causal")["facts"]


def test_tables_travel_once():
    first = asked("same(doc)")["data"]["mask"]["program"]["tables"]["doc"]["array"]
    again = asked("same(doc)", have=[first["key"]])["data"]["mask"]["program"]["tables"]["doc"]["array"]
    assert again == {"key": first["key"]}
    assert first == {"key": digest(DOC), **html.plain(DOC)}


def test_explorer_problems_have_their_place():
    found = asked("(causal & windw(3)\n  | q)")
    assert found["error"] == "MaskSyntaxError"
    (one,) = found["problems"]
    assert (one["start"], one["stop"], one["where"]) == (10, 18, "mask 1:11")
    assert (one["line"], one["caret"]) == ("(causal & windw(3)", " " * 10 + "^" * 8)
    assert one["remedy"] == "did you mean `window`?"


@pytest.mark.parametrize(
    ("text", "name", "near"),
    [
        ("causl", "causl", "causal"),
        ("causl & window(64)", "causl", "causal"),
        ("window(64) & caus", "caus", "causal"),
        ("causal & (win | q > 3)", "win", "window"),
        ("score = softca", "softca", "softcap"),
        ("mask = causal\nscore = alib", "alib", "alibi"),
        ("def mine(w) = q - k < w\nmask = mi & causal", "mi", "mine"),
    ],
)
def test_misspelt_name_of_the_language_is_no_parameter(text, name, near):
    (one,) = asked(text)["problems"]
    assert text[one["start"] : one["stop"]] == name
    assert one["message"] == f"unknown name `{name}`"
    assert one["remedy"].startswith(f"did you mean `{near}`?")


def test_unknown_or_bound_name_is_a_parameter():
    assert [s["name"] for s in asked("causal & flag")["scalars"]] == ["flag"]
    assert [s["name"] for s in asked("causal & win", values={"win": True})["scalars"]] == ["win"]
    assert [s["name"] for s in asked("param caus: bool\nmask = causal & caus")["scalars"]] == ["caus"]
    assert [s["name"] for s in asked("causal & q - k < win")["scalars"]] == ["win"]  # a number, not a mask


@pytest.mark.parametrize(
    ("text", "values"), [("causl & window(64)", {"causl": True}), ("causal & q - k < window", {"window": 64})]
)
def test_a_value_makes_a_parameter_as_it_does_in_python(text, values):
    """A name near one of the library, and one that hides one: `frisket explore --set`, `fk.mask(..., name=value)`."""
    assert [s["name"] for s in asked(text, values={**values, "spare": 3})["scalars"]] == [*values]
    assert fk.mask(text, **values).scalars == values
    assert "error" in asked(text, values={"spare": 3})
    (one,) = asked(f"{text} & widnow(4)", values=values)["problems"]
    assert one["remedy"] == "did you mean `window`?"
    assert len(asked(f"{text} & widnow(4)")["problems"]) == 2


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ([], "ParameterError", "a request is a JSON object"),
        ({"text": 3}, "ParameterError", "a request is a JSON object"),
        ({"text": "x" * (CHARACTERS + 1)}, "ParameterError", "20,001 characters"),
        ({"text": "causal", "q_len": 0}, "ShapeError", "the number of queries is 0"),
        ({"text": "causal", "kv_len": LONGEST + 1}, "ShapeError", "the number of keys is 4194305"),
        ({"text": "causal", "heads": True}, "ShapeError", "heads is True"),
        ({"text": "causal", "block": [8]}, "ShapeError", "block is two lengths"),
        ({"text": "causal", "q_len": 1 << 22, "block": [8, 128]}, "ShapeError", "take larger tiles"),
        ({"text": "causal", "batch": 1 << 20}, "ShapeError", "batch, heads and rows"),
        ({"text": "causal", "values": {"w": "8"}}, "ParameterError", "values are numbers"),
        ({"text": "causal", "have": 3}, "ParameterError", "lists the digests"),
        ({"text": "doc[q] == doc[k]", "q_len": 4096}, "ParameterError", "give 4096"),
        ({"text": "causal & t[k // 8, q, k]", "q_len": 4096, "kv_len": 4096}, "ParameterError", "--table"),
        ({"text": "score * c", "values": {"c": float("nan")}}, "ParameterError", "`c` is not a number from -1e+300"),
        ({"text": "score * c", "values": {"c": 1e308}}, "ParameterError", "`c` is not a number from -1e+300"),
        ({"text": "window(w)", "values": {"w": 10**400}}, "ParameterError", "`w` is not a number from -1e+300"),
        ({"text": ""}, "MaskSyntaxError", "there is nothing here"),
        ({"text": "(" * 5000}, "MaskSyntaxError", ""),
    ],
)
def test_refusals_are_answers(request_, error, message):
    found = answer(request_, {"doc": DOC})
    assert found["error"] == error
    assert message in found["message"]


# -- values that nobody gave ------------------------------------------------------------------------------------


ENTRIES = [e for e in library().values() if e.name not in PARTS]


def check_entry(entry):
    made = shown(entry)
    text = {"mask": "full & ", "weight": "weight = "}.get(made["kind"], "") + made["text"]
    found = answer({"text": text, "q_len": 256, "kv_len": 256, "heads": 2, "block": [32, 32]}, {})
    assert "error" not in found, found["message"]
    assert (found["score"] is not None) is (made["kind"] != "mask")
    for s in found["scalars"]:
        assert s["low"] <= s["value"] <= s["high"]


@pytest.mark.parametrize("entry", ENTRIES[5::13], ids=lambda e: e.signature)
def test_explorer_draws_selected_library_entries(entry):
    check_entry(entry)


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.signature)
def test_explorer_draws_the_whole_library(entry):
    check_entry(entry)


@pytest.mark.parametrize(("q_len", "kv_len"), [(256, 256), (100, 256), (256, 100)])
def test_first_positions_are_those_of_the_documents(q_len, kv_len):
    text = "same_by_batch(t, start, sliding(4, 1))"
    found = answer({"text": text, "q_len": q_len, "kv_len": kv_len, "batch": 2}, {})
    assert "error" not in found, found["message"]


def test_a_slider_stays_while_it_is_moved():
    first = asked("window(w)")["scalars"][0]
    for value in (first["low"], first["step"] * 3, first["high"]):
        moved = asked("window(w)", values={"w": value})["scalars"][0]
        assert moved == {**first, "value": value}
    typed = asked("window(w)", values={"w": 10 * first["high"]})["scalars"][0]
    assert typed["high"] >= typed["value"]
    assert asked("window(w)", values={"w": -3})["scalars"][0]["low"] < -3


def test_ranges_follow_defaults_and_types():
    assert [(s["name"], s["value"], s["high"]) for s in asked("param w: int = 100\nmask = window(w)")["scalars"]] == [
        ("w", 100, slider("w", fk.dsl.types.INT, 100, guess("w", fk.dsl.types.INT, ProblemSize(512, 512))).high)
    ]
    assert asked("causal | b == 0 & flag")["scalars"] == [
        {"name": "flag", "type": "Bool", "value": True, "low": 0, "high": 1, "step": 1}
    ]
    assert asked("softcap(c)")["scalars"][0]["value"] == 50.0


def test_offsets_say_what_they_do():
    made = {"np": np}
    exec(OFFSETS, made)
    np.testing.assert_array_equal(made["offsets"](1000, 7), offsets(1000, 7))
    assert (np.diff(offsets(1000, 7)) > 0).all()


# -- score mods -------------------------------------------------------------------------------------------------


def test_a_score_mod_of_positions_is_a_map():
    found = asked("mask = causal\nscore = score + 0.01 * (k - q)", q_len=40, kv_len=40)["score"]
    change = np.array([[np.nan if x is None else x for x in row] for row in found["change"]])
    q, k = np.ogrid[:40, :40]
    want = np.where(q >= k, 0.01 * (k - q), np.nan)
    np.testing.assert_allclose(change * found["reach"], want, atol=1e-3 * found["reach"])


def test_explorer_draws_weights_as_it_draws_score_mods():
    found = asked("mask = causal\nweight = relu2\ndivide = count", q_len=40, kv_len=40)
    x = np.linspace(-found["score"]["span"], found["score"]["span"], len(found["score"]["curves"][0]))
    np.testing.assert_allclose(found["score"]["curves"][0], np.maximum(x, 0) ** 2, atol=1e-4)
    assert found["score"]["text"] == "weight = max(score, 0.0) ** 2"
    assert "fk.weight(text)" in found["python"]


def test_explorer_draws_a_score_curve_per_head():
    found = asked("score * (h + 1)", heads=3)["score"]
    x = np.linspace(-found["span"], found["span"], len(found["curves"][0]))
    for h, curve in enumerate(found["curves"]):
        np.testing.assert_allclose(curve, x * (h + 1), atol=1e-5)


def test_explorer_draws_tiles_hidden_by_a_score_mod():
    found = asked("where(q >= k, score, -inf)")
    assert found["tiles"] == asked("causal")["tiles"]
    beside = asked("mask = causal\nscore = where(q - k < 100, score, -inf)")
    assert beside["tiles"] == asked("causal & q - k < 100")["tiles"] != found["tiles"]


# -- elsewhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("causal & window(w)", {}),
        ("(causal &\n  document(off, causal & window(w)))", {"documents": 5}),
        ("same(ids) & t[k] | flag", {"heads": 2, "block": [64, 32]}),
        ("mask = causal & same_by_batch(t)\nscore = alibi(slopes) then softcap(c)", {"heads": 4, "batch": 2}),
        ('causal  # "quoted"', {}),
        ('mask = causal  # \'quoted\', """\nscore = softcap(c)  # C:\\x\n', {}),
    ],
)
def test_explorer_python_makes_the_same_layout(text, more, capsys):
    found = asked(text, **more)
    made = {}
    exec(found["python"], made)
    layout = made["mask"].layout(512, 512, more.get("batch", 1), more.get("heads", 1), more.get("block", (128, 128)))
    assert html.captions(layout) == {n: found[n] for n in ("shape", "block", "tiles", "facts")}
    assert capsys.readouterr().out == f"{layout}\n"
    assert isinstance(made["attend"], fk.Attention)


def test_explorer_command_shows_the_same_layout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("doc.npy", DOC)
    found = asked("(causal & same(doc) &\n window(w) | flag)", values={"flag": False}, heads=2, block=[64, 32])
    assert main([*shlex.split(found["command"])[1:], "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert f"{said['visible_pairs']:,} pairs" in found["cost"]
    assert (said["heads"], said["block"]) == (2, [64, 32])


def test_explorer_command_quotes_texts_that_look_like_options(capsys):
    assert main([*shlex.split(asked("-q<-k")["command"])[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mask"] == "-q < -k"


def test_amounts_have_prefixes():
    assert [amount(n, 1000, "FLOP") for n in (7, 58_800_000, 999_600, 4e12)] == [
        "7 FLOP", "58.8 MFLOP", "1 MFLOP", "4 TFLOP",
    ]  # fmt: skip
    assert amount(1 << 34, 1024, "B") == "16 GiB"


def test_explorer_answer_escapes_hostile_text():
    hostile = "</script><script>alert(1)</script><!-- {{data}} \u2028"
    text = page({"text": hostile}, {}, "abc")
    assert "<script>alert" not in text
    assert text.count("<script") == 5
    assert text.count("<script nonce=") == 4
    found = answer({"text": f"causal # {hostile}"}, {})
    assert "<script" not in "".join(found[n] for n in ("shape", "block", "tiles", "facts", "cost"))


def test_number_of_each_batch_entry_gets_one_slider():
    asked = {"text": "causal & k < n[b]", "q_len": 64, "kv_len": 64, "batch": 3}
    found = answer(asked, {})
    assert [(s["name"], s["value"]) for s in found["scalars"]] == [("n", 64)]
    assert found["made"] == {"n": "one number for all batch entries"}
    moved = answer({**asked, "values": {"n": 9}}, {})
    assert moved["scalars"][0]["value"] == 9
    assert "n = np.full((3,), 9)" in moved["python"]
    assert "--table n=n.npy" in moved["command"]
    assert "--set" not in moved["command"]
    assert not answer(asked, {"n": np.array([3, 4, 5])})["scalars"]  # a file has its values
    for text in ("k < n[b] + n[q]", "k < n[b, h]", "n[b] > 0.5", "k < lengths[b]"):
        assert not answer({**asked, "text": text}, {})["scalars"], text


def test_facts_that_are_not_computed_say_why():
    found = answer({"text": "random(3, b, h, q, k) < 0.5", "q_len": 1 << 17, "kv_len": 1 << 17}, {})
    for part in ("facts", "cost"):
        assert "not counted: too many pairs to look at" in found[part]
    text = str(fk.mask("random(3, b, h, q, k) < 0.5").layout(1 << 17, 1 << 17, budget=1000).facts)
    assert "the budget does not suffice to know whether every query sees a key" in text
    assert "\nvisible   not counted: too many pairs to look at" in text
