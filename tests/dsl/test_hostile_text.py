"""Text from strangers: it is read, or refused in our words, with bounded work and memory. And what is read
is simplified, named canonically and printed, or refused, as soon."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lowering.effort import at_most
from support.tiers import default_only

import frisket as fk
from frisket.dsl.errors import FrisketError
from frisket.dsl.program import read
from frisket.lowering.simplify import ProgramExprs, canonical, prepare
from frisket.runtime.cli.main import main

FEW = 10_000_000  # calls of functions, a second or two


def chained(n: int, start: str, step: str, end: str = "") -> str:
    """n definitions, each made of the one before."""
    lines = [f"def f0 = {start}"]
    lines += [f"def f{i + 1} = " + step.replace("F", f"f{i}").replace("I", str(i + 2)) for i in range(n)]
    return "\n".join([*lines, f"f{n}{end}"])


def joined(sign: str, n: int, term: str) -> str:
    return sign.join(term.replace("I", str(i)) for i in range(n))


ACCEPTED = {  # long or deep, and fine
    "conjunction": joined(" & ", 900, "q - k < I + w"),
    "distinct names": joined(" & ", 1000, "aI > k"),
    "clauses": joined(" | ", 600, "(q < I & k > t[q + I])"),
    "xor": joined(" ^ ", 1500, "(q > I)"),
    "sum": joined(" + ", 800, "t[k + I]") + " > k",
    "product": joined(" * ", 1500, "(q + I)") + " > k",
    "minima": joined(" + ", 900, "min(q, t[k + I])") + " > k",
    "absolute values": joined(" + ", 40, "abs(q - k - I)") + " > k",
    "flags": joined(" + ", 600, "int(q > I)") + " > 3",
    "choices": joined(" + ", 600, "where(q > I, 1, 0)") + " > 3",
    "equalities": joined(" & ", 300, "tI[q] == tI[k]"),
    "lookups in lookups": "t[" * 190 + "q" + "]" * 190 + " > k",
    "minima in minima": "min(" * 190 + "q" + ", k)" * 190 + " > k",
    "remainders": "(" * 150 + "q" + joined("", 150, " % (I + 2) + q)") + " > k",
    "not": "not " * 12_000 + "q > 0",
    "floats": "score + " * 5_000 + "score",
    "powers": "(q + k) ** 64 > k & q ** 9999999999 > k & 9 ** 99999999 > q",
    "shifts": "q << 62 << 62 > k & 1 << 63 > k & k >> 4000000000 == 0 & q << 9223372036854775807 > k",
    "literals": "q * 9223372036854775807 * 9223372036854775807 > k - -9223372036854775808",
    "name": "a" * 30_000 + " > k",
    "newlines": "mask = q >= k\r\n\n\r\n# x\r\n",
    **{f"nested {step}": chained(120, start, step, end) for start, step, end in [
        ("q > k", "~(F & q > I)", ""), ("q > k", "~(F | t[q] > I) & k > I", ""), ("q > k", "~(F ^ t[q] > I)", ""),
        ("q > k", "where(t[q] > I, F, k > I)", ""), ("q", "max(min(F, t[I]), k)", " > k"), ("q", "abs(F - I)", " > k"),
        ("q", "(F + k) // I % I", " > k"), ("q", "F & I | k ^ 3", " > k"), ("q > k", "int(F) + int(k > I) > 1", ""),
        ("score", "where(k > I, F, -inf)", ""), ("float(q)", "F + float(k)", " > 0.0"),
        ("score", "min(F, exp(score))", ""),
    ]},
}  # fmt: skip
LIKE_OTHERS = ("choices", "clauses", "distinct names")  # sums, conjunctions and long names of the rest
REFUSED = {
    "brackets, a megabyte": "(" * 1_000_000,
    "both brackets": "([" * 500_000 + "])" * 500_000,
    "digits": "9" * 60_000 + " > q",
    "fraction": "0." + "1" * 60_000 + "e999999999 > q",
    "reduction": "any(j in 0..10**9: q > j)",
    "long reduction": "any(j in 0..1000000000: q > j)",
    "negative reduction": "any(j in 0 - 10**9..3: q > j) & any(i in 0..9: any(j in 0..9999: q > i))",
    "macros": "def a = q >= k\n" + "".join(
        f"def {'a' * (i + 2)} = {'a' * (i + 1)} & {'a' * (i + 1)}\n" for i in range(40)
    ) + "a" * 41,
    "macro arguments": "def f(x, y) = x * y + y * x\n" + "f(q, " * 100 + "k" + ")" * 100 + " > k",
    "definitions": chained(5_000, "q > k", "F & q > I"),
    "recursion": "def f = g\ndef g = f\nf",
    "nul": "q \0> k", "escape": "q \x1b[2J> k", "bell": "\x07q > k", "delete": "q > k\x7f",
    "right to left": "q \u202e> k", "isolate": "\u2066q > k\u2069",
    "zero width": "q\u200b > k", "joiner": "q\u200d > k",
    "mark": "\ufeffq > k", "surrogate": "q > \udc80k", "pair": "q > \ud83d\ude00", "plane 16": "q > \U0010ffff",
    "digits of another script": "q > \u0663", "full width": "\uff51 > k", "look-alike": "\u051b > k",
    "combining": "q\u0301 > k",
    "line separator": "q >\u2028 k", "no-break space": "q\u00a0> k", "next line": "q >\x85 k",
    "vertical tab": "q >\x0b k",
}  # fmt: skip


def everything(text: str) -> None:
    """What a mask given as text goes through before any shape is known; FrisketErrors are answers."""
    try:
        found = read(text)
        e = found.expr if found.expr is not None else found.mask if found.mask is not None else found.score
        boolean = str(e.type) == "Bool"
        exprs = prepare(ProgramExprs(e)) if boolean else prepare(ProgramExprs(score=e))
        str((exprs.mask, exprs.score))
    except FrisketError as error:
        str(error)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", default_only(ACCEPTED, *ACCEPTED.keys() - {"minima", "product", "flags", "floats", "xor", *LIKE_OTHERS})
)
def test_long_and_deep_text(name):
    with at_most(FEW):
        found = read(ACCEPTED[name])
    with at_most(2 * FEW):
        everything(ACCEPTED[name])
    if found.expr is not None and len(ACCEPTED[name]) < 6_000:
        canonical(found.expr)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_our_words(name):
    tracemalloc.start()
    with at_most(FEW), pytest.raises(FrisketError) as caught:
        read(REFUSED[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    shown = str(caught.value)
    assert len(shown) < 2_000
    assert all(c.isprintable() or c == "\n" for c in shown), "a terminal would obey it"


TOKENS = (
    "q k b h score B H Q_LEN KV_LEN w doc t causal window prefix same if else and or not in any all sum min max abs "
    "where int float floor exp clamp at segment random param def mask true false inf pi then ( ) [ ] , : .. = == != < "
    "<= > >= "
    "+ - * / // % ** << >> & | ^ ~ ! 0 1 2 7 255 9223372036854775807 1.5 1e300 \n # ; @ { } \" ' \\ \t"
).split(" ")


def soup(rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return " ".join(rng.choice(TOKENS) for _ in range(rng.randint(1, 40)))
    if kind == 1:  # a good text with a few tokens changed
        words = (
            "mask = causal & ( window ( w ) | doc [ q ] == doc [ k ] ) & where ( q > 3 , k < 5 , not q < k )".split()
        )
        for _ in range(rng.randint(1, 4)):
            words[rng.randrange(len(words))] = rng.choice(TOKENS)
        return " ".join(words)
    return "".join(
        chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0xD7FF)))) for _ in range(30)
    )


@pytest.mark.parametrize("part", range(4))
def test_token_soup_is_read_or_refused_in_bounded_steps(part):
    rng = random.Random(f"soup {part}")
    for _ in range(700):
        text = soup(rng)
        with at_most(FEW):
            everything(text)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_much_token_soup_is_read_or_refused(part):
    rng = random.Random(f"much soup {part}")
    for _ in range(5_000):
        everything(soup(rng))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(max_size=60))
def test_arbitrary_text_is_read_or_refused(text):
    everything(text)


BYTES = {
    "invalid UTF-8": b"mask = q >= k \xff\xfe\n", "truncated": b"mask = q >= k # \xe2\x82", "overlong": b"q \xc0\xaf k",
    "UTF-16": "mask = q >= k".encode("utf-16"), "nul": b"mask = q\x00 >= k", "binary": bytes(range(256)) * 40,
    "surrogate": b"q > \xed\xa0\x80k", "empty": b"", "a megabyte": b"(" * 1_000_000,
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_bytes_in_a_file(name, tmp_path, capsys):
    path = tmp_path / "m.frisket"
    path.write_bytes(BYTES[name])
    with pytest.raises(FrisketError):
        fk.load(path)
    assert main(["show", str(path)]) != 0
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err


@pytest.mark.parametrize(
    "argument", ["q >= k \udcff", "q \x1b[31m> k", "(" * 100_000, "x" * 300 + ".frisket", "a\0.frisket"]
)
def test_arguments_of_the_command(argument, capsys):
    assert main(["show", argument]) != 0
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert "\x1b[31m" not in shown.err


def test_bytes_on_the_command_line():
    """As a shell gives them: not UTF-8."""
    made = subprocess.run(
        [sys.executable, "-m", "frisket.runtime.cli.main", "show", b"q >= k \xff\xfe"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert made.returncode not in (0, -11)
    assert b"Traceback" not in made.stderr
