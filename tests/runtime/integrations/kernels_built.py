"""Native kernels that are asked for anew: each would start a compiler where none is kept on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from frisket.runtime.machine import cpp_build


@contextmanager
def built() -> Iterator[list[str]]:
    """The sources of kernels that the body loads for the first time in this process."""
    found: list[str] = []
    plain = cpp_build._find_or_build

    def build(source: str, *rest: Any) -> Any:
        found.append(source)
        return plain(source, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp_build, "_find_or_build", build)
        yield found
