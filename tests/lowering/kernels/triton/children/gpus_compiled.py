"""Run by test_triton_table.py without TRITON_INTERPRET: the shared memory that Triton's compiler gives to kernels with
frisket's default tiles on every GPU that `frisket emit --report` knows, compared with what a block may have there.

The cases are a pairwise cover, filled up by a hash of their names: any two values of two axes meet in some case.
`--part 3/15`, as `.ci/run` has it, compiles about twenty of them.
"""

import zlib
from itertools import combinations, product

import numpy as np
import pytest
from lowering.kernels.triton.children.tiles_compiled import stored

import frisket as fk
from frisket.lowering.architectures import GPUS
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.triton.captured import plane, square
from frisket.lowering.kernels.triton.module import Dims
from frisket.runtime.backends.triton.kernels import compiled_for
from frisket.runtime.backends.triton.tiles import of_kernel
from frisket.runtime.machine.modules import load_from_file

LENGTH, HEADS, MOST = 512, 8, 300
MASKS = {
    "causal": ("causal", None, {}),
    "bias": ("causal", "score + t[h, q, k]", {"t": np.zeros((HEADS, LENGTH, LENGTH), np.float32)}),
    "softcap": ("causal", "softcap(50)", {}),
    "documents": ("causal & same(doc)", None, {"doc": np.arange(LENGTH) // 100}),
    "stored": (None, None, {}),
}
KERNELS = ("forward", "decode", "dq", "dkv", "captured")
AXES = (tuple(GPUS), KERNELS, (64, 96, 128, 192, 256), ("float16", "bfloat16", "float32"), tuple(MASKS))


def possible(arch, kernel, dim, dtype, mask):
    """Gradients of stored keys there are none, and the kernels of captured gradients are those of a table."""
    return (mask == "bias" or kernel != "captured") and (mask != "stored" or kernel in ("forward", "decode"))


def cover():
    """At most MOST cases, in which any two values of two axes meet that can."""
    names = sorted((x for x in product(*AXES) if possible(*x)), key=lambda x: zlib.crc32(repr(x).encode()))
    pairs = {x: frozenset(combinations(enumerate(x), 2)) for x in names}
    left, chosen = set().union(*pairs.values()), []
    for worth in range(len(AXES) * (len(AXES) - 1) // 2, -1, -1):
        for x in names:
            if len(chosen) < MOST and len(pairs[x] & left) >= worth and x not in chosen:
                left -= pairs[x]
                chosen.append(x)
    assert not left
    return chosen


def kernels(arch, kernel, dim, dtype, mask):
    """(name, kernel, plan, target, dims) of what is launched."""
    kv_heads = 1 if kernel == "decode" else HEADS
    dims = Dims(dim, dim, dtype, HEADS // kv_heads, "int8" if mask == "stored" else "")
    if mask == "stored":
        source, plan, target = stored(arch, dims, 1 if kernel == "decode" else LENGTH, kv_heads)
    else:
        written, mod, tables = MASKS[mask]
        made = fk.compile(written, mod, **tables).stages(
            backend="triton", arch=arch, q_len=1 if kernel == "decode" else LENGTH, kv_len=LENGTH, heads=HEADS,
            kv_heads=kv_heads, head_dim=dim, dtype=dtype,
        )  # fmt: skip
        source, plan, target = made.source, made.plan, made.target
    if kernel == "captured":
        source = plane(plan, square(target), dims, backward_of(plan).gradients[0], shared="b")
    prefixes = {"captured": ("attention_plane",), "dkv": ("attention_dkv", "attention_dv")}
    for name, found in vars(load_from_file(source)).items():
        if name in prefixes.get(kernel, (f"attention_{kernel}",)):
            yield name, found, plan, of_kernel(name, target), dims


@pytest.mark.parametrize(("arch", "kernel", "dim", "dtype", "mask"), cover())
def test_default_tiles_fit_by_the_compiler(arch, kernel, dim, dtype, mask):
    launched = list(kernels(arch, kernel, dim, dtype, mask))
    assert launched
    for name, found, plan, target, dims in launched:
        shared = int(compiled_for(arch, found, plan, target, dims).metadata.shared)
        tile = target.block_q, target.block_k, target.num_warps, target.num_stages
        assert shared <= GPUS[arch].shared, f"{name} {tile}: {shared} of {GPUS[arch].shared} bytes"
