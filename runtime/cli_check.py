"""`frisket check EXPR`: everything that runs here, beside the float64 interpreter."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from frisket.dsl.errors import MismatchError

from .backends import OF_FRAMEWORK, interpreted, reason
from .cli_answer import Answer, row, rows
from .cli_commands import described
from .cli_input import require_bound, subject
from .entry import compile
from .packed import choose, installed

LENGTHS = ((128, 128), (100, 100), (77, 131))  # whole tiles, ragged, and fewer queries than keys
DTYPES = ("float32", "bfloat16")
INTERPRETED = ("float32", "float16")  # of Triton's interpreter
DIM = 32


@dataclass(frozen=True)
class Case:
    backend: str
    dtype: str
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        heads = f"{self.heads} heads over {self.kv_heads}" if self.heads > 1 else "1 head"
        return f"{self.backend:11} {self.dtype:9} {f'{self.q_len} × {self.kv_len}, {heads}':27}"


def check(args: argparse.Namespace, console: Console) -> Answer:
    """One line for each backend, dtype and length: the largest error, and that of dense attention in that dtype.
    Status 1 when one is more than twice as large (plus 1e-6)."""
    choose(None)
    what = subject(args)
    require_bound(what)
    data, lines = described(what)
    answer = Answer(data | {"cases": [], "good": True}, rows(lines))
    for framework, case in cases(args):
        attention = compile(mask=what.mask, score=what.score, backend=case.backend)
        outcome: dict[str, Any]
        try:
            outcome = asdict(attention.check(*arrays(framework, case, args.batch)))
            verdict = f"error {outcome['out']:.1e}, dense {outcome['dense_out']:.1e}"
        except MismatchError as error:
            outcome, verdict, answer.status = {"mismatch": str(error)}, f"MISMATCH\n{error}", 1
        answer.data["cases"].append(asdict(case) | outcome)
        answer.text.append(row("check", f"{case} {verdict}"))
    answer.data["good"] = answer.status == 0
    count = len(answer.data["cases"])
    answer.text.append(
        row("result", f"all {count} agree with the float64 interpreter" if not answer.status else "MISMATCH")
    )
    return answer


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """(framework, case) for the backends that run here; the lengths of the user's, or a few small ones."""
    lengths = [(args.q_len, args.kv_len or args.q_len)] if args.q_len else LENGTHS
    heads = args.heads if args.heads > 1 else 4
    kv_heads = heads // 2 if heads % 2 == 0 else heads
    for framework in installed():
        for backend in OF_FRAMEWORK[framework]:
            if backend != "dense" and not reason(backend, framework):
                for dtype in DTYPES if not interpreted(backend) else INTERPRETED:
                    yield from ((framework, Case(backend, dtype, q, k, heads, kv_heads)) for q, k in lengths)


def arrays(framework: str, case: Case, batch: int) -> tuple[Any, ...]:
    """Normal q, k and v of a fixed seed in the framework's own order of axes, where the backend runs."""
    draw = np.random.default_rng(0).standard_normal
    sizes = ((case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len))
    made = [draw((batch, *size, DIM), np.float32) for size in sizes]
    if framework == "torch":
        import torch

        device = "cuda" if case.backend == "triton" and not interpreted(case.backend) else "cpu"
        return tuple(torch.from_numpy(x).to(device, getattr(torch, case.dtype)) for x in made)
    import jax.numpy as jnp

    return tuple(jnp.asarray(x.swapaxes(1, 2), case.dtype) for x in made)
