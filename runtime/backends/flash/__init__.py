"""FlashAttention 4's own kernels for Hopper and Blackwell (`flash_attn.cute`), on tensors of torch. A mask is given as
the engine's flags where it is one, and as code and tiles elsewhere."""

from __future__ import annotations

from frisket.lowering.architectures import FLASH_CHECKED
from frisket.lowering.kernels.features import FLASH
from frisket.runtime.backends.base import Backend, Executors, absent, neither_hopper_nor_blackwell
from frisket.runtime.machine.modules import pip_install


def reason(framework: str | None = None) -> str:
    """A reason why the kernels do not run here."""
    why = absent("torch", "torch") or neither_hopper_nor_blackwell("the mask's code", "checked on", FLASH_CHECKED)
    return why or ("" if installed() else f"flash-attn-4 is not installed: {pip_install('flash')}")


def installed() -> bool:
    """Whether `flash_attn.cute` can be imported: older distributions of flash_attn have no such part."""
    from importlib.util import find_spec

    return bool(find_spec("flash_attn") and find_spec("flash_attn.cute"))


Backend(
    name="flash",
    kernels="kernels of FlashAttention 4, by name until a GPU has run them under frisket",
    language="cute",
    reason=reason,
    package=__name__,
    module="call",
    takes_plans=True,
    executors={"torch": Executors()},
    order=55,
    platforms=("cuda",),
    rank=15,
    optional=True,
    features=FLASH,
    guarded=True,
    loads=True,
).register()
