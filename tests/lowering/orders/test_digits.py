"""Orders by digits: every one is a permutation, its formula gives the same, and joining digits changes nothing."""

from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frisket.dsl.evaluate import evaluate
from frisket.dsl.sugar import q
from frisket.lowering.orders.candidates import OrderDigit, closed, merged, of_rank, places, position, rank


@st.composite
def digits(draw):
    """The digits of a few axes, each cut in up to three, in any sequence; the last step of an axis may be cut off."""
    found, place = [], 1
    for size in draw(st.lists(st.integers(2, 12), min_size=1, max_size=3)):
        step = 1
        while step < size:
            radix = draw(st.integers(2, size))
            radix = min(radix, -(-size // step))
            found.append(OrderDigit(place, radix, step, size))
            step *= radix
        place *= size
    return draw(st.permutations(found)), place


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(digits(), st.integers(0, 5))
def test_places_are_a_permutation_by_rising_digits(made, missing):
    order, length = made
    length = max(1, length - missing)
    found = places(order, length)
    assert sorted(found.tolist()) == list(range(length))
    keys = [tuple(int(p) // d.place % d.end // d.step % d.radix for d in reversed(order)) for p in found]
    assert keys == sorted(keys)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(digits())
def test_digit_order_formula_gives_the_places(made):
    order, length = made
    if closed(order, length):
        assert np.array_equal(evaluate(position(order, q), {"q": np.arange(length)}), places(order, length))
    else:
        assert prod(d.radix for d in order) > length


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(digits())
def test_joined_digits_are_the_same_order(made):
    order, length = made
    fewer = merged(order)
    assert len(fewer) <= len(order)
    assert np.array_equal(places(fewer, length), places(order, length))


@pytest.mark.parametrize("length", [16, 15, 13])
def test_digit_order_sorts_by_remainder(length):
    by_remainder = (OrderDigit(4, 4), OrderDigit(1, 4))
    assert places(by_remainder, length).tolist() == sorted(range(length), key=lambda p: (p % 4, p // 4))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(digits(), st.integers(0, 5))
def test_ranks_rise_along_the_order_and_lead_back(made, cut):
    order, whole = made
    at = places(order, whole - min(cut, whole - 1))
    numbers = rank(order, at)
    assert (np.diff(numbers) > 0).all()
    assert np.array_equal(of_rank(order, numbers), at)
    every = of_rank(order, np.arange(prod(d.radix for d in order)))
    assert np.array_equal(every, places(order, whole))
