"""torch's FlashAttention for GPUs, as far as tensors without values tell."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frisket.lowering.plan import Cotangents, ForwardResults
from frisket.runtime.backends.engines import SquareMask
from frisket.runtime.backends.sdpa import SdpaArguments, backward


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function.__name__, args))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("stop", [64, 40])
def test_sdpa_backward_of_equal_lengths_passes_no_offsets(stop):
    """With any tensor of lengths the kernel reads [tokens, heads, dim], and raised on an H100."""
    q, k, v, out, dout = (torch.empty(2, 3, n, 16, device="meta", dtype=torch.float16) for n in (64, 64, 64, 64, 64))
    lse = torch.empty(2, 3, 64, device="meta")
    with Seen() as seen:
        arguments = SdpaArguments("cuda", SquareMask(True, 0, stop), 0.25, True)
        found = backward(arguments, q, k, v, ForwardResults(out, lse), Cotangents(dout))
    (args,) = (args for name, args in seen.calls if "flash_attention_backward" in name)
    assert (args[6], args[7]) == (None, None)
    assert args[8:10] == (64, stop)
    assert {n: x.shape for n, x in found.items()} == {"q": q.shape, "k": k.shape, "v": v.shape}
