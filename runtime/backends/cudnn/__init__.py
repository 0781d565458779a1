"""cuDNN's attention on GPUs of NVIDIA, by torch's operator.

`arguments` says what would be called, `forward` and `backward` call it.

The causal mask is a square: query i sees keys 0 to i. lse is the natural log, [batch, heads, q_len, 1]. Query heads may
share key heads. Source: NVIDIA's documentation of cuDNN's scaled dot product attention, and the schemas of
`aten::_scaled_dot_product_cudnn_attention` and its backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frisket.lowering.engines.flags import Flags
from frisket.lowering.plan import Cotangents, ForwardResults
from frisket.runtime.backends.base import Backend, Executors, absent, capability_of, nvidia
from frisket.runtime.backends.engines import LACKS, SQUARE, SquareMask, gradients, square

if TYPE_CHECKING:
    from frisket.runtime.backends.engines.proof import EngineCall

Tensor = Any
HOPPER = (9, 0)
HALVES = "cuDNN's attention takes float16 and bfloat16; cast q, k and v, or leave out the backend"
ONE_SIZE = "cuDNN takes one head dim, in eights up to {most} on this GPU, not {dims}"
OLDEST = 90000  # of cuDNN, where its attention is as torch calls it


@dataclass(frozen=True)
class CudnnArguments:
    """The arguments of cuDNN's attention besides q, k and v, of which keys [start, stop) are given."""

    mask: SquareMask
    scale: float
    capability: tuple[int, int]
    gradients: bool  # whether the engine makes them, or generated kernels do


def arguments(flags: Flags, call: EngineCall) -> CudnnArguments | str:
    """The arguments of a call, or why cuDNN does not compute it."""
    return fitted(flags, call, capability_of(call.platform))


def fitted(flags: Flags, call: EngineCall, capability: tuple[int, int]) -> CudnnArguments | str:
    """The arguments of a call on a GPU of a compute capability."""
    g, most = call.geometry, 256 if capability >= HOPPER else 128
    mask = square(flags, g, "cuDNN", rectangles=False)
    if isinstance(mask, str):
        return mask
    if g.head_dim != g.v_dim or g.head_dim > most or g.head_dim % 8:
        dims = f"{g.head_dim}" if g.head_dim == g.v_dim else f"{g.head_dim} and {g.v_dim}"
        return ONE_SIZE.format(most=most, dims=dims)
    if capability < (8, 0):
        return f"cuDNN's attention takes compute capability 8.0 and later; this GPU has {capability}"
    # sums of gradients come in any order
    return CudnnArguments(mask, g.scale * flags.factor, capability, not call.deterministic)


def forward(a: CudnnArguments, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    import torch

    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = run(q, *a.mask.valid(k, v), None, True, 0.0, a.mask.causal, scale=a.scale)
    return out, lse.reshape(q.shape[:3])


def backward(
    a: CudnnArguments, q: Tensor, k: Tensor, v: Tensor, results: ForwardResults, cotangents: Cotangents
) -> dict[str, Tensor]:
    """The gradients of q, k and v."""
    import torch

    def backward_of(dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor) -> Any:
        none = torch.empty(0, dtype=torch.int64, device=q.device)  # dropout draws nothing, and no lengths differ
        more = none, none, None, None, None, q.shape[2], keys.shape[2], 0.0, a.mask.causal
        run = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        return run(dout, q, keys, values, out, lse[..., None], *more, scale=a.scale)

    return gradients(backward_of, a.mask, (q, k, v), results, cotangents)


def reason(framework: str | None = None) -> str:
    """A reason why cuDNN's attention does not run here."""
    if lacking := absent("torch", "torch"):
        return lacking
    if not nvidia():
        return "no GPU of NVIDIA is visible to torch"
    import torch

    have = int(torch.backends.cudnn.version() or 0)  # type: ignore[no-untyped-call]
    return "" if have >= OLDEST else f"cuDNN {have} is older than {OLDEST}"


Backend(
    name="cudnn",
    kernels="cuDNN's attention, of masks that it knows",
    language="cudnn",
    reason=reason,
    engine=arguments,
    executors={"torch": Executors(__name__)},
    order=76,
    platforms=("cuda",),
    rank=20,
    features={
        "float32": HALVES,
        "float64": HALVES,
        **LACKS,
        **SQUARE,
        **dict.fromkeys(("unequal head sizes", "head sizes not in eights", "head sizes over 256"), ONE_SIZE),
    },
).register()
