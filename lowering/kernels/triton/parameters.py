"""The parameters of the Triton kernels: their names, the parameters a plan needs, and their text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frisket.dsl.ir import SIZES, var, walk
from frisket.lowering.kernels.expr import POSITION, levels
from frisket.lowering.kernels.text import Names
from frisket.lowering.plan import FIRST, K_SCALE, PAGES, RATE, SEED, V_SCALE, LoopPlan

from . import expr as expr_triton

NAMED = {SEED: "seed", RATE: "rate", K_SCALE: "k_scale", V_SCALE: "v_scale", PAGES: "pages", FIRST: "first_key"}
QUERY = var("q")
# Names that a kernel uses itself: a slot or table of such a name gets another one.
OWN = (
    """
attention_forward attention_delta attention_dq attention_dkv attention_dv attention_decode attention_combine
Q K V Out Lse Low Top Sinks DOut DQ DK DV Spans Count SliceOf Order records scale heads q_len kv_len
b_origin h_origin q_origin k_origin ORIGIN_PER_BATCH NEAR b h q k q_first q_last k_first k_last
BLOCK_Q BLOCK_K HEAD_DIM V_DIM DIM DIM_V GROUP LOWEST program row batch head place kv_head distinct entry record used
query keys values d e rows columns start lo full_lo full_hi hi first full_first full_last last key_at value_at
at i j tile inside visible score unit top peak rescale total p kept acc out lse largest sink empty present
range float int bool out_at
attention_diagonal attention_plane attention_total attention_scatter Sums Total PerUnit Into Counted q_at k_at v_at
dout_at dout dp dm modified survivor seen share shift diagonal diagonals turned moved ahead counted per parts to batches
Acc Tops Totals splits part packed QUERIES PACK first_head PARTS row_at begin end tiles border full tops totals
weight query_at pool page paged seen scaled h_first
q_line k_line away here
Stats stats stats_at pairs factor edge _ DLse low near dq dk dv at_q at_k queries douts own delta ds derivative
Parts LANES lanes rows_of_tiles of_rows needed begun at_row first_at
gluon gl hopper mbarrier tma produce consume load_tile store_tile group_barrier sigmoid ALL STAGES half outs turns
q_full k_full k_free v_full v_free slot phase before before_phase left borders n weights zero dtype
SCORES SUMS ROWS COLUMNS HALF EACH LAYOUT blackwell multiply columns_of seen_as weights_in
s_full p_full o_full scores sums key grown some every of_sequences behind exp2_polynomial exponent biased rest whole
any_grown
of_slice At Rows within listed part_at attention_dq_sums attention_dkv_sums attention_dv_sums
""".split()
    + [f"stride_{tensor}{axis}" for tensor in "qkvog" for axis in "bhsd"]
    + [f"{name}{part}" for name in "d e query keys values key_at value_at acc".split() for part in "01"]
)


@dataclass(frozen=True)
class Argument:
    """A slot or table as a parameter of the kernel: its value or pointer, and for a table its axes."""

    name: str
    sizes: tuple[str, ...] = ()
    strides: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (self.name, *self.sizes, *self.strides)


def arguments(plan: LoopPlan) -> dict[str, Argument]:
    """The names in the kernel by `Slot.name` and `TableUse.name`: the user's own where they are free."""
    names = Names({*OWN, *SIZES, *expr_triton.all_names()})
    found = {s.name: Argument(names.new(NAMED.get(str(s.source), s.name))) for s in plan.slots}
    for t in plan.every_table:
        wish = NAMED.get(t.source, t.source)
        name = names.new(f"{wish}_{t.derived.split('_')[1]}" if t in plan.run_tables else wish)
        axes = [""] if t.rank == 1 else [str(i) for i in range(t.rank)]
        sizes = tuple(names.new(f"{name}_size{i}") for i in axes)
        found[t.name] = Argument(name, sizes, tuple(names.new(f"{name}_stride{i}") for i in axes))
    return found


def rows_of_tables(plan: LoopPlan) -> dict[str, int]:
    """The axis of each table, before its last, that counts queries: the 1 of `bias[h, q, k]`, by `TableUse.name`."""
    roots = [e for e in (plan.mask, plan.score, plan.weight) if e is not None]
    found: dict[str, set[int]] = {}
    for node in walk(*roots):
        if node.op == "lookup":
            axes = [i for i, a in enumerate(node.args[:-1]) if a is QUERY]
            found.setdefault(node.name, set()).add(axes[0] if len(axes) == 1 else -1)
    return {n: axes.pop() for n, axes in found.items() if len(axes) == 1 and -1 not in axes}


