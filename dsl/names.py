"""The meaning of a name in a text: a definition, a number, a table, or a parameter whose type shows from its use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from . import ir, library
from .errors import TextProblem
from .ir import COORDINATES
from .library import Definition
from .operators import ERROR, LEAVES, Frame, Guess, Operators, Value
from .parse import Node
from .types import BOOL, Type, ranked


@dataclass
class KnownNames(Operators):
    """The names of one text. `known` gives (rank, type) of declared and bound names; rank 0 is a scalar."""

    known: Mapping[str, tuple[int, Type]] = field(default_factory=dict)
    definitions: Mapping[str, dict[int, Definition]] = field(default_factory=dict)
    used: dict[str, None] = field(default_factory=dict)
    passed: dict[str, tuple[Definition, str]] = field(default_factory=dict)  # names that are arguments of definitions

    def definitions_of(self, name: str, frame: Frame) -> dict[int, Definition] | None:
        """The definitions of `name` at this place; the user's names hide the library's, except inside the library."""
        if frame.site is None:
            if name in self.definitions:
                return self.definitions[name]
            if name in self.known:
                return None
        return library.definitions().get(name)

    def guess(self, frame: Frame, node: Node, name: str, rank: int) -> Guess | None:
        guess = self.guesses.setdefault(name, Guess((frame.site or node).span))
        if guess.rank is None:
            guess.rank = rank
        if guess.rank != rank:
            message = f"`{name}` is {ranked(guess.rank)} elsewhere and {ranked(rank)} here"
            self.report(frame, node, message, "use two names, or the same number of indices")
            return None
        return guess

    def parameter(self, frame: Frame, node: Node, name: str) -> Value:
        self.used[name] = None
        if name not in self.known:
            guess = self.guess(frame, node, name, 0)
            return ERROR if guess is None else Value(ir.param(name, guess.type), frozenset({name}))
        rank, type_ = self.known[name]
        if rank:
            indices = ", ".join(("q", "k") if rank == 2 else COORDINATES[-rank:] if rank > 2 else ("q",))
            return self.report(frame, node, f"`{name}` is {ranked(rank)}", f"look it up: `{name}[{indices}]`")
        return Value(ir.param(name, type_))

    def table(self, frame: Frame, node: Node, rank: int | None) -> tuple[str, Type, frozenset[str]] | None:
        """(name, element type, names that decide the type) of the table that a bare name stands for."""
        if node.kind != "name":
            self.report(frame, node, f"{self.quote(frame, node)} is not a table", "only a table's name takes `[ ]`")
            return None
        name = frame.names.get(node.value, node.value)
        local = node.value in frame.names
        if not isinstance(name, str) or (not local and (name in LEAVES or self.definitions_of(name, frame))):
            self.report(frame, node, f"`{node.value}` is not a table", "only tables take `[ ]`")
            return None
        self.used[name] = None
        if name in self.known:
            have, type_ = self.known[name]
            if have == 0:
                self.report(frame, node, f"`{name}` is a number, not a table", f"write `{name}` without `[ ]`")
                return None
            if rank is not None and have != rank:
                more = self._wider(frame, name, have)
                self.report(
                    frame, node, f"`{name}` is {ranked(have)}, indexed with {rank}", f"give {have}, one per axis", more
                )
                return None
            return name, type_, frozenset()
        if rank is None:  # `extent` and `dot` do not tell how many axes a table has
            guess: Guess | None = self.guesses.setdefault(name, Guess((frame.site or node).span))
        else:
            guess = self.guess(frame, node, name, rank)
        return None if guess is None else (name, guess.type, frozenset({name}))

    def _wider(self, frame: Frame, name: str, rank: int) -> str:
        """The library's definition for tables with more axes than the called definition takes, or with one."""
        axes = {1: ("", "[length]"), 2: ("_by_batch", "[batch, length]"), 3: ("_by_head", "[batch, heads, length]")}
        if frame.definition is None or rank not in axes:
            return ""
        suffix, shape = axes[rank]
        other = frame.definition.name.split("_by_")[0] + suffix
        return f"for a table {shape} write `{other}({name})`" if other in library.definitions() else ""

    def arity(self, node: Node, frame: Frame, signatures: str, count: int) -> Value:
        plural = "argument" if count == 1 else "arguments"
        return self.report(frame, node, f"`{node.value.text}` does not take {count} {plural}", f"it is {signatures}")

    def misspelled(self) -> None:
        """Report each undeclared Bool whose name is nearly a definition's name as a misspelling."""
        candidates = [*library.definitions(), *self.definitions]
        for name, guess in self.guesses.items():
            # a Bool alone: numbers and tables are parameters in most masks
            near = get_close_matches(name, candidates, 1, 0.75) if guess.rank == 0 and guess.type is BOOL else []
            if near and "." not in name:
                remedy = f"did you mean `{near[0]}`? A parameter of that name is declared: `param {name}: bool`"
                # another problem at this place says more
                self.problems.setdefault(guess.span, TextProblem(f"unknown name `{name}`", guess.span, remedy))
