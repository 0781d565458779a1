"""`invariant=True`: parts of a call, over the keys that they see alone, have the bits of the whole call."""

from __future__ import annotations

import random
from typing import Any

import torch

import frisket as fk

from . import scores
from .attention import arrays, number_of
from .problem import Problem

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = 24  # of each problem


def invariant(p: Problem) -> str:
    """A program with a score mod on native kernels, and more inputs of it: chunks of queries of some batch entries,
    behind keys that none of them sees, and before others."""
    m, number = fk.mask(p.text, **p.bound), number_of(p.text)
    text = None if number % 3 == 0 else scores.make_score(number, smooth=True)
    learned = scores.parameters(text or "", number)
    dtype = DTYPES[number % len(DTYPES)]
    for i, problem in enumerate((p, *p.others)):
        att = fk.compile(problem.text, text, backend="cpp", invariant=True)
        values = {**problem.bound, **{n: x.float() for n, x in learned.items()}}
        shape = tuple(problem.seen.shape)
        batch, _, q_len, _ = shape
        q, k, v = (x.to(dtype) for x in arrays(shape, number + i)[:3])
        out, lse = att(q, k, v, return_lse=True, **values)
        draw = random.Random(number + i)
        for _ in range(PARTS):
            b, at = draw.randrange(batch), draw.randrange(q_len)
            entries, end = draw.randint(1, batch - b), draw.randint(at + 1, q_len)
            first, last = span_of(problem.seen[b : b + entries, :, at:end], draw)
            found = att(
                q[b : b + entries, :, at:end],
                *(x[b : b + entries, :, first:last] for x in (k, v)),
                origin=(b, 0, at, first),
                sizes=shape,
                return_lse=True,
                **values,
            )
            where = f"entries {b}+{entries}, queries {at}:{end}, keys {first}:{last}"
            for name, x, whole in zip(("out", "lse"), found, (out, lse), strict=True):
                same(f"{name} of {where}", x, whole[b : b + entries, :, at:end])
    return f"{m} {text}"


def span_of(seen: Any, draw: random.Random) -> tuple[int, int]:
    """Keys around those that are seen, at random ends."""
    visible = seen.any((0, 1, 2)).nonzero()[0]
    low, high = (visible[0], visible[-1] + 1) if len(visible) else (0, 1)
    first = draw.choice([0, int(low), draw.randint(0, int(low))])
    return first, draw.choice([seen.shape[3], int(high)])


def same(name: str, found: Any, wanted: Any) -> None:
    equal = (found == wanted) | (found.isnan() & wanted.isnan())
    assert equal.all(), f"{name}: {(~equal).sum()} of {equal.numel()} entries differ"
