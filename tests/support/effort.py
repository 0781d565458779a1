"""Work counted, not timed: a busy machine counts the same."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def at_most(calls: int) -> Iterator[None]:
    """The body enters and leaves fewer than `calls` functions, Python's and C's."""
    counted = itertools.count()

    def count(frame: object, event: str, argument: object) -> None:
        assert next(counted) < calls, f"more than {calls:,} calls: the work grows faster than the text"

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
