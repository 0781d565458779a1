"""Kernels: `frisket check` whether they are right, `frisket emit` their text, `frisket doctor` which run here.

`check EXPR` compares every kernel that runs here with the float64 reference. `emit EXPR --backend B` prints the source
text of a kernel; with --report, what it takes of a GPU. `doctor` says what is installed, what runs here, why the rest
does not, and what to install for it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.text import Text

import frisket
from frisket.dsl.errors import BackendError, BackwardError, LoweringError, MismatchError, ParameterError
from frisket.grammar.memo import Info, tables
from frisket.lowering.architectures import GPUS, H100, State, tried
from frisket.lowering.dtypes import HALVES, SINGLE
from frisket.lowering.kernels.triton.module import Dims
from frisket.runtime.attention import entry as _entry  # noqa: F401 (the tables of a call are listed too)
from frisket.runtime.attention.report import FLOOR, Report
from frisket.runtime.attention.warm import warm
from frisket.runtime.backends.base import LIBRARY, RECORDS, Backend, backends_of, named, offered
from frisket.runtime.backends.engines.proof import offer_of
from frisket.runtime.backends.registry import backends, check_name, lowerable, printed, ready_text, reason
from frisket.runtime.backends.registry import choose as choose_backend
from frisket.runtime.backends.triton import kernels as triton_kernels
from frisket.runtime.bench.race import choose, cpu_count, cpu_name, cpus, installed
from frisket.runtime.machine import cpp_build
from frisket.runtime.machine.modules import pip_install
from frisket.runtime.machine.settings import VARIABLES, Settings, cache_folder
from frisket.runtime.masks.mask import Program, mask

from . import answer as answers
from .answer import code, examples, positive, progress, row, rows, table
from .show import compiled, counted, described, parts, read_program, require_bound, shapes, size

LENGTHS = ((128, 128), (100, 100), (77, 131), (1, 200))  # whole tiles, ragged, fewer queries than keys, one query
DTYPES = (SINGLE, *reversed(HALVES))
HIDDEN = "q % 5 != 3"  # rows without a key
DIM = 32
CHECK_HEAD = ("arrays", "backend", "dtype", "cases", "error", "dense", "grads", "dense", "")


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


def case_of(text: str) -> Case:
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
    answers.add_subject(p, block=None)
    answers.add_sizes(p, "several, whole tiles and ragged")
    which = p.add_argument_group("which cases")
    level = which.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="one call of each backend, in float32, with gradients")
    every = "every dtype, length, number of key heads, rows with and without keys, forward and gradients"
    level.add_argument("--all", action="store_true", help=every)
    level.add_argument("--case", type=case_of, metavar="CASE", help="one of them, by the name that a mismatch prints")
    here = "these; default: all that run here without an interpreter"
    which.add_argument("--backend", nargs="+", metavar="B", help=here)
    which.add_argument("--dtype", nargs="+", choices=DTYPES, help="these; default: float32 and one of 16 bits")
    examples(
        p,
        "frisket check 'causal & window(20)' --quick --backend aten xla",
        "frisket check causal --score 'softcap(20)' --backend aten --dtype bfloat16",
        "frisket check 'causal & same(doc)' --table doc=[0,0,1,1,1,2] --q-len 6",
    )


def check(args: argparse.Namespace, console: Console) -> answers.CommandResult:
    """Runs the cases, a table of the largest errors. Status 1 when one is more than twice that of dense attention in
    the same dtype (plus 1e-6), or fails altogether. 2 when every call is refused, so that nothing is known."""
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
    text = [*rows([*lines, ("errors", limit)]), "", *table([CHECK_HEAD, *summary(outcomes)], right=(3, 4, 5, 6, 7)), ""]
    for o in wrong:
        text += [row("MISMATCH", f"{o.case}\n{o.wrong}"), f"{'repeat':{answers.WIDTH}}{repeat(args, o.case)}", ""]
    # sorted, as groupby joins neighbours alone
    for why, of in groupby(sorted((o for o in outcomes if o.refused), key=lambda o: o.refused), lambda o: o.refused):
        text.append(row("refused", Text(f"{', '.join(sorted({o.case.backend for o in of}))}: {why}", answers.SOME)))
    if slow := [] if args.case or args.backend else left_out():
        text.append(row("left out", f"{', '.join(slow)}: in an interpreter here, slowly; --backend {slow[0]} runs it"))
    if wrong:
        status, result = 1, Text(f"{len(wrong)} of {len(outcomes)} cases are wrong", answers.BAD)
    elif not checked:
        status, result = 2, Text("nothing is checked: every call is refused", answers.SOME)
    else:
        rest = ", the rest is refused" if checked < len(outcomes) else ""
        status = 0
        result = Text(f"{checked} of {len(outcomes)} calls agree with the float64 reference{rest}", answers.GOOD)
    return answers.CommandResult(data, [*text, row("result", result)], status)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Cases for the backends that run here, with the user's lengths or a few small ones."""
    for name in args.backend or ():
        check_name(name)
    lengths = [(args.q_len, args.kv_len or args.q_len)] if args.q_len else list(LENGTHS)
    heads = args.heads if args.heads > 1 else 4  # several, so that key heads can be shared
    shared = [n for n in (heads // 2, heads, 1) if heads % n == 0]
    ragged = lengths[2 % len(lengths)]  # of a single length, that one
    few = [(lengths[1 % len(lengths)], shared[0], False, False), (ragged, shared[0], False, True)]
    few.append((ragged, heads, True, True))
    every = list(product(lengths, dict.fromkeys(shared), (False, True), (False, True)))
    picked = every if args.all else few[1:2] if args.quick else few
    for framework in installed():
        for backend in backends_of(framework):
            # the reference would be compared with itself
            if backend.oracle or not takes_part(backend, framework, args.backend):
                continue
            dtypes = [n for n in DTYPES if not backend.refused_dtype(n)]  # a refused dtype is no case
            for dtype in args.dtype or (dtypes if args.all else dtypes[: 1 if args.quick else 2]):
                if dtype in dtypes:
                    for (q, k), kv_heads, hidden, gradients in picked:
                        gradients &= backend.has_gradients(framework)  # without a backward the forward is checked
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
    # a backend may run in both frameworks
    return list(dict.fromkeys(b.name for b, f in all_of if takes_part(b, f, [b.name]) and not takes_part(b, f, None)))


def outcome(case: Case, program: Program, args: argparse.Namespace) -> Outcome:
    if case.hidden:
        hiding = mask(HIDDEN)
        program = replace(program, mask=hiding if program.mask is None else program.mask & hiding)
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
        # arrays are on a GPU where the backend runs nowhere else
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
        verdict = (f"{refused} refused", answers.SOME) if refused else ("good", answers.GOOD)
        verdict = (f"{wrong} WRONG", answers.BAD) if wrong else verdict
        yield (*key, str(len(of)), *worst(forward), *worst(backward), Text(*verdict))


def worst(pairs: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """The pair (error, that of dense attention) that is nearest to the limit."""
    if not pairs:
        return "-", "-"
    ours, dense = max(pairs, key=lambda p: p[0] / (2 * p[1] + FLOOR))
    return f"{ours:.1e}", f"{dense:.1e}"


def repeat(args: argparse.Namespace, case: Case) -> str:
    """The command that runs one case again."""
    words = ["frisket", "check", args.expr]
    words += [word for n, x in parts(args).items() for word in (f"--{n}", x)]
    words += [word for one in args.set for word in ("--set", one)]
    words += [word for one in args.table for word in ("--table", one)]
    words += ["--block", "{}x{}".format(*args.block)] if args.block else []
    words += ["--batch", str(args.batch)] if args.batch > 1 else []
    return shlex.join([*words, "--case", str(case)])


# -- their text -----------------------------------------------------------------------------------------


def add_emit(p: argparse.ArgumentParser) -> None:
    answers.add_subject(p, block=None, expand=False)
    answers.add_sizes(p)
    kernel = p.add_argument_group("the kernel")
    kernel.add_argument("--backend", default="cpp", help=f"{', '.join(printed())}; default: %(default)s")
    kernel.add_argument("--kv-heads", type=positive, metavar="N", help="heads of keys; default: --heads")
    kernel.add_argument("--head-dim", type=positive, default=64, metavar="N", help="default: %(default)s")
    kernel.add_argument("--v-dim", type=positive, metavar="N", help="head size of values; default: --head-dim")
    kernel.add_argument("--dtype", default="float32", help="float32, float16 or bfloat16; default: %(default)s")
    resources = "compile for Triton: registers, spills, shared memory; no GPU is needed"
    kernel.add_argument("--report", action="store_true", help=resources)
    kernel.add_argument("--arch", nargs="+", metavar="GPU", help=f"{', '.join(GPUS)}; several with --report")
    built = "compile the C++ kernels, forward and backward, into the cache on disk"
    kernel.add_argument("--build", action="store_true", help=built)
    kernel.add_argument("--framework", default="torch", choices=("torch", "jax"), help="of --build")
    examples(
        p,
        "frisket emit 'causal & window(256)' --backend triton --dtype bfloat16",
        "frisket emit causal --score 'softcap(50)' --backend cpp",
        "frisket emit causal --backend triton --report --q-len 4 --kv-len 2048",
        "frisket emit 'causal & window(256)' --build --dtype bfloat16",
    )


def emit(args: argparse.Namespace, console: Console) -> answers.CommandResult:
    check_name(args.backend)
    args.backend = named(args.backend, "torch").name
    if args.build:
        return build(args)
    if args.report:
        return report(args, console)
    if args.arch:
        check_reports("--arch", args.backend)
    if args.arch and len(args.arch) > 1:
        raise ParameterError(f"one text is for one GPU: --arch {args.arch[0]}; several go with --report")
    arch = args.arch[0] if args.arch else None
    source = compiled(read_program(args), args.block).source(args.backend, arch=arch, **shapes(args)).rstrip("\n")
    highlight = RECORDS[args.backend].highlight
    return answers.CommandResult({"backend": args.backend, "source": source}, [code(source, highlight, console)])


def build(args: argparse.Namespace) -> answers.CommandResult:
    """A line for each kernel; status 1 where one cannot be compiled."""
    if RECORDS[args.backend].ahead is None:
        raise ParameterError(f"--build is about kernels of C++, not {args.backend!r}; write --backend cpp")
    if args.report or args.arch:
        raise ParameterError("--report and --arch are about GPUs, --build about this CPU: leave one or the other out")
    att = compiled(read_program(args), args.block, backend=args.backend)
    warmed = warm(att, shapes(args), framework=args.framework)
    rows = [row._asdict() for row in warmed.rows]
    return answers.CommandResult({"backend": args.backend, "kernels": rows}, [str(warmed)], 0 if warmed.good else 1)


REPORT_HEAD = ("kernel", "GPU", "queries x keys", "warps", "stages", "registers", "spills", "shared memory", "MMA")


def check_reports(option: str, backend: str) -> None:
    """Refuse an option about kernels that are compiled ahead of time, for a backend whose kernels are not."""
    record = RECORDS.get(backend)
    if record is None or record.compile_reports is None:
        name = next(b.name for b in backends_of() if b.compile_reports)
        raise ParameterError(f"{option} is about {name.title()} kernels, not {backend!r}; write --backend {name}")


def report(args: argparse.Namespace, console: Console) -> answers.CommandResult:
    """A line for each kernel and architecture; status 1 where one needs more shared memory than there is."""
    check_reports("--report", args.backend)
    reports = RECORDS[args.backend].compile_reports
    assert reports is not None  # checked above
    architectures = args.arch or [H100.name]
    for arch in architectures:
        triton_kernels.check_compiles(arch)  # before anything is compiled
    att, sizes = compiled(read_program(args), args.block), shapes(args)
    stages = {arch: att.stages(backend=args.backend, arch=arch, **sizes) for arch in architectures}
    kernels: list[triton_kernels.KernelReport] = []
    dims = Dims(args.head_dim, args.v_dim or args.head_dim, args.dtype, args.heads // sizes["kv_heads"])
    # the bar wants the number of kernels before they are compiled
    with progress(sum(len(re.findall(r"^def attention_", s.source, re.M)) for s in stages.values())) as step:
        for arch, s in stages.items():
            for one in reports(s.source, s.plan, s.target, dims, arch):
                kernels.append(one)
                step("compiling")
    lengths = (sizes[n] for n in ("q_len", "kv_len", "batch", "heads"))
    engines = att.plan(*lengths).engines(args.head_dim, sizes["kv_heads"], args.dtype, device="cuda")
    data = {"head_dim": args.head_dim, "dtype": args.dtype, "kernels": [r.as_dict() for r in kernels]}
    data["engines"] = engines
    ran = [f"{x.machine}: {x.state}; {x.how}" for a in architectures for x in tried() if x.machine.endswith(f" ({a})")]
    text = [*table([REPORT_HEAD, *map(line, kernels)], right=(3, 4, 5, 6, 7, 8)), ""]
    text += map(Text, [*ran, "", *engines.splitlines()])
    return answers.CommandResult(data, text, 0 if all(r.fits for r in kernels) else 1)


def line(r: Any) -> tuple[str | Text, ...]:
    name = r.kernel.removeprefix("attention_")
    tile = str(r.block_q) if name == "delta" else f"{r.block_q} x {r.block_k}"
    tile = "" if name == "combine" or name.endswith("_sums") else tile  # they add up rows
    shared = Text(f"{r.shared:,} of {r.shared_limit:,}", answers.GOOD)
    if not r.fits:
        shared = Text(f"{shared} TOO MUCH", answers.BAD)
    return name, r.arch, tile, *map(str, (r.warps, r.stages, r.registers, r.spills)), shared, str(r.mma)


# -- what runs here -------------------------------------------------------------------------------------

PACKAGES = {  # what each is for, and the extra that brings it
    "numpy": ("", ""),
    "torch": ("tensors of torch", "torch"),
    "jax": ("arrays of JAX", "jax"),
    "triton": ("kernels for GPUs", "triton"),
    "jax-triton": ("Triton kernels on arrays of JAX", "jax-gpu"),
    "matplotlib": ("frisket plot, in .png and .svg", "plot"),
    "flax": ("frisket.integrations.flax", "flax"),
    "transformers": ("frisket.integrations.transformers", "transformers"),
    "qwix": ("dot products of few bits", "quantized"),
}
NAMES = 20  # columns that they take


def add_doctor(p: argparse.ArgumentParser) -> None:
    p.add_argument("--caches", action="store_true", help="list the tables of remembered answers after one mask")
    examples(p, "frisket doctor", "frisket doctor --json", "frisket doctor --caches")


def doctor(args: argparse.Namespace, console: Console) -> answers.CommandResult:
    """Versions, the machine, the backends, what native kernels are built with, caches, settings."""
    if args.caches:
        return remembered()
    versions = {"frisket": frisket.__version__} | {name: version(name) for name in PACKAGES}
    missing = backends()
    ready = {name: why or ready_text(name) for name, why in missing.items()}
    settings = {v.name: os.environ[v.name] for v in VARIABLES if v.name in os.environ}
    where = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}", "cpus": cpus()}
    built, folders, calls = native(), caches(), usual()
    data = {**where, "cpu": cpu_name(), "native": built, "packages": versions, "backends": ready, "engines": engines()}
    lacks = {b.name: b.features for b in backends_of() if b.features}
    known = {state: [x.machine for x in tried() if x.state == state] for state in get_args(State)}
    data |= {"lacks": lacks, "tried": [x._asdict() for x in tried()], "calls": calls}
    data |= {"caches": folders, "settings": settings}
    files = {folder: f"{counted(usage['files'], 'file')}, {size(usage['bytes'])}" for folder, usage in folders.items()}
    text: list[answers.Piece] = [
        row("frisket", f"{versions['frisket']}, Python {where['python']}"),
        row("machine", f"{where['system']}, {cpu_count()}, {cpu_name()}"),
        marks("packages", ((name, package(name, versions[name]), bool(versions[name])) for name in PACKAGES)),
        marks("backends", ((n, why or f"{ready[n]}: {RECORDS[n].kernels}", not why) for n, why in missing.items())),
        row("lacks", "\n".join(f"{name:{NAMES}} {', '.join(features)}" for name, features in lacks.items()), NAMES + 1),
        row("engines", "\n".join(f"{name:{NAMES}} {x}" for name, x in engines().items()), NAMES + 1),
        row("tried", "\n".join(f"{state:{NAMES}} {'; '.join(names)}" for state, names in known.items()), NAMES + 1),
        row("calls", "\n".join(f"on the CPU, arrays of {name} run on {backend}" for name, backend in calls.items())),
        row("native", "\n".join(f"{name:{NAMES}} {x}" for name, x in built.items()), NAMES + 1),
        row("caches", "\n".join(f"{folder}: {usage}" for folder, usage in files.items()) or "nothing is kept yet"),
        row("settings", "\n".join(f"{v.name:{NAMES}} {settings.get(v.name, 'not set')}" for v in VARIABLES), NAMES + 1),
    ]
    if not installed():
        text.append(Text(f"neither torch nor JAX is installed: {pip_install('torch')}, or with [jax]", answers.SOME))
    return answers.CommandResult(data, text)


def marks(name: str, entries: Iterable[tuple[str, str, bool]]) -> answers.AnswerRow:
    """A mark, a name and what is to say of it, a line each."""
    lines = (
        Text.assemble(("✓" if good else "✗", answers.GOOD if good else answers.SOME), f" {one:{NAMES - 2}} {text}")
        for one, text, good in entries
    )
    return row(name, Text("\n").join(lines), NAMES + 1)


def package(name: str, release: str | None) -> str:
    what, extra = PACKAGES[name]
    if release:
        return release
    return f"not installed; for {what}: {pip_install(extra) if extra else f'pip install {name}'}"


def engines() -> dict[str, str]:
    """Calls that take each kernel of a vendor by themselves, and the option that names it."""
    names = [b.name for b in RECORDS.values() if b.is_engine]
    others = {n: f"where it is named: engines={n!r}" if n in offered() else f"backend={n!r} alone" for n in names}
    return {n: "; ".join(filter(None, (offer_of(n), others[n]))) for n in names}


def usual() -> dict[str, str]:
    """The backend of a call on the CPU that names none."""
    return {framework: choose_backend(None, framework, "cpu") for framework in installed()}


def caches() -> dict[str, dict[str, int]]:
    """Folders of generated kernels, how many files and bytes they hold."""
    # the first of them is in the cache folder
    folders = [*sorted(cache_folder().glob("*/")), *cpp_build.directories()[1:]]
    contents = {str(folder): [f.stat().st_size for f in folder.rglob("*") if f.is_file()] for folder in folders}
    return {folder: {"files": len(sizes), "bytes": sum(sizes)} for folder, sizes in contents.items() if sizes}


def native() -> dict[str, Any]:
    """The compiler of the C++ kernels and the folder of their libraries; the reason where they are not used."""
    if why := cpp_build.reason():
        return {"off": why}
    off = {"off": f"FRISKET_BACKEND is {LIBRARY}"} if Settings.read().backend == LIBRARY else {}
    command, folder = cpp_build.compiler(), cpp_build.writable()
    assert command is not None  # else there is a reason
    preferred = cpp_build.directories()[0]
    cache = "kernels are kept nowhere" if folder is None else f"{folder}, {len(list(folder.glob('*.so')))} kernels"
    if folder not in (None, preferred):
        cache += f"; {preferred} cannot be written to"
    compiler = f"{' '.join(command)}: {cpp_build.compiler_version(command)}"
    return off | {"compiler": compiler, "cpu": cpp_build.best_variant(), "cache": cache}


def version(name: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


EXAMPLE = "causal & window(256)"


def remembered() -> answers.CommandResult:
    """The contents of this process's tables after a mask was laid out; tables of one name count as one."""
    _ = mask(EXAMPLE).layout(1024, 1024).facts
    totals: dict[str, Info] = {}
    for t in tables():
        first = totals.get(t.name, Info(t.name, 0, 0, 0, 0, 0))
        totals[t.name] = Info(t.name, *(a + b for a, b in zip(first[1:], t[1:], strict=True)))
    lines = [
        (t.name, f"{t.entries:,}", f"{t.bound:,}", size(t.bytes), f"{t.hits:,}", f"{t.misses:,}")
        for t in totals.values()
    ]
    header = [tuple("at most" if name == "bound" else name for name in Info._fields)]
    data = {"after": EXAMPLE, "tables": [t._asdict() for t in totals.values()]}
    return answers.CommandResult(data, table([*header, *lines], right=range(1, 6)))
