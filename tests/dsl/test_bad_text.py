"""What bad text is told: bad_text.txt holds every message in full.

Each entry is a line `kind: text` (text as a Python literal), then the message, indented. After a deliberate
change: `python -m pytest tests/dsl/test_bad_text.py --tb=short` shows the new text to paste.
"""

from __future__ import annotations

import ast
import contextlib
import re
from pathlib import Path

import pytest
from support.lowering.effort import at_most
from support.tiers import default_only

from frisket.dsl.errors import FrisketError, MaskSyntaxError, ParameterError
from frisket.dsl.program import read
from frisket.runtime.masks.mask import mask, score

MESSAGES = Path(__file__).with_name("bad_text.txt")


def entries():
    for block in re.split(r"\n\n(?=mask: |score: )", MESSAGES.read_text(encoding="utf-8")):
        head, *lines = block.strip("\n").split("\n")
        kind, _, text = head.partition(": ")
        yield kind, ast.literal_eval(text), "\n".join(line[4:] for line in lines)


@pytest.mark.parametrize(("kind", "text", "message"), list(entries()), ids=[repr(t) for _, t, _ in entries()])
def test_bad_text_gets_its_message_in_full(kind, text, message):
    with pytest.raises(MaskSyntaxError) as caught:
        read(text, kind=kind)
    assert [line.rstrip() for line in str(caught.value).split("\n")] == message.split("\n")


def test_there_are_enough_of_them():
    assert len(list(entries())) >= 60


HOSTILE = {
    "brackets": "(" * 60_000,
    "indices": "t[" * 30_000,
    "closed": ")" * 60_000,
    "minus": "-" * 65_000 + "q > 0",
    "not": "not " * 16_000 + "q > 0",
    "tildes": "~" * 60_000 + "(q > 0)",
    "sum": "q + " * 16_000 + "q > 0",
    "short sum": "q + " * 9_000 + "q > 0",
    "chain": "q < " * 16_000 + "k",
    "powers": "q ** " * 12_000 + "2 > 0",
    "short powers": "score ** " * 6_000 + "2 > 0.0",
    "choices": "q > k if q > k else " * 3_000 + "q > k",
    "megabytes": "q >= k & " * 1_000_000,
    "digits": "1" * 60_000 + " > q",
    "float": "1e" + "9" * 60_000 + " > q",
    "nul": "q \0 k",
    "surrogate": "q \ud800 k",
    "control": "q \x1b[31m k",
    "bom": "\ufeffq >= k",
    "bidi": "q \u202e k",
    "commas": "min(" + "q," * 30_000 + "q) > k",
    "lines": "\n" * 65_000,
    "comment": "#" * 65_000,
    "names": "".join(f"param p{i}: int\n" for i in range(4_000)),
    "doubling": "def a = q >= k\n" + "".join(
        f"def {'a' * (i + 2)} = {'a' * (i + 1)} & {'a' * (i + 1)}\n" for i in range(40)
    ) + "a" * 41,
    "doubling arguments": "def f(x) = x + x\n" + "f(" * 60 + "q" + ")" * 60 + " > k",
    "moving": "def f0 = " + "q + " * 2_000 + "k > 0\n" + "".join(
        f"def f{i + 1} = f{i}(q = k, k = q)\n" for i in range(150)
    ) + "f150",
    "long call chain": "def f0 = q > k\n" + "".join(f"def f{i + 1} = f{i}\n" for i in range(2_000)) + "f2000",
    "big reductions": "any(a in 0..4096: " * 90 + "q > k" + ")" * 90,
    "huge shift": "q > 1 << 4000000000",
    "unused bombs": "def f(x) = x + x\n"
    + "".join(f"def g{i} = {'f(' * 30}q{')' * 30}\n" for i in range(300)) + "q > k",
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", default_only(HOSTILE, *HOSTILE.keys() - {"commas", "moving", "sum", "tildes", "choices", "minus", "not"})
)
def test_hostile_text_ends_soon_and_in_our_errors(name):
    with at_most(30_000_000), contextlib.suppress(FrisketError):
        read(HOSTILE[name], kind="mask")


def test_errors_of_a_text_are_reported_together():
    with pytest.raises(MaskSyntaxError) as caught:
        read("def f = q + (k > 1)\nmask = windw(3) & (q + (k > 2) > q)", kind=None)
    assert [p.message for p in caught.value.problems] == [
        "`+` takes numbers, `(k > 1)` is a Bool",
        "there is no function `windw`",
        "`+` takes numbers, `(k > 2)` is a Bool",
    ]


