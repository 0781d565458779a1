"""A picture to a file: whole or not at all."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from frisket.dsl.errors import ParameterError


def save(path: Path, content: bytes) -> None:
    """Write beside `path` and move it there, so that nobody ever reads half a picture."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(content)
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise ParameterError(f"cannot write {path}: {error.strerror}") from None
