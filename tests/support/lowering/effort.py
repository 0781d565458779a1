"""Work counted, not timed: a busy machine counts the same."""

from __future__ import annotations

import gc
import itertools
import sys


class at_most:  # noqa: N801
    """The body enters and leaves fewer than `calls` functions, Python's and C's."""

    def __init__(self, calls: int) -> None:
        self.calls, self.counted = calls, itertools.count()

    def _count(self, frame: object, event: str, argument: object) -> None:
        assert next(self.counted) < self.calls, f"more than {self.calls:,} calls: the work grows faster than the text"

    def __enter__(self) -> None:
        gc.disable()  # a collection calls what has nothing to do with the body
        sys.setprofile(self._count)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        gc.enable()
