"""The flex_attention templates of the torch that is installed, rendered and compiled for the same measurement.

Tiles, warps and stages are torch's own defaults for the architecture, by its heuristics; options are those that
torch sets for contiguous arrays whose lengths are multiples of the tiles. Nothing of torch is copied: where torch has
no such templates, there is no figure.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from .compiled import Compiled, kept
from .ours import DRAWN, HEADS, LENGTH, Tile

# mask and score of a template, by our names of masks: what inductor writes for them
MASKS = {
    "causal": "tmp = {m} >= {n}",
    "full": "tmp = ({m} >= 0) | ({n} >= 0)",
    "window 128": "tmp = ({m} >= {n}) & (({m} - {n}) < 128)",
    "window 512": "tmp = ({m} >= {n}) & (({m} - {n}) < 512)",
    "window 1024": "tmp = ({m} >= {n}) & (({m} - {n}) < 1024)",
    "documents": "tmp = ({m} >= {n}) & (tl.load(arg_DOC + {m}) == tl.load(arg_DOC + {n}))",
    DRAWN: "tmp = ({m} >= {n}) & (tl.load(arg_DOC + {m}) == tl.load(arg_DOC + {n}))",
    "documents, any order": "tmp = ({m} >= {n}) & (tl.load(arg_DOC + {m}) == tl.load(arg_DOC + {n}))",
    "documents, both sides": "tmp = tl.load(arg_DOC + {m}) == tl.load(arg_DOC + {n})",
    "prefix": "tmp = ({m} >= {n}) | ({n} < 1024)",
    "residue": "tmp = ({m} >= {n}) & ({n} % 4 == 1)",
    "dilation by 4": "tmp = ({m} >= {n}) & (({m} - {n}) % 4 == 0)",
    "dilation by 5": "tmp = ({m} >= {n}) & (({m} - {n}) % 5 == 0)",
    "product": "tmp = ({m} >= {n}) & ({m} * {n} % 7 < 3)",
    "softcap": "tmp = {m} >= {n}",
}
SCORES = {"softcap": ("50.0 * libdevice.tanh(({score}) * 0.02)", "({grad}) * (1.0 - libdevice.tanh(({score}) * 0.02) * "
                      "libdevice.tanh(({score}) * 0.02))")}  # fmt: skip
BLOCK = 128  # queries, and keys, of a tile of flex_attention's BlockMask
TEMPLATES = {
    "forward": ("flex_attention", "utilities", "common"), "backward": ("flex_backwards", "utilities"),
    "decode": ("flex_decode", "utilities", "common"),
}  # fmt: skip
FLOATS = ("LSE", "MAX", "DELTA", "M", "L")
ARRAYS = ("Q", "K", "V", "DO", "DQ", "DV", "out_ptr0")


@dataclass(frozen=True)
class Flex:
    """One of flex_attention's kernels: `backward` has both gradients, told apart by the number of a program; `decode`
    has `queries` a sequence, in `splits` of the keys."""

    kernel: str  # forward, backward or decode
    mask: str = "causal"
    dim: int = 128
    dtype: str = "bfloat16"
    arch: str = "sm_90"
    group: int = 1  # query heads of a key head
    queries: int = LENGTH
    splits: int = 1


def templates() -> Path | None:
    """The folder of torch's templates."""
    spec = importlib.util.find_spec("torch")
    found = spec and spec.origin and Path(spec.origin).parent / "_inductor" / "kernel" / "flex" / "templates"
    return found if found and (found / "flex_attention.py.jinja").exists() else None


@contextmanager
def capability(arch: str) -> Iterator[None]:
    """torch's heuristics as they are where such a GPU is."""
    import torch

    known = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: divmod(int(arch.removeprefix("sm_")), 10)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = known