def near(shape: Sequence[int], strides: Sequence[int], axis: int, rows: int) -> bool:
    """Whether so many rows of a table, along one of its axes, are within 2**31 entries of one another."""
    return rows * strides[axis] + shape[-1] * strides[-1] < 1 << 31


def taken(plan: LoopPlan) -> Names:
    """The names that the kernel of this plan uses for other things."""
    return Names({*OWN, *SIZES, *expr_triton.all_names()}.union(*(a.all for a in arguments(plan).values())))


def parts(dim: int) -> tuple[int, ...]:
    """The powers of two, one or two, that a head size is worked on in: 96 as 64 and 32, not as a padded 128.

    >>> parts(96), parts(128), parts(72), parts(112), parts(40)
    ((64, 32), (128,), (64, 16), (128,), (64,))
    """
    most = 1 << (dim.bit_length() - 1)
    rest = padded(dim - most)
    return (most, rest) if dim > 64 and dim > most > rest else (padded(dim),)


def padded(dim: int) -> int:
    """The power of two, at least 16, that Triton's dot needs."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Parameters:
    """The parameters of one kernel beside its tensors: `used` are the variables its expressions mention, `tabled`
    says that the records come from a table, `closed` that they come from formulas, `ordered` that rows are taken in
    the order of their work."""

    plan: LoopPlan
    used: frozenset[str]
    tabled: bool
    closed: bool
    ordered: bool = True

    def origins(self) -> list[str]:
        """The origins that the expressions and bounds ask for."""
        of = {"b": ["b"], "h": ["h", "h_first"], "q": ["q", "q0", "q1", "q_line"], "k": ["k", "k0", "k1", "k_line"]}
        if self.closed:
            return [n for n, names in of.items() if n in "qk" or self.used.intersection(names)]
        return [n for n, names in of.items() if self.used.intersection(names)]

    def run_time(self, numbers: Sequence[str]) -> list[str]:
        """The scalars whose value must not make a new kernel."""
        slots = [arguments(self.plan)[s.name].name for s in self.plan.slots]
        sizes = [n for t in self.plan.every_table for n in arguments(self.plan)[t.name].sizes]
        own = ["records"] if self.tabled else []
        return [*numbers, *own, *(f"{n}_origin" for n in self.origins()), *self.sizes(), *slots, *sizes, *self._steps()]

    def _steps(self) -> list[str]:
        """The strides of tables where loads are no wider for being divisible: they depend on lengths."""
        roots = [e for e in (self.plan.mask, self.plan.score, self.plan.weight) if e is not None]
        wide = {n.name for n, at in levels(*roots).items() if n.op == "lookup" and at == POSITION}
        tables = [arguments(self.plan)[t.name] for t in self.plan.every_table if t.name not in wide]
        return [n for t in tables for n in t.strides[:-1]]

    def sizes(self) -> list[str]:
        """The global sizes that the expressions read."""
        return [n for n in SIZES if n in self.used]

    def holes(self, numbers: Sequence[str]) -> dict[str, Any]:
        """The holes of a kernel's decorator and of parameters.tpl; `numbers` are integers of the kernel's own."""
        named, origins = arguments(self.plan), self.origins()
        varying = ", ".join(f'"{n}"' for n in self.run_time(numbers))
        jit = [f"@triton.jit(do_not_specialize=[{varying}])"]
        if len(varying) >= 80:
            wrapped = [f"        {line}" for line in textwrap.wrap(f"{varying},", 100)]
            jit = ["@triton.jit(", "    do_not_specialize=[", *wrapped, "    ]", ")"]
        return {
            "jit": jit,
            "numbers": ", ".join(numbers),
            "tabled": self.tabled,
            "closed": self.closed,
            "everything": not self.tabled and not self.closed,
            "ordered": self.ordered,
            "origins": "".join(f"{n}_origin, " for n in origins)[:-1],
            "moved": [n for n in origins if n in "qk"],
            "sizes": "".join(f"{n}, " for n in self.sizes())[:-1],
            "slots": "".join(f"{named[s.name].name}, " for s in self.plan.slots)[:-1],
            "tables": [f"{', '.join(named[t.name].all)}," for t in self.plan.every_table],
        }
