"""What a campaign compares. A check of a target raises where frisket is wrong.

Programs and their meaning come from tests/outside/programs.py, which evaluates them without frisket.
"""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from outside.programs import EMPTY, FULL, PARTIAL, Array, Case, check_layout, kinds_of

import frisket as fk
from frisket.runtime.masks.mask import program

from .attention import BACKEND, dropout, gradients, reorder, score, statistics, weights
from .caches import caches, stores
from .derivatives import derivatives
from .front import front, front_of
from .invariant import invariant
from .kernels import OTHERS, flash, gluon, kernels, pallas, triton
from .kernels import rows as rows_of_orders
from .parallel import parallel, square_of
from .problem import Problem, problem_of, rows
from .questions import answers, exports
from .selection import select
from .simplified import simplifier, simplifier_of

__all__ = [
    "TARGETS",
    "Problem",
    "hostile",
    "limited",
    "problem_of",
    "rows",
    "seconds_of",
    "tiles",
    "trouble",
    "what_of",
]

SECONDS = 20.0  # of processor time, for one case
COMPILING = ("invariant", "kernels", "rows", "triton", "gluon", "flash", "pallas", "parallel")  # whose cases take 120


def seconds_of(target: str) -> float:
    """The processor time of a case, while it is looked for and while it is made smaller."""
    compiles = target in COMPILING or (target == "weights" and BACKEND != "library")
    return 120.0 if compiles else SECONDS


class TooLong(BaseException):
    """A case takes more than `SECONDS`. No `except Exception` of frisket holds it up."""


@contextmanager
def limited(seconds: float | None = None) -> Iterator[None]:
    """The block may take `seconds` of processor time, `SECONDS` by default. Signals reach the main thread only."""
    seconds = SECONDS if seconds is None else seconds
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a time limit needs the main thread")

    def stop(*_: Any) -> None:
        raise TooLong(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# -- targets: each returns what counts as the same case ----------------------------------------------------------


def meaning(p: Problem) -> str:
    """The dense mask, by frisket's interpreter, beside the evaluator of the generator."""
    m = fk.mask(p.text, **p.bound)
    found = m.dense(*p.lengths, **p.where)
    assert found.shape == p.seen.shape, f"shape: {found.shape}"
    assert (found == p.seen).all(), f"dense: {np.argwhere(found != p.seen)[0]}"
    return str(m)


def layout(p: Problem) -> str:
    """Tiles beside those of the dense mask: labels, exactness, counts, spans of rows and of columns; then of a crop."""
    m = fk.mask(p.text, **p.bound)
    tiles(m.layout(*p.lengths, block=p.block, **p.where), p.seen, p.block)
    batch, heads, q_len, kv_len = p.seen.shape
    q0, k0 = q_len // 3, kv_len // 2
    crop = m.layout(
        q_len - q0, kv_len - k0, block=p.block, origin=(0, 0, q0, k0), sizes=(batch, heads, q_len, kv_len), **p.where
    )
    tiles(crop, p.seen[:, :, q0:, k0:], p.block)
    return str(m)


def tiles(found: Any, seen: Array, block: tuple[int, int]) -> None:
    check_layout(found, seen, block)
    kinds = found.kinds()
    true = kinds_of(seen, block)
    assert (expanded(found.spans, kinds.shape[3]) == kinds).all(), "spans are not the tiles"
    columns = expanded(found.transposed.spans, kinds.shape[2]).swapaxes(2, 3)
    wrong = (columns != PARTIAL) & (columns != true)
    assert not wrong.any(), f"transposed: tile {np.argwhere(wrong)[0]} is {true[wrong][0]}, not {columns[wrong][0]}"
    if found.exact:
        assert (columns == true).all(), "transposed: a loose tile in an exact layout"


def expanded(spans: Any, length: int) -> Array:
    """Kinds of tiles [batch, heads, rows, length]: a span is partial tiles, full ones, partial ones."""
    of_slices = np.full((*spans.count.shape, length), EMPTY)
    for at in np.ndindex(*spans.count.shape):
        for start, full, rest, stop in spans.bounds[at][: spans.count[at]]:
            assert (of_slices[at][start:stop] == EMPTY).all(), "spans overlap"
            of_slices[at][start:stop] = PARTIAL
            of_slices[at][full:rest] = FULL
    return of_slices[spans.slice_of]


def canonical(p: Problem) -> str:
    """Text to mask to text: the same mask again, from synonyms and from a pickle too."""
    m = fk.mask(p.text, **p.bound)
    text = str(m)
    again = fk.mask(text, **m.params)
    assert again == m, "text: another mask"
    assert str(again) == text, "text: another text"
    assert hash(again) == hash(m), "text: another hash"
    if p.synonym:
        assert fk.mask(p.synonym, **p.bound) == m, "synonym: another mask"
    stored = pickle.loads(pickle.dumps(m))
    assert stored == m, "pickle: another mask"
    assert str(stored) == text, "pickle: another text"
    assert (stored.dense(*p.lengths, **p.where) == p.seen).all(), "pickle: another meaning"
    return text


def hostile(text: str) -> str:
    """Any text at all: a mask, a score mod and a program of it work, or raise an error of frisket."""
    for read in (as_mask, fk.score, program):
        try:
            read(text)
        except fk.FrisketError as raised:
            words = str(raised)
            if not words.strip():
                raise AssertionError("an error without words") from raised
    return text


def as_mask(text: str) -> None:
    m = fk.mask(text)
    assert fk.mask(str(m), **m.params) == m, "text: another mask"
    given = {"w": 3, "n": 2, "doc": np.array([0, 0, 1]), "rank": np.array([2, -1, 0]), "flag": np.array([True, False])}
    m = fk.mask(text, **{name: x for name, x in given.items() if name in str(m)})
    tiles(m.layout(9, 7, block=(4, 2), batch=2), m.dense(9, 7, batch=2), (4, 2))


TARGETS: dict[str, Callable[[Any], str]] = {
    "meaning": meaning,
    "layout": layout,
    "canonical": canonical,
    "front": front,
    "simplifier": simplifier,
    "hostile": hostile,
    "answers": answers,
    "exports": exports,
    "score": score,
    "gradients": gradients,
    "weights": weights,
    "derivatives": derivatives,
    "invariant": invariant,
    "kernels": kernels,
    "triton": triton,
    "gluon": gluon,
    "flash": flash,
    "pallas": pallas,
    "parallel": parallel,
    "statistics": statistics,
    "select": select,
    "dropout": dropout,
    "reorder": reorder,
    "rows": rows_of_orders,
    "caches": caches,
    "stores": stores,
}


def what_of(target: str, case: Case | str) -> Problem | str:
    """What a target is asked of a case: a problem, with others of the same program where kernels are compiled."""
    if isinstance(case, str):
        return case
    made = {"parallel": square_of, "front": front_of, "simplifier": simplifier_of}.get(target)
    return made(case) if made else problem_of(case, OTHERS.get(target, 0))


def trouble(target: str, what: Problem | str) -> tuple[str, str] | None:
    """(kind of failure, its words) of a case, and None of one that passes."""
    try:
        with limited(seconds_of(target)):
            TARGETS[target](what)
    except (Exception, TooLong) as error:
        return kind_of(error), f"{type(error).__name__}: {error}"
    return None


def kind_of(error: BaseException) -> str:
    """Failures of one kind have one cause, most likely: the class, and the words before a colon of what we assert."""
    return f"{type(error).__name__} {str(error).partition(':')[0] if isinstance(error, AssertionError) else ''}".strip()
