"""The loop that reads a tree: one generator per node, which asks for its parts with `yield node, frame`.

So depth is bounded by memory, not by Python's stack. All work is counted; texts that grow without end are refused.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, NoReturn

from . import ir
from .errors import Span
from .ir import Expr
from .names import KnownNames
from .operators import Frame, Part, Value
from .parse import MAX_NODES, Node, fail

Steps = Generator[tuple[Node, Frame], Value, Value]


@dataclass
class Walk(KnownNames):
    """The base of tree readers. A subclass reads a node in the method named after its kind: `_kind`."""

    sites: list[tuple[Span, Expr]] = field(default_factory=list)
    steps: int = 0
    fresh: int = 0

    def __post_init__(self) -> None:
        self.root = Frame(self.text, {})

    def evaluate(self, node: Node, frame: Frame) -> Value:
        stack: list[tuple[Steps, Node, Frame]] = []
        while True:
            self.steps += 1
            if self.steps > MAX_NODES:
                self.too_large(node, frame)
            step = getattr(self, "_" + node.kind)(node, frame)
            if type(step) is GeneratorType:
                stack.append((step, node, frame))
                value: Any = None
            else:
                value = self._seen(node, frame, step)
            while stack:
                steps, asked, where = stack[-1]
                try:
                    node, frame = steps.send(value)
                    break
                except StopIteration as done:
                    stack.pop()
                    value = self._seen(asked, where, done.value)
            else:
                return value  # type: ignore[no-any-return]

    def _seen(self, node: Node, frame: Frame, value: Value) -> Value:
        if frame is self.root and value.expr is not None:
            self.sites.append((node.span, value.expr))
        return value

    def too_large(self, node: Node, frame: Frame) -> NoReturn:
        at = frame.site or node
        message = f"the text expands to more than {MAX_NODES:,} nodes"
        fail(self.text, self.name, at.start, at.stop, message, "say it with fewer or smaller definitions")

    def parts(self, nodes: Sequence[Node], frame: Frame) -> Generator[tuple[Node, Frame], Value, list[Part]]:
        parts = []
        for n in nodes:
            parts.append((n, (yield n, frame)))
        return parts

    def charge(self, e: Expr, node: Node, frame: Frame, times: int = 1) -> None:
        """Count the work of substitution, so that doubling and quadratic texts end with an error."""
        self.steps += times * sum(1 for _ in ir.walk(e)) // 2
        if self.steps > MAX_NODES:
            self.too_large(node, frame)
