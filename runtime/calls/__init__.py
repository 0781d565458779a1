"""The arguments of a call. This file is imported with the package, so it imports nothing of it."""

from collections.abc import Callable

makers: list[Callable[[], object]] = []  # imports that register the makers of attentions, which the package adds
