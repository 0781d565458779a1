"""Plan: tables and layout of a mask whose values are numbers of the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from frisket.dsl.errors import EvaluationError
from frisket.dsl.transfer import distance_only
from frisket.lowering.pipeline import TiledPlan, simplified_program, work
from frisket.lowering.plan import Geometry, Problem, Spans, Target
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.calls.arrays import Stored
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.machine.parameters import locate

FEW_TILES = 4  # of 128 x 128 that a row of a narrow mask reads at most


class Plan:
    """A plan of a call whose tables the host knows, for given lengths: `att.plan(4096, 4096, 1, 8, doc=doc)`.

    >>> import torch, frisket as fk
    >>> att, (q, k, v) = fk.compile("causal"), torch.randn(3, 1, 2, 64, 16)
    >>> plan = att.plan(64, 64, batch=1, heads=2)
    >>> att(q, k, v, plan=plan).shape
    torch.Size([1, 2, 64, 16])
    >>> "generated kernels" in plan.engines(head_dim=16)  # which engine takes such calls, or why none does
    True
    >>> plan.rows((16, 16)).count, plan.columns((16, 16)).count.shape  # runs of tiles in every row and column
    (array([[1, 1, 1, 1]], dtype=int32), (1, 4))
    >>> plan.work((16, 16)).layout.counts
    Counts(empty=12, partial=8, full=12)

    Pass it to every layer: `att(q, k, v, plan=plan)`.
    """

    on_device = by_table = False
    common, planner = None, ""  # of plans on a device
    captured: Mapping[str, Any] = MappingProxyType({})  # arrays that its functions captured, as they were

    def __init__(self, program: CallProgram, problem: Problem, dropout: bool, ask_engines: Callable[..., str]) -> None:
        """`ask_engines` is `engines_text` of the backends, which import plans, for the options of the attention."""
        self.program = self.host_program = program  # all values are the host's
        self.problem, self.dropout, self.ask_engines = problem, dropout, ask_engines
        self.batch, self.heads, self.q_len, self.kv_len = problem.batch, problem.heads, problem.q_len, problem.kv_len
        self.origin, self.sizes = problem.origin, problem.sizes
        self.calls: dict[Any, Any] = {}  # key of a call -> its `PreparedCall`
        self.device_values: dict[str, Any] = {}  # values that are no part of it: none
        self._works: dict[tuple[Any, ...], TiledPlan] = {}
        self._others: dict[Stored | None, Plan] = {}
        self.shown: set[Target] = set()  # what FRISKET_SHOW has printed
        # whether rows see one short run of keys that slides along; of few queries nothing slides
        self.narrow = False
        if self.q_len > 64:
            tiled = self.work((128, 128))
            mask = tiled.plan.mask
            self.narrow = mask is not None and distance_only(mask) and tiled.layout.reads_at_most(FEW_TILES)
        else:
            program.require_bound()  # the layout of the others raises as well

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the program, its place and the options; a copy lays out tiles again."""
        return Plan, (self.program, self.problem, self.dropout, self.ask_engines)

    def work(self, block: tuple[int, int], proofs: bool = False) -> TiledPlan:
        """The inputs of the kernels in tiles of `block`, remembered."""
        tiled = self._works.get((block, proofs))
        if tiled is None:
            try:
                tiled = work(self.program, self.problem, block, proofs=proofs, dropout=self.dropout)
            except EvaluationError as error:
                locate(error, *self.program.parts)
                raise
            self._works[block, proofs] = tiled
        return tiled

    def rows(self, block: tuple[int, int]) -> Spans:
        """Records of key tiles per row of query tiles."""
        return self.work(block, proofs=True).spans

    def columns(self, block: tuple[int, int]) -> Spans:
        """Records of query tiles per row of key tiles."""
        return self.work(block, proofs=True).layout.transposed.spans

    @property
    def simplified(self) -> ProgramExprs:
        """Mask and score mod after the rules."""
        return simplified_program(self.program).simplified

    def stored_as(self, how: Stored | None) -> Plan:
        """A plan for keys and values that are stored so; kept, as it serves every layer."""
        if how == self.program.stored:
            return self
        if how not in self._others:
            # a new one: prepared calls are for keys that are stored otherwise
            self._others[how] = Plan(self.program.stored_as(how), self.problem, self.dropout, self.ask_engines)
        return self._others[how]

    def with_tables(self, values: dict[str, Any]) -> Plan:
        """The plan itself, which holds every value."""
        return self

    @property
    def scalars(self) -> Mapping[str, Any]:
        """Values of their scalars."""
        return self.program.scalars

    def engines(
        self,
        head_dim: int = 64,
        kv_heads: int | None = None,
        dtype: str = "float32",
        framework: str = "torch",
        device: str = "cpu",
    ) -> str:
        """The engine that runs calls with this plan on such arrays, and why each other does not, a line each:
        `sdpa: causal, window 255 to the left: SDPA has no window`."""
        lengths = self.batch, self.heads, kv_heads or self.heads, self.q_len, self.kv_len
        g = Geometry(*lengths, head_dim, head_dim, head_dim**-0.5, self.origin, self.sizes)
        return self.ask_engines(self, g, dtype, framework, device)

    def __repr__(self) -> str:
        return f"Plan({self.program}, {self.q_len} x {self.kv_len}, batch {self.batch}, {self.heads} heads)"
