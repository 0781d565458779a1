"""For tests that put a mistake in: what sound code has answered is forgotten."""

from frisket.grammar.memo import clear as forget

__all__ = ["forget"]
