"""What test_from_jax.py traces over numpy and over JAX, over torch: one interned Expr, that of the text."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from support.jax.callables import MASKS, MODS, tables

from frisket.dsl.from_python.trace import trace
from frisket.dsl.program import read
from frisket.lowering.simplify import canonical

torch = pytest.importorskip("torch")
NUMPY = {n: v if np.ndim(v) else v.item() for n, v in tables().items()}
TENSORS = {n: torch.as_tensor(np.asarray(v)) for n, v in tables().items()}
CASES = [c for c in (*MASKS, *MODS) if not re.search(r"\bjax\b", c.python)]


class Torch:
    """torch under numpy's names, with numbers where only tensors are taken."""

    equal, greater_equal = torch.eq, torch.ge

    def maximum(self, x, y):
        return torch.maximum(x, torch.as_tensor(y))

    def minimum(self, x, y):
        return torch.minimum(x, torch.as_tensor(y))

    def log(self, x):
        return math.log(x) if isinstance(x, float) else torch.log(x)

    def __getattr__(self, name):
        return getattr(torch, name)


SQUARES = "sum(j in 0..extent(mol, 1): (mol[q, j] - mol[k, j]) ** 2)"
IN_TORCH = {  # torch's norm has the derivative 0 at 0, that of JAX is NaN
    "molecule by norm": f"exp(-(0.0 if {SQUARES} == 0.0 else sqrt({SQUARES})) / widths[h]) * score"
}


def from_text(case, text=None):
    text = text or case.text
    used = {n: v for n, v in NUMPY.items() if re.search(rf"\b{n}\b", text)}
    found = read(text, kind=case.kind, params=used)
    return found.mask if case.kind == "mask" else found.score


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_torch_function_gives_the_expr_of_the_text(case):
    over_torch = trace(case.over(Torch(), TENSORS), case.kind)
    assert canonical(over_torch.expr).expr is canonical(from_text(case, IN_TORCH.get(case.name))).expr
