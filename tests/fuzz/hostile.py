"""Texts that are mutated: by characters, tokens, nesting and numbers."""

from __future__ import annotations

import random
import re

from outside.programs import make

SCORES = [
    "score - alibi(h, H)", "softcap(score, 30.0)", "score + bias[q, k]", "where(q >= k, score, -inf)",
    "score * exp(-1e3)",
    "score + log(abs(q - k) + 1)", "param w: int = 4\nscore = score - 0.5 * (q - k)\nmask = causal & window(w)",
]  # fmt: skip
STRANGE = "\0\t\n\r \x7f\x85\xa0\u2028\u200b\u202e\ufeff\ud800\U0001f600é²٣ªΩ#\"'\\`$@!?;{}_"
TOKEN = re.compile(r"\s+|\w+(?:\.\w+)?|[<>=!*/&|.]{2}|.", re.DOTALL)
WORDS = (
    "q k b h Q_LEN KV_LEN B H and or not xor if else in any all sum at def param mask score where min max abs clamp "
    "causal window document same sinks exp log inf nan True False lambda import ( ) [ ] , : .. = == != < <= > >= + - "
    "* / // % ** << >> & | ^ ~ -> ; # doc rank flag w n j int float bool"
).split()
NUMBERS = [
    "0", "1", "-1", "00", "007", "1_000", "0x10", "1e3", "1e400", "-1e-400", "1.", ".5", "1.5.2", "inf", "nan", "True",
    *(str(s * 2**n + d) for n in (31, 32, 53, 62, 63, 64, 200) for s in (1, -1) for d in (-1, 0, 1)), "9" * 5000,
]  # fmt: skip
WRAPPERS = [
    ("(", ")"), ("not ", ""), ("~", ""), ("-", ""), ("abs(", ")"), ("doc[", "]"), ("q >= k & (", ")"), ("1 + ", ""),
    ("at(", ", q = q + 1, k = k)"), ("any(j in 0..3: ", ")"), ("sum(j in 0..9: j + ", ")"), ("", " ** 2"), ("[", "]"),
    ("q if k else ", ""), ("", " & causal"), ("", " - (q - k)"), ("causal | (window(2) ^ ", ")"), ("def f(x) = ", "\n"),
]  # fmt: skip
# how often, and how likely: a wrapper in its thousands takes the time of a hundred other texts
TIMES = {1: 9, 2: 9, 5: 9, 20: 9, 199: 5, 200: 5, 201: 5, 1000: 2, 5000: 1}


def characters(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    stop = min(len(text), at + draw.choice([1, 1, 2, 9]))
    new = draw.choice(
        [draw.choice(STRANGE), chr(draw.randrange(128)), chr(draw.randrange(0x110000)), "", text[at:stop]]
    )
    return text[:at] + new + text[draw.choice([at, stop]) :]


def tokens(text: str, draw: random.Random) -> str:
    parts = TOKEN.findall(text) or [""]
    at, other = draw.randrange(len(parts)), draw.randrange(len(parts))
    how = draw.choice(["word", "word", "word", "without", "twice", "swap", "insert", "copy"])
    if how == "without":
        del parts[at]
    elif how == "twice":
        parts.insert(at, parts[at])
    elif how == "swap":
        parts[at], parts[other] = parts[other], parts[at]
    elif how == "copy":
        parts[at:at] = parts[other : other + draw.randint(1, 20)]
    elif how == "insert":
        parts.insert(at, f" {draw.choice(WORDS)} ")
    else:
        parts[at] = draw.choice(WORDS)
    return "".join(parts)


def nesting(text: str, draw: random.Random) -> str:
    """A part of the text, wrapped some times over."""
    before, after = draw.choice(WRAPPERS)
    parts = TOKEN.findall(text) or [""]
    at = draw.randrange(len(parts)) if draw.random() < 0.5 else 0
    stop = draw.randint(at + 1, len(parts)) if at else len(parts)
    (times,) = draw.choices([*TIMES], TIMES.values())
    return "".join([*parts[:at], before * times, *parts[at:stop], after * times, *parts[stop:]])


def numbers(text: str, draw: random.Random) -> str:
    found = [*re.finditer(r"\d+", text)]
    if not found:
        return text + draw.choice(["<", "+", ">>", " & window("]) + draw.choice(NUMBERS)
    one = draw.choice(found)
    return text[: one.start()] + draw.choice(NUMBERS) + text[one.end() :]


def make_text(seed: int) -> str:
    """A program of the generator, or a score mod, with one mutation to four."""
    draw = random.Random(seed)
    text = draw.choice(SCORES) if draw.random() < 0.1 else make(seed).text
    for _ in range(draw.choice([1, 1, 2, 4])):
        text = draw.choice([characters, tokens, tokens, nesting, numbers])(text, draw)
    return text
