"""Backend: all that frisket knows of one backend, in one record, which the backend's own folder registers.

Every list of backends is derived from these records: what runs here, what a call takes by itself, what prints a
kernel, what `frisket doctor` says. A record names its package, which has a module for its kernels and one for each
framework, whose functions have the names that are listed here. They are loaded when a function is first asked for, so a
record imports neither a framework nor a kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from glob import glob
from typing import Any, Generic, Literal, TypeVar

from frisket.dsl.errors import BackwardError
from frisket.grammar.memo import memo
from frisket.lowering.architectures import GPUS
from frisket.lowering.dtypes import FP8
from frisket.lowering.kernels.features import Features, missing
from frisket.runtime.machine import settings
from frisket.runtime.machine.modules import loaded, pip_install

FRAMEWORKS = ("torch", "jax")
# device files of drivers of GPUs: NVIDIA's, on its boards for robots too, AMD's, and that of Windows' Linux
DRIVERS = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvgpu*", "/dev/nvmap", "/dev/kfd", "/dev/dxg")
LIBRARY, NATIVE = "library", "native"  # the CPU tiers: library calls of the arrays' framework; kernels of C++
RECORDS: dict[str, Backend] = {}  # by name
F = TypeVar("F")
Block = tuple[int, int]  # queries and keys of a tile
Shapes = Mapping[str, tuple[int, ...]]  # of tables, by their names in a plan


class ModuleFunction(Generic[F]):
    """A function that the module of a record has under the attribute's name; None where it has none and needs none."""

    def __init__(self, path: str = "path", required: bool = False) -> None:
        self.path, self.required = path, required  # the attribute of the record that names the module

    def __set_name__(self, record: type, name: str) -> None:
        self.name = name

    def __get__(self, record: Any, of: type | None = None) -> F:
        path = record and (getattr(record, self.path) or record.path)
        functions = loaded(path) if path else None
        function: Any = getattr(functions, self.name) if self.required else getattr(functions, self.name, None)
        return function  # type: ignore[no-any-return]


Optional = ModuleFunction[Callable[..., Any] | None]


@dataclass(frozen=True)
class Executors:
    """Functions of a module that run calls on arrays of one framework. `refuses` and `refuses_gradients` say why a
    kernel cannot run a call of (plan, geometry, dtype, shapes of tables), and of wanted gradients too; "" where it
    can.

    They take `KernelInputs` first. In torch `forward(inputs, q, k, v, *, top=False, softmax_stats=False)` gives (out,
    lse, largest scores or None), with `softmax_stats` what `stats_kind` says of each row, too. In JAX `forward(inputs,
    q, k, v, *, lse_residual=False)` gives (out, lse, largest scores), with `lse_residual` what a backward takes of each
    row, too. `backward(inputs, q, k, v, ForwardResults, Cotangents, *, grad_names)` gives the gradients by name.

    Those of an engine that takes no plans have the `arguments` of its proof first."""

    path: str = ""  # of their module; "": the module of the framework's name in the package of the backend
    backward_path: str = ""  # of the backward's module, where it is not in the same
    maps: bool = False  # the executor may stand under jax.vmap
    rows: bool = False  # they read rows by the inputs' `rows`; arrays are permuted for others, see `calls.arrays`
    forward = ModuleFunction[Callable[..., Any]](required=True)
    backward = Optional("backward_path")
    tangent = Optional()  # (inputs, q, k, v, tangents of these or None): results of the forward, with tangents
    columns = Optional()  # (inputs, q, k, lse): the weights of each key, summed over queries
    refuses = Optional()
    refuses_gradients = Optional()
    # (inputs, dtype of q, dtype of k, names of tables that come with each call): runs calls that differ from one in
    # their arrays alone, and their gradients
    repeat = Optional()
    # (inputs, device, grad_names): raises before a forward whose gradients the backward would refuse
    checks_gradients = Optional()
    # (prepared call, arrays, seed, grad_names): compiles the kernels of a first call and of its gradients together
    compiles = Optional()
    # (inputs, dtype of q, dtype of k): compiles the forward before the first call; library calls run where it cannot
    build = Optional()


@dataclass(frozen=True)
class Interpreter:
    """An interpreter of a GPU's or TPU's kernels on a CPU: slowly, for checking."""

    owner: str  # "Triton's"
    seconds: float  # of 128 queries and 128 keys of one head, forward, on two cores; gradients take three times more
    used: Callable[[], bool]  # whether it runs the kernels here
    features: Features = field(default_factory=dict)  # that it lacks, see `Backend`


