"""Random programs beside an evaluator of their own: meaning, layouts, crops, answers, attention."""

import random

import numpy as np
import pytest

from . import programs
from .programs import EMPTY, FULL, PARTIAL, Node, campaign, kinds_of, make, quotient, remainder, shifted, value


@pytest.mark.parametrize("first", range(0, 4000, 100))
def test_random_programs_agree_with_the_outside_evaluator(first):
    failed = {seed: (why, make(seed).text) for seed, why in campaign(first, 100)}
    assert not failed


def test_a_seed_is_a_program():
    assert make(7).text == make(7).text
    assert len({make(seed).text for seed in range(200)}) > 180


def test_outside_evaluator_gives_the_examples_of_the_page():
    """The examples that docs/language.md states."""
    assert quotient(-7, 2) == -4
    assert [quotient(7, 0), remainder(7, 0), remainder(-7, 2)] == [0, 0, 1]
    assert [shifted("<<", 1, 4), shifted("<<", 1, 64), shifted(">>", 1, -1)] == [16, 0, 0]
    case = make(0)
    case.tables["t"] = np.array([5, 6])
    for index, entry in ((-3, 5), (0, 5), (1, 6), (9, 6)):
        assert value(Node("lookup", (Node("number", held=index),), "t"), {}, case) == entry


def test_an_argument_is_read_where_the_body_reads_it():
    """`f(doc[q])` of `def f(x) = at(x > k, q = q * 3, k = k // 2)` reads the table at q * 3."""
    case = make(5001344)
    assert "at((y > k), q = (q * 3), k = (k // 2))" in case.text
    programs.check(case)


def test_tiles_are_counted_by_hand():
    seen = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 0]], bool)[None, None]
    assert kinds_of(seen, (2, 2)).tolist() == [[[[FULL, EMPTY], [EMPTY, EMPTY]]]]
    assert kinds_of(seen, (3, 1)).tolist() == [[[[PARTIAL, PARTIAL, EMPTY]]]]


def test_a_wrong_evaluator_is_noticed(monkeypatch):
    """One sign turned round: some program of a few finds it."""
    monkeypatch.setitem(programs.ON_INTS, ">=", np.greater)
    assert list(campaign(random.Random(0).randrange(1000), 30, attention=0))
