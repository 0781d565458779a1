"""torch's scaled_dot_product_attention, where it is FlashAttention: on the CPU, and on GPUs of NVIDIA.

`arguments` says what would be called, `forward` and `backward` call it.

On the CPU a causal mask begins at the top left: query i sees keys 0 to i. The kernel for GPUs begins it at the bottom
right where there are more keys than queries, so it takes squares alone. lse is the natural log. Keys that are valid are
a slice. A query without keys is refused: torch gives such rows NaN on one device and 0 on another. Sources: torch's
documentation of scaled_dot_product_attention, and the schemas of `aten::_scaled_dot_product_flash_attention` and
`aten::_scaled_dot_product_flash_attention_for_cpu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frisket.lowering.dtypes import HALVES
from frisket.lowering.engines.flags import Flags
from frisket.lowering.plan import Cotangents, ForwardResults
from frisket.runtime.backends.base import Backend, Executors, absent
from frisket.runtime.backends.engines import LACKS, SQUARE, SquareMask, gradients, square

if TYPE_CHECKING:
    from frisket.runtime.backends.engines.proof import EngineCall

Tensor = Any
ONE_SIZE = "values of {arrays.v_dim} numbers and keys of {arrays.head_dim}; SDPA's flash kernel takes one head dim"


@dataclass(frozen=True)
class SdpaArguments:
    """The arguments of torch's FlashAttention besides q, k and v, of which keys [start, stop) are given."""

    device: str  # "cpu" or "cuda"
    mask: SquareMask
    scale: float
    gradients: bool  # whether the engine makes them, or generated kernels do

    @property
    def operator(self) -> str:
        return "_scaled_dot_product_flash_attention" + ("_for_cpu" if self.device == "cpu" else "")


def arguments(flags: Flags, call: EngineCall) -> SdpaArguments | str:
    """The arguments of a call, or why torch's FlashAttention does not compute it."""
    g = call.geometry
    mask = square(flags, g, "SDPA", rectangles=call.platform == "cpu")
    if isinstance(mask, str):
        return mask
    if g.head_dim != g.v_dim:
        return ONE_SIZE.format(arrays=g)
    if call.platform == "cuda":
        if call.dtype not in HALVES:
            return f"SDPA's flash kernel takes float16 and bfloat16 on a GPU, not {call.dtype}"
        if g.head_dim > 256 or g.head_dim % 8:
            return f"SDPA's flash kernel takes head dims in eights up to 256, not {g.head_dim}"
        if why := _unfit():
            return why
    # on GPUs the sums of gradients come in any order
    return SdpaArguments(call.platform, mask, g.scale * flags.factor, call.platform == "cpu" or not call.deterministic)


def _unfit() -> str:
    """A reason why this machine's GPU does not run torch's FlashAttention."""
    import torch

    if torch.version.hip:
        return "written for GPUs of NVIDIA"
    have = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return "" if have >= (8, 0) else f"SDPA's flash kernel takes compute capability 8.0 and later; here is {have}"


def forward(a: SdpaArguments, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    import torch

    run = getattr(torch.ops.aten, a.operator)
    out, lse, *_ = run(q, *a.mask.valid(k, v), 0.0, a.mask.causal, scale=a.scale)
    return out, lse


def backward(
    a: SdpaArguments, q: Tensor, k: Tensor, v: Tensor, results: ForwardResults, cotangents: Cotangents
) -> dict[str, Tensor]:
    """The gradients of q, k and v."""
    import torch

    run = getattr(torch.ops.aten, f"{a.operator}_backward")

    def backward_of(dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        more: tuple[Any, ...] = 0.0, a.mask.causal
        if a.device != "cpu":
            none = torch.empty(0, dtype=torch.int64, device=q.device)  # dropout draws nothing
            # with a tensor in the place of None, q, k and v would be packed sequences
            more = None, None, q.shape[2], keys.shape[2], *more, none, none
        return run(dout, q, keys, values, *rows, *more, scale=a.scale)  # type: ignore[no-any-return]

    return gradients(backward_of, a.mask, (q, k, v), results, cotangents)


Backend(
    name="sdpa",
    kernels="torch's scaled_dot_product_attention, of masks that it knows",
    language="torch",
    reason=lambda framework: absent("torch", "torch"),
    engine=arguments,
    executors={"torch": Executors(__name__)},
    order=74,
    platforms=("cpu", "cuda"),
    rank=30,
    features={**LACKS, **SQUARE, "unequal head sizes": ONE_SIZE},
).register()