@dataclass(frozen=True, kw_only=True, eq=False)
class Backend:
    """One backend.

    `reason(framework)` says why it does not run here on arrays of torch or JAX, of either where that is None; "" where
    it does. `tiles(geometry, dtype, narrow)` gives the queries and keys of a tile, `narrow` where rows see few keys.

    `module` of its `package` has its kernels, and is empty where it has library calls. `text(plan, target, geometry,
    dtype, sinks, learned, spans)` gives the kernel's text and the target it runs with. Kernels that ask more than
    `tiles` have a `target(plan, geometry, dtype, tile, narrow)` of a LoopPlan, and a `call_target(plan, geometry,
    dtype, tile, tuning, device, arch)` of a whole call.

    `features` has the reason for each of `lowering.kernels.features.FEATURES` that the backend lacks; others work."""

    name: str
    kernels: str  # in the words of `frisket doctor`
    reason: Callable[[str | None], str] = lambda framework: ""
    tiles: Callable[..., tuple[int, int]] = lambda geometry, dtype, narrow: (64 if narrow else 128, 32)
    package: str = ""  # of its modules: the folder's
    module: str = ""
    target = Optional()
    call_target = Optional()
    text = Optional()
    # (plan, target, geometry, dtype, direction, permuted) -> the text of a kernel for the disk
    ahead = Optional()
    # of torch (CallPlan, geometry, dtype, arch=""), of JAX (LoopPlan, geometry, dtype, narrow): see `instead`
    pays = Optional()
    compile_reports = Optional()  # registers, spills and shared memory, by compiling ahead of time
    executors: Mapping[str, Executors] = field(default_factory=dict)  # by framework
    oracle: bool = False  # the float64 reference runs calls, without kernels and gradients
    # of engines, see the folder `engines`: (flags, call) -> what would be called, or why it cannot
    engine: Callable[[Any, Any], Any] | None = None
    takes_plans: bool = False  # an engine with kernels of plans, as generated ones are
    engine_of_plans = Optional()  # its function: call -> (the mask in words, clauses, gradients), or why it cannot
    # the choice of a backend
    order: int = 80  # place in lists
    tier: str = ""  # "library" and "native" are other names of backends
    platforms: tuple[str, ...] = ()  # of "cpu", "cuda", "rocm", "tpu": what its kernels are compiled for; (): all
    rank: int | None = None  # turn among the backends of a platform, the lowest first; None: it runs only by name
    optional: bool = False  # library calls run where it does not, unless a call names it
    instead: str = ""  # the backend in whose place it runs, unless one is named, where `pays` says that it is faster
    missing: Callable[[], str] | None = None  # packages that lowering for JAX lacks; None: `reason` says that too
    unfit: Callable[[], str] = lambda: ""  # why this device is not one that the kernels are written for
    # its kernels
    language: str = ""  # of their text
    highlight: str = "python"  # the language by which the source is coloured
    interpreter: Interpreter | None = None
    how: str = ""  # more words after "runs here"
    features: Features = field(default_factory=dict)
    guarded: bool = False  # kernels check for empty rows where the plan says that there may be some
    loads: bool = False  # kernels read tables, scalars and spans on the device: calls plan there
    # of each row, for the backward: the rounding error of lse, or the offset and the sum of its exponentials
    stats_kind: Literal["", "lse_residual", "offset"] = ""
    exact_delta: bool = False  # delta is not taken from the rounded out; JAX: see `pack_out_residual` of `lowering.xla`
    any_origin: bool = False  # keys of `invariant` calls may begin anywhere, not only at a multiple of `ALIGNED`
    int64: bool = False  # kernels compute Ints in 64 bits, in JAX without jax_enable_x64 too
    plans: Literal["", "host", "device"] = ""  # tables of the host are planned by its own planner where it is named
    operators: tuple[str, ...] = ()  # names in `frisket.operations`

    def __post_init__(self) -> None:
        paths = {f: e if e.path else replace(e, path=f"{self.package}.{f}") for f, e in self.executors.items()}
        object.__setattr__(self, "executors", paths)

    @property
    def path(self) -> str:
        """The module of its kernels; empty where it has library calls."""
        return self.module and f"{self.package}.{self.module}"

    def register(self) -> None:
        """Make the backend known, in the place of one of the same name."""
        RECORDS[self.name] = self
        forget_order()

    @cached_property
    def frameworks(self) -> tuple[str, ...]:
        return FRAMEWORKS if self.oracle else tuple(f for f in FRAMEWORKS if f in self.executors)

    @property
    def is_engine(self) -> bool:
        """Whether its kernels are a vendor's, which run where a proof says that they compute the call."""
        return self.engine is not None or self.takes_plans

    @property
    def accelerated(self) -> bool:
        """Whether its kernels are for GPUs or TPUs: they take spans of any tile size, and receive the platform."""
        return any(p != "cpu" for p in self.platforms)

    @property
    def interpreted(self) -> bool:
        """Whether an interpreter runs its kernels here."""
        return self.interpreter is not None and self.interpreter.used()

    @property
    def lowered_for(self) -> tuple[str, ...]:
        """The platforms that it can be lowered for; (): all."""
        return (*self.platforms, *["cpu"] * (self.interpreter is not None))

    def executor(self, framework: str, gradients: bool = False) -> Callable[..., Any]:
        """The forward, or the backward, on arrays of a framework."""
        executors = self.executors[framework]
        run = executors.backward if gradients else executors.forward
        if run is None:
            raise no_gradients(self.name)
        return run

    def has_gradients(self, framework: str) -> bool:
        """Whether calls have gradients: those of an engine without any are generated kernels'."""
        return framework in self.executors and "backward" not in self.features

    def refused_dtype(self, dtype: str) -> str:
        """A reason why arrays of a dtype are not taken here, by the kernels or by their interpreter."""
        # another backend may run what kernels lack that calls take by themselves: `backend_on` of `jax.attend` asks
        if (self.rank is None or self.is_engine or dtype == FP8) and dtype in self.features:
            return missing(self.features, dtype=dtype)
        lacks = {} if self.interpreter is None else self.interpreter.features
        return lacks[dtype] if dtype in lacks and self.interpreted else ""


