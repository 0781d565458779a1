"""Small programs, each with something that none before it has: an operator, a function, a method of the layout.

`python -m fuzz.corpus 6000`, in `tests`, draws as many programs and writes those kept to corpus/programs.jsonl.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from outside.programs import Case, Node, kinds_of, make

import frisket as fk

from .problem import Problem, problem_of, rows

FILE = Path(__file__).parent / "corpus" / "programs.jsonl"
LARGEST = 300  # pairs of a program
SEED = 500_000_000_000


def features(case: Case, p: Problem) -> set[str]:
    layout = fk.mask(p.text, **p.bound).layout(*p.lengths, block=p.block, **p.where)
    found = {f"method {layout.facts.method}", f"exact {layout.exact}"}
    found |= {f"{layout.facts.method}, tile {x}" for x in np.unique(kinds_of(p.seen, p.block))}
    trees = [case.mask, *(body for _, body in case.definitions.values())]
    found |= {x for tree in trees for x in parts(tree)}
    return found | {f"{n} of {kind}" for kind in ("scalars", "tables", "defaults") for n in getattr(case, kind)}


def parts(n: Node) -> Iterator[str]:
    """Operators with the names and signs that they hold."""
    yield f"{n.op} {n.held[0] if n.op == 'reduce' else n.held if n.op in ('call', 'chain', 'name') else ''}"
    for x in n.args:
        yield from parts(x)


def search(count: int) -> Iterator[Problem]:
    """The smallest programs first, so that a feature is kept with little beside it."""
    drawn = [case for i in range(count) if (case := make(SEED + i)).q_len * case.kv_len <= LARGEST]
    seen: set[str] = set()
    for case in sorted(drawn, key=lambda c: (len(c.text), c.seed)):
        p = problem_of(case)
        if new := features(case, p) - seen:
            seen |= new
            yield p


def line_of(p: Problem) -> str:
    bound = {n: [x.tolist(), x.dtype.name] if isinstance(x, np.ndarray) else x for n, x in p.bound.items()}
    seen = ["".join(".#"[int(x)] for x in row) for row in p.seen.reshape(-1, p.seen.shape[3])]
    held: dict[str, Any] = {"text": p.text, "synonym": p.synonym, "bound": bound, "seen": seen, "block": p.block}
    return json.dumps({**held, **p.where})


def read() -> list[Problem]:
    found = []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        x = json.loads(line)
        bound = {n: np.array(v[0], v[1]) if isinstance(v, list) else v for n, v in x["bound"].items()}
        seen = rows(*x["seen"], batch=x["batch"], heads=x["heads"])
        found.append(Problem(x["text"], bound, seen, tuple(x["block"]), x["synonym"]))
    return found


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("".join(f"{line_of(p)}\n" for p in search(int(sys.argv[1]))), encoding="utf-8")
