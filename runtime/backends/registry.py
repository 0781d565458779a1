"""The choice of a backend: what runs here, why the others do not, which one a call takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from frisket.dsl.errors import BackendError, nearest
from frisket.lowering.dtypes import FP8
from frisket.lowering.kernels.features import missing
from frisket.lowering.plan import Geometry, Target
from frisket.runtime.calls.options import AS_CHOSEN
from frisket.runtime.machine.caller import warn_once
from frisket.runtime.machine.settings import Settings

from .base import LIBRARY, RECORDS, Backend, backends_of, named, names, ranked

ORDER = "equal bits in any batch"
MEANT = dict.fromkeys(("cuda", "gpu", "rocm", "hip"), "triton") | dict.fromkeys(("tpu", "pallas"), "pallas-tpu")
MEANT |= {"cpu": "cpp", "c++": "cpp", "jax": "xla", "torch": "aten"}  # devices and frameworks, and their backends

if TYPE_CHECKING:
    from frisket.runtime.calls.options import Options
    from frisket.runtime.plans.device import CallPlan


class Availability(dict[str, str]):
    """`fk.backends()`: name -> "" when it runs here, otherwise the reason it does not."""

    def __str__(self) -> str:
        return "\n".join(f"{name:18} {why or ready_text(name)}" for name, why in self.items())

    __repr__ = __str__


def backends() -> Availability:
    """Say which backends run here, and why the others do not.

    >>> import frisket as fk
    >>> fk.backends()["dense"]
    ''
    """
    return Availability((b.name, reason(b.name)) for b in backends_of())


def ready_text(name: str) -> str:
    """A sentence about a backend that runs here."""
    return f"runs here{RECORDS[name].how}"


def reason(name: str, framework: str | None = None) -> str:
    """A reason why a backend does not run here, on arrays of `framework` where one is named; empty when it does."""
    return RECORDS[name].reason(framework)


def printed() -> list[str]:
    """The backends with a kernel text."""
    return [b.name for b in backends_of() if b.module]


def library(framework: str) -> str:
    """The backend of a framework's library calls, which takes every call."""
    return named(LIBRARY, framework).name


def check_name(name: str | None) -> None:
    """Raise for an unknown backend."""
    if name is not None and name not in names():
        near = MEANT.get(str(name).casefold()) or nearest(str(name), names())
        hint = f" (did you mean {near!r}?)" if near else ""
        raise BackendError(f"no backend {name!r}{hint}; there are {', '.join(names())}")


def choose(name: str | None, framework: str, device: str, dtype: str = "", invariant: bool = False) -> str:
    """The backend of a call: the keyword, else FRISKET_BACKEND, else by framework and device. Raises where it does not
    take arrays of this framework, device or dtype, or does not give rows one order of sums in `invariant` calls."""
    name = name or Settings.read().backend
    if name is None:
        backend = RECORDS[automatic(framework, device)]
        # the one that takes queries of 8 bits in its place
        others = [b for b in backends_of(framework) if b.instead == backend.name and dtype not in b.features]
        backend = next((b for b in others if dtype == FP8 and not b.reason(framework)), backend)
    else:
        check_name(name)
        backend = named(name, framework)
    if name is not None or not backend.optional:  # an optional one that is automatic was asked already
        _check_takes(backend, framework, device)
    if (backend.features or backend.interpreter) and (why := backend.refused_dtype(dtype)):
        raise BackendError(why)
    if invariant:
        backend = _with_one_order(backend, framework, device, name is not None)
    return backend.name


def _with_one_order(backend: Backend, framework: str, device: str, named: bool) -> Backend:
    """The backend, or where none is `named` the first of the platform whose rows have one order of sums."""
    others = () if named else ranked(framework, device)
    fit = (
        b
        for b in others
        if ORDER not in b.features and not (lowerable(b.name) if framework == "jax" else b.reason(framework))
    )
    backend = backend if ORDER not in backend.features else next(fit, backend)
    if why := missing(backend.features, needed=[ORDER]):
        raise BackendError(why)
    return backend


def _check_takes(backend: Backend, framework: str, device: str) -> None:
    name = backend.name
    if framework not in backend.frameworks:
        there = ", ".join(b.name for b in backends_of(framework))
        raise BackendError(f"backend {name!r} does not take {framework} arrays; they run on {there}")
    if why := lowerable(name) if framework == "jax" else reason(name, framework):
        raise BackendError(f"backend {name!r} does not run here: {why}")
    if framework == "torch" and backend.platforms == ("cpu",) and device != "cpu":
        other = next(b.name for b in backends_of("torch") if b.accelerated)
        raise BackendError(f"backend {name!r} runs on the CPU, q is on {device}; take {other!r}, or move q, k and v")


