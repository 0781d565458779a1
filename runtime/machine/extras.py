"""Packages that extras bring: an import that fails for want of one says which extra that is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from frisket.dsl.errors import MissingPackageError

DISTRIBUTION = "frisket-attention"  # `frisket` belongs to another project on the package index
EXTRAS = {
    "torch": "torch",
    "jax": "jax",
    "flax": "flax",
    "matplotlib": "plot",
    "qwix": "quantized",
    "transformers": "transformers",
}


def pip_install(extra: str) -> str:
    """The command that installs frisket with an extra.

    >>> pip_install("torch")
    "pip install 'frisket-attention[torch]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@contextmanager
def extras() -> Iterator[None]:
    """Around imports of optional packages: what is not there is a `MissingPackageError`.

    It is an ImportError too, so code that tries an import goes on working. Modules of our own, and packages that an
    installed package misses, raise what they raise.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if (extra := EXTRAS.get(missing.name or "")) is None:
            raise
        raise MissingPackageError(f"{missing.name} is not installed: {pip_install(extra)}", name=missing.name) from None
