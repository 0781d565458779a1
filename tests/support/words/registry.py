"""Where masks in words are entered by name."""

from __future__ import annotations

WORDS = {}


def words(function):
    WORDS[function.__name__] = function
    return function


def each(keys):
    """The same keys for every batch entry and head."""
    return lambda b, h, q: keys(q)
