"""`frisket check EXPR`: compares every kernel that runs here with the float64 reference."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from frisket.dsl.errors import BackendError, BackwardError, LoweringError, MismatchError, ParameterError
from frisket.runtime.attention.report import FLOOR, Report
from frisket.runtime.backends.base import RECORDS, Backend, backends_of
from frisket.runtime.backends.registry import check_name, lowerable, reason
from frisket.runtime.bench.race import choose, installed
from frisket.runtime.masks.mask import Program, mask

from .answer import BAD, GOOD, SOME, WIDTH, CommandResult, add_sizes, add_subject, examples, progress, row, rows, table
from .input import compiled, read_program, require_bound
from .show import described

LENGTHS = ((128, 128), (100, 100), (77, 131), (1, 200))  # whole tiles, ragged, fewer queries than keys, one query
DTYPES = ("float32", "bfloat16", "float16")
HIDDEN = "q % 5 != 3"  # rows without a key
DIM = 32
HEAD = ("arrays", "backend", "dtype", "cases", "error", "dense", "grads", "dense", "")


@dataclass(frozen=True)
class Case:
    """One call, and whether it is differentiated; `hidden` rows see no key."""

    framework: str
    backend: str
    dtype: str
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    hidden: bool
    gradients: bool

    def __str__(self) -> str:
        rows, way = "rows-hidden" if self.hidden else "rows-as-is", "gradients" if self.gradients else "forward"
        sizes = f"{self.q_len}x{self.kv_len}/{self.heads}over{self.kv_heads}"
        return f"{self.framework}/{self.backend}/{self.dtype}/{sizes}/{rows}/{way}"


NAME = re.compile(
    r"(torch|jax)/([\w-]+)/(\w+)/([1-9]\d*)x([1-9]\d*)/([1-9]\d*)over([1-9]\d*)/rows-(hidden|as-is)/(gradients|forward)"
)


def named(text: str) -> Case:
    """The case of a name, as a mismatch prints it."""
    match = NAME.fullmatch(text)
    if not match:
        example = "torch/cpp/float32/77x131/4over2/rows-as-is/gradients"
        raise argparse.ArgumentTypeError(f"{text!r} is no case; a mismatch prints one, for example {example}")
    framework, backend, dtype, *sizes, hidden, way = match.groups()
    q_len, kv_len, heads, kv_heads = map(int, sizes)
    return Case(framework, backend, dtype, q_len, kv_len, heads, kv_heads, hidden == "hidden", way == "gradients")


@dataclass(frozen=True)
class Outcome:
    case: Case
    report: Report | None = None
    refused: str = ""  # the backend says that it cannot
    wrong: str = ""

    def as_dict(self) -> dict[str, Any]:
        words = {"refused": self.refused, "mismatch": self.wrong}
        return asdict(self.case) | (asdict(self.report) if self.report else {n: x for n, x in words.items() if x})


def add_check(p: argparse.ArgumentParser) -> None:
    add_subject(p, block=None)
    add_sizes(p, "several, whole tiles and ragged")
    which = p.add_argument_group("which cases")
    level = which.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="one call of each backend, in float32, with gradients")
    level.add_argument(
        "--all", action="store_true",
        help="every dtype, length, number of key heads, rows with and without keys, forward and gradients",
    )  # fmt: skip
    level.add_argument("--case", type=named, metavar="CASE", help="one of them, by the name that a mismatch prints")
    which.add_argument(
        "--backend", nargs="+", metavar="B", help="these; default: all that run here without an interpreter"
    )
    which.add_argument("--dtype", nargs="+", choices=DTYPES, help="these; default: float32 and one of 16 bits")
    examples(
        p,
        "frisket check 'causal & window(20)' --quick --backend aten xla",
        "frisket check causal --score 'softcap(20)' --backend aten --dtype bfloat16",
        "frisket check 'causal & same(doc)' --table doc=[0,0,1,1,1,2] --q-len 6",
    )


def check(args: argparse.Namespace, console: Console) -> CommandResult:
    """Runs the cases, a table of the largest errors. Status 1 when one is more than twice that of dense attention in
    the same dtype (plus 1e-6), or fails altogether; 2 when every call is refused, so that nothing is known."""
    choose(None)
    program = read_program(args)
    require_bound(program)
    chosen = [args.case] if args.case else list(cases(args))
    if not chosen:
        raise BackendError("no backend among these runs here; `frisket doctor` says why")
    outcomes = []
    with progress(len(chosen)) as step:
        for case in chosen:
            outcomes.append(outcome(case, program, args))
            step(f"{case.backend} {case.dtype}")
    wrong = [o for o in outcomes if o.wrong]
    data, lines = described(program)
    checked = sum(o.report is not None for o in outcomes)
    data |= {"cases": [o.as_dict() for o in outcomes], "good": bool(checked) and not wrong}
    limit = f"the largest from the float64 reference; allowed: twice dense attention's in the same dtype + {FLOOR:g}"
    text = [*rows([*lines, ("errors", limit)]), "", *table([HEAD, *summary(outcomes)], right=(3, 4, 5, 6, 7)), ""]
    for o in wrong:
        text += [row("MISMATCH", f"{o.case}\n{o.wrong}"), f"{'repeat':{WIDTH}}{repeat(args, o.case)}", ""]
    for why, of in groupby(sorted((o for o in outcomes if o.refused), key=lambda o: o.refused), lambda o: o.refused):
        text.append(row("refused", Text(f"{', '.join(sorted({o.case.backend for o in of}))}: {why}", SOME)))
    if slow := [] if args.case or args.backend else left_out():
        text.append(row("left out", f"{', '.join(slow)}: in an interpreter here, slowly; --backend {slow[0]} runs it"))
    if wrong:
        status, result = 1, Text(f"{len(wrong)} of {len(outcomes)} cases are wrong", BAD)
    elif not checked:
        status, result = 2, Text("nothing is checked: every call is refused", SOME)
    else:
        rest = ", the rest is refused" if checked < len(outcomes) else ""
        status = 0
        result = Text(f"{checked} of {len(outcomes)} calls agree with the float64 reference{rest}", GOOD)
    return CommandResult(data, [*text, row("result", result)], status)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Cases for the backends that run here, with the user's lengths or a few small ones."""
    for name in args.backend or ():
        check_name(name)
    lengths = [(args.q_len, args.kv_len or args.q_len)] if args.q_len else list(LENGTHS)
    heads = args.heads if args.heads > 1 else 4
    shared = [n for n in (heads // 2, heads, 1) if heads % n == 0]
    ragged = lengths[2 % len(lengths)]
    few = [(lengths[1 % len(lengths)], shared[0], False, False), (ragged, shared[0], False, True)]
    few.append((ragged, heads, True, True))
    every = list(product(lengths, dict.fromkeys(shared), (False, True), (False, True)))
    picked = every if args.all else few[1:2] if args.quick else few
    for framework in installed():
        for backend in backends_of(framework):
            if backend.oracle or not takes_part(backend, framework, args.backend):
                continue
            dtypes = [n for n in DTYPES if not backend.refused_dtype(n)]
            for dtype in args.dtype or (dtypes if args.all else dtypes[: 1 if args.quick else 2]):
                if dtype in dtypes:
                    for (q, k), kv_heads, hidden, gradients in picked:
                        gradients &= backend.has_gradients(framework)
                        yield Case(framework, backend.name, dtype, q, k, heads, kv_heads, hidden, gradients)


def takes_part(backend: Backend, framework: str, named: Sequence[str] | None) -> bool:
    """Whether a backend takes part: one that is named where it runs at all, others where no interpreter runs them."""
    if not named:
        return not reason(backend.name, framework) and not backend.interpreted
    if backend.interpreter is not None and backend.interpreted:
        return backend.name in named and not lowerable(backend.name)
    return backend.name in named and not reason(backend.name, framework)


def left_out() -> list[str]:
    """Backends that take part where they are named: an interpreter runs them here."""
    all_of = ((b, framework) for framework in installed() for b in backends_of(framework) if not b.oracle)
    return list(dict.fromkeys(b.name for b, f in all_of if takes_part(b, f, [b.name]) and not takes_part(b, f, None)))


def outcome(case: Case, program: Program, args: argparse.Namespace) -> Outcome:
    if case.hidden:
        hiding = mask(HIDDEN)
        program = Program(hiding if program.mask is None else program.mask & hiding, program.score)
    attention = compiled(program, args.block, backend=case.backend)
    try:
        return Outcome(case, attention.check(*arrays(case, args.batch), gradients=case.gradients))
    except MismatchError as error:
        return Outcome(case, wrong=str(error))
    except (BackendError, LoweringError, BackwardError) as error:
        return Outcome(case, refused=str(error).partition("\n")[0])


def arrays(case: Case, batch: int) -> tuple[Any, ...]:
    """Normal q, k and v of a fixed seed in the framework's own order of axes, where the backend runs."""
    if case.heads % case.kv_heads:
        raise ParameterError(f"{case.heads} heads are not shared evenly by {case.kv_heads} of keys")
    draw = np.random.default_rng(0).standard_normal
    sizes = ((case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len))
    draws = [draw((batch, *size, DIM), np.float32) for size in sizes]
    if case.framework == "torch":
        import torch

        backend = RECORDS[case.backend]
        device = "cuda" if backend.accelerated and "cpu" not in backend.platforms and not backend.interpreted else "cpu"
        return tuple(torch.from_numpy(x).to(device, getattr(torch, case.dtype)) for x in draws)
    import jax.numpy as jnp

    return tuple(jnp.asarray(x.swapaxes(1, 2), case.dtype) for x in draws)


# -- what is said -----------------------------------------------------------------------------------------


def summary(outcomes: Sequence[Outcome]) -> Iterator[tuple[str | Text, ...]]:
    """A line for each framework, backend and dtype: how many cases, the errors nearest to what is allowed."""
    for key, group in groupby(outcomes, lambda o: (o.case.framework, o.case.backend, o.case.dtype)):
        of = list(group)
        reports = [o.report for o in of if o.report is not None]
        forward = [pair for r in reports for pair in ((r.out, r.dense_out), (r.lse, r.dense_lse))]
        backward = [pair for r in reports for pair in r.gradients.values()]
        wrong = sum(bool(o.wrong) for o in of)
        refused = sum(bool(o.refused) for o in of)
        verdict = (f"{wrong} WRONG", BAD) if wrong else (f"{refused} refused", SOME) if refused else ("good", GOOD)
        yield (*key, str(len(of)), *worst(forward), *worst(backward), Text(*verdict))


def worst(pairs: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """The pair (error, that of dense attention) that is nearest to the limit."""
    if not pairs:
        return "-", "-"
    ours, dense = max(pairs, key=lambda p: p[0] / (2 * p[1] + FLOOR))
    return f"{ours:.1e}", f"{dense:.1e}"


def repeat(args: argparse.Namespace, case: Case) -> str:
    """The command that runs one case again."""
    words = ["frisket", "check", args.expr, *(["--score", args.score] if args.score is not None else [])]
    words += [word for one in args.set for word in ("--set", one)]
    words += [word for one in args.table for word in ("--table", one)]
    words += ["--block", "{}x{}".format(*args.block)] if args.block else []
    words += ["--batch", str(args.batch)] if args.batch > 1 else []
    return shlex.join([*words, "--case", str(case)])
