"""The answer of FlashAttention 4 to a call that names no backend: flags, code and tiles, or why it cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace

from frisket.dsl.errors import BackendError, LoweringError
from frisket.dsl.ir import COORDINATES
from frisket.lowering.engines.flags import Flags
from frisket.lowering.engines.forms import EngineForm, form_of
from frisket.lowering.plan import Geometry, Target
from frisket.runtime.backends import flash
from frisket.runtime.backends.engines.proof import EngineCall

from .call import check, flags_for, mods_of, refuse_tiles
from .tiles import target


@dataclass(frozen=True)
class FlashArguments:
    """The facts of a call before its executors make it from a plan (`FlashCall`)."""

    gradients: bool  # whether the engine makes them, or generated kernels do


def offered(call: EngineCall) -> tuple[Flags | str, FlashArguments, tuple[str, ...]] | str:
    """The mask as flags, or in words where it is code and tiles; its clauses; and why the engine has neither. The code
    is printed, as the kernel that is built of it needs it."""
    g, have = call.geometry, flash.version()
    if have != flash.READ:  # its functions are private, and may mean another thing
        return f"flash-attn-4 {have or 'of no version'} is installed, and calls are held against {flash.READ}"
    try:
        chosen = target(call.plan, g, call.dtype)
        check(g)
        work = call.plan.work((chosen.block_q, chosen.block_k), proofs=True)
        flags = flags_for(work.plan, call.plan, g, work.slots)
        by_flags = isinstance(flags, Flags)
        placed = frozenset(n for n, x in zip(COORDINATES, g.origin, strict=True) if x)
        mods_of(replace(work.plan, mask=None) if by_flags else work.plan, placed)
    except (BackendError, LoweringError) as error:
        return str(error).partition("\n")[0]
    arguments = FlashArguments(not no_gradients(g, chosen, call.deterministic, by_flags))
    if isinstance(flags, Flags):
        form = form_of(work.plan.mask)
        return flags, arguments, form.proofs if isinstance(form, EngineForm) else ()
    return f"code and tiles of {chosen.block_q} x {chosen.block_k}", arguments, ("code",)


def no_gradients(g: Geometry, chosen: Target, deterministic: bool, by_flags: bool) -> str:
    """A reason why the engine has not every gradient of a call; "" where it has."""
    if chosen.arch == "sm_100" and g.head_dim == 256:
        return "heads of 256 on Blackwell have no gradient of lse"
    try:
        if not by_flags:
            refuse_tiles(g, chosen, True, deterministic)
    except BackendError as error:
        return str(error)
    return ""