register = Backend.register


def unregister(name: str) -> None:
    """Take a backend out of every list."""
    del RECORDS[name]
    forget_order()


def forget_order() -> None:
    for derived in (backends_of, names, named, ranked, offered):  # memos of what RECORDS held before
        derived.memo.clear()


@memo(4)
def backends_of(framework: str | None = None) -> tuple[Backend, ...]:
    """The records in the order of lists, those for arrays of `framework` where one is named."""
    return tuple(sorted((b for b in RECORDS.values() if framework in (None, *b.frameworks)), key=lambda b: b.order))


@memo(64)
def named(name: str, framework: str) -> Backend:
    """The backend that a name means, which may be that of a tier."""
    tier = (b for b in backends_of(framework) if b.tier == name)
    return RECORDS.get(name) or next(tier)


@memo(32)
def ranked(framework: str, platform: str, engines: bool = False) -> tuple[Backend, ...]:
    """The backends that a call on a platform takes by itself, or the engines that it is offered, the first choice
    first."""
    pairs = [(b.rank, b) for b in backends_of(framework) if b.rank is not None and platform in b.platforms]
    return tuple(b for _, b in sorted(pairs, key=lambda pair: pair[0]) if b.is_engine == engines)


@memo(1)
def offered() -> tuple[str, ...]:
    """The names of engines that some calls are offered by themselves."""
    return tuple(b.name for b in backends_of() if b.is_engine and b.rank is not None)


@memo(1)
def names() -> tuple[str, ...]:
    """The names that a call may use: backends and tiers."""
    records = backends_of()
    return tuple(b.name for b in records) + tuple(dict.fromkeys(b.tier for b in records if b.tier))


def planning(where: str) -> tuple[str, ...]:
    """The names that a call may use of backends whose own planners plan on the "host" or the "device"."""
    return tuple(n for b in RECORDS.values() if b.plans == where for n in (b.name, b.tier))


settings.offer(backends=names, engines=offered, host=lambda: planning("host"), device=lambda: planning("device"))


NO_GRADIENTS = (  # a reason for "backward" of `Backend.features`
    "backend {name!r} has no gradients; {others} have\n"
    "  for the forward alone write `with torch.no_grad():`, or detach the tensors"
)


def no_gradients(name: str) -> BackwardError:
    """The error of a gradient that is asked of a backend without any; it lists those that have every gradient."""
    ours = (b for b in RECORDS.values() if not b.is_engine)
    whole = {b.name for b in ours for e in b.executors.values() if e.backward and not e.refuses_gradients}
    *most, last = sorted(whole)
    others = f"{', '.join(most)} and {last}"
    return BackwardError(NO_GRADIENTS.format(name=name, others=others))


def absent(module: str, extra: str) -> str:
    """The words for a package that is not installed."""
    return "" if importlib.util.find_spec(module) else f"{module} is not installed: {pip_install(extra)}"


def no_driver(framework: str) -> bool:
    """Whether a framework that is not imported yet would see no GPU: to import it only to ask takes seconds."""
    if framework in sys.modules or sys.platform != "linux":
        return False
    return not any(glob(path) for path in DRIVERS)


def nvidia() -> bool:
    """Whether torch sees a GPU of NVIDIA."""
    if absent("torch", "torch") or no_driver("torch"):
        return False
    import torch

    return torch.cuda.is_available() and not torch.version.hip


def capability_of(platform: str) -> tuple[int, int]:
    """The compute capability of this machine's GPU of NVIDIA; (0, 0) without one, or without torch."""
    if platform != "cuda" or not nvidia():
        return 0, 0
    import torch

    return torch.cuda.get_device_capability()


def neither_hopper_nor_blackwell(printed: str, claim: str, names: Sequence[str]) -> str:
    """A reason why kernels for the architectures `names`, as `claim` says, do not run on torch's GPU."""
    if not nvidia():
        return f"no GPU of NVIDIA is visible to torch; {printed} can be printed all the same"
    import torch

    have = torch.cuda.get_device_capability()
    known = [divmod(GPUS[n].capability, 10) for n in names]
    *first, last = (f"{major}.{minor}" for major, minor in known)
    listed = f"{', '.join(first)} and {last}"
    why = f"{claim} compute capabilities {listed}; this GPU has {have[0]}.{have[1]}: take backend='triton'"
    return "" if have in known else why


def no_gpu() -> str:
    """A reason why JAX runs nothing on a GPU here."""
    if not no_driver("jax"):
        import jax

        if jax.default_backend() == "gpu":
            return ""
    return "no GPU is visible to JAX; its source can be printed, and calls exported, all the same"
