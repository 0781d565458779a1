"""FlashAttention 4's own kernels for Hopper and Blackwell (`flash_attn.cute`), on tensors of torch: a mask is given as
the engine's flags where it is one, and as code and tiles elsewhere."""

from __future__ import annotations

from frisket.lowering.features import CUTE, OVER, Features
from frisket.runtime.backends.base import Backend, Executors, absent, neither_hopper_nor_blackwell
from frisket.runtime.machine.modules import pip_install


def reason(framework: str | None = None) -> str:
    """A reason why the kernels do not run here."""
    why = absent("torch", "torch") or neither_hopper_nor_blackwell("the mask's code", "checked on")
    return why or ("" if installed() else f"flash-attn-4 is not installed: {pip_install('flash')}")


def installed() -> bool:
    """Whether `flash_attn.cute` can be imported: older distributions of flash_attn have no such part."""
    from importlib.util import find_spec

    return bool(find_spec("flash_attn") and find_spec("flash_attn.cute"))


LACKS: Features = {
    **{
        dtype: f"FlashAttention 4 takes float16 and bfloat16; cast q, k and v, or {instead}"
        for dtype, instead in {"float32": "take backend='triton'", "float64": "move them to the CPU"}.items()
    },
    "head sizes not in eights": (
        "FlashAttention 4 takes head sizes that are multiples of 8, not {arrays.head_dim} and {arrays.v_dim}"
    ),
    "head sizes over 256": (
        "FlashAttention 4 takes head sizes from 8 to 256 on Hopper, not {arrays.head_dim} and {arrays.v_dim}"
    ),
    "origins by batch entry": "FlashAttention 4 takes one origin for all batch entries, not one for each",
    "8-bit caches": "FlashAttention 4 takes keys and values in the dtype of the queries",
    "max": "FlashAttention 4 does not tell the largest score of a row",
    **{f"gradients by {over}": "FlashAttention 4 has no gradient of {names}" for over in OVER.values()},
    # pages are read where flags are the whole mask: `call.unpaged`
    **{name: why for name, why in CUTE.items() if name != "paged caches"},
}
Backend(
    name="flash",
    kernels="kernels of FlashAttention 4, by name until a GPU has run them under frisket",
    language="cute",
    reason=reason,
    module=f"{__name__}.call",
    takes_plans=True,
    executors={"torch": Executors(f"{__name__}.torch")},
    order=55,
    platforms=("cuda",),
    rank=15,
    optional=True,
    features=LACKS,
    guarded=True,
    loads=True,
).register()