@cache
def tiles(kernel: str, dim: int, dtype: str, arch: str) -> tuple[Tile, ...]:
    """torch's default tiles: that of the forward, or those of dq and of dkv."""
    import torch
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic

    with capability(arch):
        heuristic = CUDAConfigHeuristic()
        if kernel == "decode":
            (x,) = heuristic.get_flex_decode_configs(dim, getattr(torch, dtype))
            return (Tile(0, x.block_n, x.num_warps, x.num_stages),)
        if kernel == "forward":
            (x,) = heuristic.get_flex_attn_fwd_configs(dim, getattr(torch, dtype))
            return (Tile(x.block_m, x.block_n, x.num_warps, x.num_stages),)
        (x,) = heuristic.get_flex_attn_bwd_configs(dim, getattr(torch, dtype))
    return (
        Tile(x.block_m2, x.block_n2, x.num_warps, x.num_stages), Tile(x.block_m1, x.block_n1, x.num_warps, x.num_stages)
    )  # fmt: skip


def constants(flex: Flex, chosen: tuple[Tile, ...]) -> dict[str, Any]:
    """The constants that torch puts before a template."""
    dim = flex.dim
    known: dict[str, Any] = {
        "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "FLOAT32_PRECISION": "'ieee'",
        "IS_DIVISIBLE": True, "SM_SCALE": dim**-0.5, "GQA_SHARED_HEADS": flex.group, "HAS_FULL_BLOCKS": True,
        "QK_HEAD_DIM": dim, "QK_HEAD_DIM_ROUNDED": dim, "V_HEAD_DIM": dim, "V_HEAD_DIM_ROUNDED": dim,
        "SAFE_HEAD_DIM": True, "USE_TMA": False, "SPARSE_Q_BLOCK_SIZE": BLOCK, "SPARSE_KV_BLOCK_SIZE": BLOCK,
        "INDEX_DTYPE": "tl.int32",
    }  # fmt: skip
    if flex.kernel == "decode":
        rows = max(16, 1 << (flex.queries * flex.group - 1).bit_length())
        known |= {"SPLIT_KV": flex.splits, "SAFE_M_BOUNDARY": flex.queries * flex.group == rows}
        return {**known, "IS_DIVISIBLE": False, "SAFE_N_BOUNDARY": True, "BLOCK_M": rows, "BLOCK_N": chosen[0].block_k}
    if flex.kernel == "forward":
        return {**known, "BLOCK_M": chosen[0].block_q, "BLOCK_N": chosen[0].block_k}
    dq, dkv = chosen
    return {**known, "BLOCK_M1": dkv.block_q, "BLOCK_N1": dkv.block_k, "BLOCK_M2": dq.block_q, "BLOCK_N2": dq.block_k}