PARAMETERS = [
    (lambda: mask("q < w", w=3, v=4), "`v` is given but not used; remove it"),
    (lambda: mask("doc[q] == 0", dco=[1]), "`dco` is given but not used; the text says `doc`: give it as doc=..."),
    (lambda: mask("window(w)", W=3), "`W` is given but not used; the text says `w`: give it as w=..."),
    (
        lambda: mask("def f(a) = q >= k\nmask = f(w)", w=3),
        "`w` is given and has no effect: the text passes it to `f`, which does not use its parameter `a`\n"
        "  use `a` in `def f(a) = ...`, or remove both",
    ),
    (
        lambda: mask("q_idx >= kv_idx").dense(2, 2),
        "`q_idx` has no value (positions are `b`, `h`, `q` and `k`: write `q`); give it: q_idx=...",
    ),
    (lambda: mask("q < scale", scale=3), "`scale` is reserved; choose another name, for example `scale_`"),
    (lambda: mask("q < w", w="3"), "`w` is a str; give a number, or an array of bool, int or float"),
    (lambda: mask("q < w", w=2**70), f"`w` is {2**70}, which does not fit 64 bits"),
    (lambda: mask("q < t[k]", t=[1 + 2j]),
     "`t` is an array of complex128; give a number, or an array of bool, int or float"),
    (lambda: mask("q < t[k]", t=[]), "table `t` is empty"),
    (
        lambda: mask("param w: int\nq < w", w=1.5),
        "`w` is declared Int, the value is Float; nothing is rounded or cast: give Int, or declare `param w: float`",
    ),
    (
        lambda: mask("param doc: int[Q_LEN]\nsame(doc)", doc=[0.0, 1.0]),
        "`doc` is declared Int, the value is Float; nothing is rounded or cast: "
        "give Int, or declare `param doc: float[_]`",
    ),
    (lambda: mask("param w: int\nq < w", w=[1]), "`w` is declared with 0 axes, the value has 1"),
    (lambda: mask("q < w").dense(2, 2), "`w` has no value; give it: w=..."),
    (lambda: mask("doc[q] > 0").dense(2, 2), "`doc` has no value; give it: doc=<array>"),
    (lambda: mask("q < w").bind(w=1.5), "`w` is Int in the text, the value is Float; declare it: `param w: float`"),
    (lambda: mask("d[q] < 1").bind(d=1), "`d` is a table with 1 axis in the text, the value is a number"),
    (lambda: mask("q < w").bind(v=1), "`v` is given but not used by `q < w`"),
    (
        lambda: mask("same(doc)", doc=[0, 0, 1]).dense(4, 4),
        "table `doc` has 3 entries on axis 0 and is read at `q` = 0..3; "
        "give 4, or hide what lies beyond: `q < 3 & ...`",
    ),
    (lambda: mask("causal").dense(-1, 4), "q_len is -1\n  lengths are integers, 0 or more, in tokens"),
    (lambda: mask(score("alibi")), "this is a score mod, not a mask"),
    (lambda: score(mask("causal")), "this is a mask, not a score mod; a mask is given as mask=..."),
    (
        lambda: score("alibi") + score("softcap(50)"),
        "score mods compose with `then`: s.then(t) feeds the result of s to t as `score`; "
        "to add biases write one text, for example `score + a[h] + c[q, k]`",
    ),
    (
        lambda: bool(mask("causal")),
        "a mask has no truth value; write `&`, `|`, `~` for `and`, `or`, `not`",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("act", "message"), PARAMETERS, ids=[m[:40] for _, m in PARAMETERS])
def test_bad_parameters_get_their_message_in_full(act, message):
    with pytest.raises(FrisketError) as caught:
        act()
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError | SyntaxError)


def test_a_table_of_the_wrong_rank_or_type_has_a_place():
    with pytest.raises(MaskSyntaxError, match=r"(?s)`doc` is a table with 1 axis, indexed with 2.*mask 1:10"):
        mask("causal & doc[q, k] == 1", doc=[1, 2])
    with pytest.raises(
        MaskSyntaxError, match=r"(?s)`&` takes Bools or Ints, not both; `doc\[q\]` is an Int.*mask 1:10"
    ):
        mask("causal & doc[q]", doc=[1, 2])
    with pytest.raises(MaskSyntaxError, match=r"(?s)`w` is a table with 1 axis.*look it up: `w\[q\]`"):
        mask("q < w", w=[1, 2])
    with pytest.raises(MaskSyntaxError, match=r"(?s)`w` is a number, not a table"):
        mask("w[q] < 3", w=1)


def test_a_guarded_short_table_is_fine():
    assert mask("q < 3 & k < 3 & same(doc)", doc=[0, 0, 1]).dense(4, 4).sum() == 5


def test_unused_and_reserved_are_parameter_errors():
    for params in ({"v": 4}, {"b": 3}, {"not a name": 1}, {"if": 1}):
        with pytest.raises(ParameterError):
            mask("q < 4", **params)
