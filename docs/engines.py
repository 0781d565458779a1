"""The page of engines: `python docs/engines.py` writes the table of docs/engines.md between its two comments.

Masks and score mods are those of benchmarks/cases.py. Whether an engine takes one is asked of the code that calls ask:
the forms and flags of lowering/engines, the adapters of runtime/backends, the printer of CuTe functions.
"""

from __future__ import annotations

import sys
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

import cases  # noqa: E402

from frisket.dsl.errors import FrisketError  # noqa: E402
from frisket.lowering.engines.flags import Flags, flags_of  # noqa: E402
from frisket.lowering.engines.forms import NoForm, form_of  # noqa: E402
from frisket.lowering.kernels.cute.mods import emit  # noqa: E402
from frisket.lowering.pipeline import simplified_program, work  # noqa: E402
from frisket.lowering.plan import Geometry, Problem  # noqa: E402
from frisket.runtime.backends import splash  # noqa: E402
from frisket.runtime.backends.engines import square  # noqa: E402
from frisket.runtime.backends.engines.proof import EngineCall  # noqa: E402
from frisket.runtime.calls.program import program_of  # noqa: E402

PAGE = HERE / "engines.md"
BEGIN, END = "<!-- written by docs/engines.py -->", "<!-- end -->"
HEAD = ("entry", "FlashAttention 4", "SDPA, cuDNN", "splash", "proof")
LENGTH = 256  # tokens, at which values are looked at


@dataclass(frozen=True)
class EngineRow:
    """One entry of the library: "flags", "code" or "–" of each engine, and the clauses of its form."""

    name: str
    flash: str
    square: str
    splash: str
    proof: str


def rows() -> list[EngineRow]:
    """Every mask and score mod of the library."""
    masks = [row(n, c, c.mask, None) for n, c in cases.masks(LENGTH).items()]
    return masks + [row(n, c, None, c.score) for n, c in cases.mods(LENGTH).items()]


def row(name: str, case: Any, mask: Any, score: Any) -> EngineRow:
    program = program_of(mask, score, {})
    g = Geometry(case.batch, case.heads, case.heads, case.q_len, case.kv_len, 64, 64, 0.125)
    form = form_of(simplified_program(program).simplified)
    flags = "" if isinstance(form, NoForm) else flags_of(form, g, program.scalars, program.tables)
    if isinstance(form, NoForm) or not isinstance(flags, Flags):
        return EngineRow(name, code(program, case), "–", "–", "–")
    flash = "flags" if flash_takes(flags) else code(program, case)
    other = "flags" if not isinstance(square(flags, g, ""), str) else "–"
    asked = EngineCall(program, g, "float32", "jax", "tpu")
    third = "flags" if not isinstance(splash.arguments(flags, asked), str) else "–"
    proof = "; ".join(form.proofs) if "flags" in (flash, other, third) else "–"
    return EngineRow(name, flash, other, third, proof)


def flash_takes(flags: Flags) -> bool:
    """Whether FlashAttention 4 has flags for it: a window on either side, documents, a soft cap; everything else is
    code."""
    widths = all(x is None or (isinstance(x, int) and x >= 0) for x in (flags.left, flags.right))
    return widths and flags.keys is None and flags.queries is None and flags.slopes is None


def code(program: Any, case: Any) -> str:
    """ "code" where the mask and score mod print as CuTe functions, for which tiles are exact."""
    made = work(program, Problem(case.q_len, case.kv_len, case.batch, case.heads), (128, 128))
    try:
        emit(made.plan)
    except FrisketError:
        return "–"
    return "code"


def table(found: list[EngineRow]) -> str:
    flags, codes = (sum(r.flash == kind for r in found) for kind in ("flags", "code"))
    squares, splashes = (sum(r[i] == "flags" for r in map(astuple, found)) for i in (2, 3))
    said = (
        f"{len(found)} entries: FlashAttention 4 takes {flags} by flags and {codes} by code, SDPA and cuDNN {squares}, "
        f"splash {splashes}. Generated kernels run all of them."
    )
    lines = [said, "", f"| {' | '.join(HEAD)} |", "|" + " --- |" * len(HEAD)]
    lines += [f"| `{r.name}` | {r.flash} | {r.square} | {r.splash} | {r.proof} |" for r in found]
    return "\n".join(lines)


def page() -> str:
    """The page with the table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{table(rows())}\n\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