def rendered(flex: Flex, chosen: tuple[Tile, ...]) -> str:
    """The module of one template, with the helpers that torch gives it replaced by plain ones."""
    from jinja2 import Environment

    folder = templates()
    if folder is None:
        raise RuntimeError("this torch has no templates of flex_attention")
    defs, names = constants(flex, chosen), []
    blocks = LENGTH // BLOCK
    array, row, one = (1, HEADS, LENGTH, flex.dim), (1, HEADS, LENGTH), (1, 1, blocks)
    keys = (1, HEADS // flex.group, LENGTH, flex.dim)
    stored = array
    shapes = dict.fromkeys(("Q", "DO", "DQ"), array) | dict.fromkeys(("K", "V", "DV"), keys)
    shapes |= dict.fromkeys(("LSE", "MAX", "DELTA"), row)
    if flex.kernel == "decode":
        part = (1, flex.splits, HEADS, flex.queries)
        stored = (*part, flex.dim)
        shapes |= {"Q": (1, HEADS // flex.group, flex.group, flex.queries, flex.dim), "M": part, "L": part}
    for side in ("KV", "Q", "FULL_KV", "FULL_Q"):
        shapes |= {f"{side}_NUM_BLKS": one, f"{side}_IDX": (*one, blocks)}

    def steps(shape: tuple[int, ...]) -> list[int]:
        found = [1]
        for x in reversed(shape[1:]):
            found.insert(0, found[0] * x)
        return found

    def strides(name: str) -> list[int]:
        return steps(shapes[name])

    def def_kernel(*arrays: str) -> str:
        names.extend([*arrays, *(["DOC"] if "arg_DOC" in MASKS[flex.mask] else [])])
        head = [f"arg_{n}" for n in names]
        lines = ["import triton", "import triton.language as tl", "from triton.language.extra import libdevice", "", ""]
        lines += ["@triton.jit", f"def flex_kernel({', '.join(head)}, out_ptr0):"]
        lines += [f"    {n}: tl.constexpr = {x}" for n, x in defs.items()]
        return "\n".join(lines + [f"    {n} = arg_{n}" for n in names]) + "\n"

    def modification(subgraph_number: int, output_name: str, **given: str) -> str:
        score, grad = SCORES.get(flex.mask, ("({score})", "({grad})"))
        backward = flex.kernel == "backward"
        if subgraph_number == 0:
            return f"{output_name} = {score.format(score=given['score'])}"
        if backward and subgraph_number == 1:
            return f"{output_name} = {grad.format(score=given['score'], grad=given['grad_score_mod'])}"
        if subgraph_number == (2 if backward else 1):
            text = MASKS[flex.mask].format(m=f"({given['m']})", n=f"({given['n']})")
            return f"{text}\n{output_name} = tmp"
        return "pass"

    def store_output(index: tuple[str, ...], value: str, mask: str, **_: Any) -> str:
        place = " + ".join(f"({i}) * {s}" for i, s in zip(index, steps(stored), strict=True))
        return f"tl.store(out_ptr0 + {place}, {value}, {mask})"

    def later_lines(text: str, levels: int = 1) -> str:
        return text.replace("\n", "\n" + "    " * levels)

    environment = Environment()
    environment.filters["indent_except_first"] = later_lines
    text = "".join((folder / f"{p}.py.jinja").read_text() + "\n" for p in TEMPLATES[flex.kernel])
    return environment.from_string(text.lstrip()).render(
        def_kernel=def_kernel, modification=modification, store_output=store_output,
        gen_argdefs=lambda: ", ".join(f"arg_{n}" for n in names),
        gen_defines=lambda: "\n".join(f"{n}: tl.constexpr = {x}" for n, x in defs.items()),
        stride=lambda n, i=None: str(strides(n)[i]) if i is not None else ", ".join(map(str, strides(n))),
        size=lambda n, i: str(shapes[n][i]),
        **{n: x for n, x in defs.items() if n in ("USE_TMA", "HAS_FULL_BLOCKS")},
    )  # fmt: skip


def compiled(flex: Flex, chosen: tuple[Tile, ...] | None = None) -> Compiled:
    """The kernel with torch's default tiles, or with others, compiled by the Triton that is installed."""
    chosen = chosen or tiles(flex.kernel, flex.dim, flex.dtype, flex.arch)
    source, tile = rendered(flex, chosen), chosen[0]
    key = (source, flex.dtype, tile.warps, tile.stages)
    found = kept("flex_kernel", flex.arch, tile.warps, key, lambda: _compile(source, flex, tile))
    return replace(found, stages=tile.stages)


def _compile(source: str, flex: Flex, tile: Tile) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointer = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[flex.dtype]
    with tempfile.NamedTemporaryFile("w", suffix=".py", prefix="flex_", delete=False) as file:
        file.write(source)  # Triton reads a kernel's text from its file
    spec = importlib.util.spec_from_file_location(Path(file.name).stem, file.name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    try:
        types = {}
        for name in module.flex_kernel.arg_names:
            bare = name.removeprefix("arg_")
            types[name] = pointer if bare in ARRAYS else "*fp32" if bare in FLOATS else "*i32"
        hints = {(i,): [["tt.divisibility", 16]] for i in range(len(types))}
        return triton.compile(
            ASTSource(module.flex_kernel, types, {}, hints),
            target=GPUTarget("cuda", int(flex.arch.removeprefix("sm_")), 32),
            options={"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True},
        )
    finally:
        Path(file.name).unlink()