def lowerable(name: str) -> str:
    """A reason why JAX cannot lower for a backend, whatever devices are there; empty when it can."""
    missing = RECORDS[name].missing
    return reason(name) if missing is None else missing()


def automatic(framework: str, device: str) -> str:
    """The backend of generated kernels, or of library calls, that a call takes by itself."""
    if framework == "jax" and device != "cpu":
        return likely()
    running = (b.name for b in ranked(framework, device) if not (b.optional and b.reason(framework)))
    return next(running, "") or library(framework)


def quickest(name: str, plan: CallPlan, geometry: Any, dtype: str, options: Options) -> str:
    """The generated kernels that run a call on tensors of torch whose first choice is `name`. They are those of another
    backend where its record says that they are faster, and no kernel or tile is named."""
    named = options.backend or Settings.read().backend or options.tile or options.tuning != AS_CHOSEN
    if named or options.rows is not None:
        return name
    others = (b for b in backends_of("torch") if b.instead == name and not b.reason("torch"))
    return next((b.name for b in others if b.pays is not None and b.pays(plan, geometry, dtype)), name)


def likely() -> str:
    """The backend of most calls on the platform that JAX puts arrays on by itself."""
    import jax

    platform = jax.default_backend()
    if platform == "gpu":
        platform = platform_of(jax.numpy.zeros(()))  # "gpu" is both CUDA and ROCm: only an array tells
    there = (b.name for b in ranked("jax", platform) if not (lowerable(b.name) or b.unfit()))
    return next(there, library("jax"))


def platform_of(x: Any) -> str:
    """ "cpu", "tpu", "cuda" or "rocm": where an array of JAX is that has values."""
    device = next(iter(x.devices()))
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def target_of(
    backend: str, geometry: Any, dtype: str, options: Options, plan: CallPlan | None = None, device: Any = None,
    arch: str | None = None,
) -> Any:  # fmt: skip
    """The tiles and warps of a backend for a call, likely ones without a plan; `arch` is a GPU's if not `device`'s."""
    record = RECORDS[backend]
    if record.call_target is not None:
        target = record.call_target(plan, geometry, dtype, options.tile, options.tuning, device, arch)
        # no device has run it: it takes part where the backend is named
        named = backend in (options.backend, Settings.read().backend)
        return target if named or getattr(target, "fused", None) is None else replace(target, fused=None)
    kernel: Any = None if plan is None or record.target is None else plan.work((128, 128)).plan
    return target_on(backend, kernel, geometry, dtype, options.tile, plan is not None and plan.narrow)


def target_on(
    backend: str,
    plan: Any,
    geometry: Any,
    dtype: str,
    tile: tuple[int, int] | None,
    narrow: bool,
    invariant: bool = False,
) -> Target:
    """The tiles of a call with this LoopPlan, or the caller's. `narrow`: smaller ones, as rows see few keys.
    `invariant`: with one order of sums for each row."""
    record = RECORDS[backend]
    if record.target is not None:
        order = {"invariant": True} if invariant else {}  # that few backends have
        return record.target(plan, geometry, dtype, tile, narrow, **order)  # type: ignore[no-any-return]
    return Target(backend, *(tile or record.tiles(geometry, dtype, narrow)))


FIRST = 1.0  # seconds of tracing and compiling, whatever the lengths
TIMES = ((3, "some seconds"), (30, "about 10 s"), (180, "some minutes"), (1800, "about 10 min"), (10800, "an hour"))


def warn_slow(backend: str, g: Geometry) -> None:
    """Say once that calls on this backend are interpreted, and how long one of these sizes may take."""
    interpreter = RECORDS[backend].interpreter
    # symbolic lengths of jax.export say nothing about time
    if interpreter is None or not all(type(n) is int for n in (g.batch, g.heads, g.q_len, g.kv_len)):
        return
    tiles = g.batch * g.heads * -(-g.q_len // 128) * -(-g.kv_len // 128)
    seconds = FIRST + tiles * interpreter.seconds
    how_long = next((words for most, words in TIMES if seconds < most), "many hours")
    warn_once(
        f"backend {backend!r} runs in {interpreter.owner} interpreter on this CPU, for checking and not for speed: a "
        f"call of this size may take {how_long}, its gradient three times as long\n"
        "  without a backend calls run on kernels for the CPU"
    )
