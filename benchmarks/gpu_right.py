"""The part of gpu.py that asks whether kernels with the tiles that users get are right: every mask and score mod of
the library in 16 bits, forward and backward, beside float64 on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

import cases
import torch
from gpu_scale import Measure, Row, Scale

import frisket as fk

TOKENS = 1000  # no multiple of any tile
DTYPES = ("bfloat16", "float16")
BOUNDS = {"bfloat16": 0.02, "float16": 0.004, "float32": 1e-4}  # of errors, as parts of the largest number
SHARED = ", shared heads"  # behind a row of an engine: two query heads of each key head, and arrays that are transposed
WIDE = {"cudnn": (96, 192, 256)}  # other head sizes of shared heads, in bfloat16, a row each
ROW = re.compile(rf"(\w+), (.*), (bfloat16|float16|float32)({SHARED})?(?:, D (\d+))?")
DRY = ("causal", "causal_document(off)", "softcap(c)")
KNOWN = ("full", "causal", "prefix(p)")  # masks of engines without windows and documents
ENGINES = {  # of each engine and dtype the entries that are asked, "": all
    "sdpa": {"bfloat16": KNOWN, "float16": KNOWN}, "cudnn": {"bfloat16": KNOWN, "float16": KNOWN},
    "flash": {"bfloat16": "", "float16": (*KNOWN, "window(w)", "same(t)", "softcap(c)", "alibi")},
}  # fmt: skip
DRY_ENGINES = {
    "sdpa": {"float32": KNOWN},
    "cudnn": {"float16": KNOWN},
    "flash": {"float16": ""},
}  # those that are there


def entries(scale: Scale) -> dict[str, tuple[str, cases.Case]]:
    """Signature -> "mask" or "score", and the case; a dry run has a few."""
    n = scale.lengths[0] if scale.dry else TOKENS
    found = {
        **{s: ("mask", c) for s, c in cases.masks(n).items()},
        **{s: ("score", c) for s, c in cases.mods(n).items()},
    }
    return {s: found[s] for s in (DRY if scale.dry else found)}


def rows(scale: Scale) -> list[str]:
    """Engines of torch, of masks they know: once their lse is compared too, they take part in the choice of calls. Then
    Triton's kernels and Gluon's, in one dtype after the other; then FlashAttention 4. JAX's splash attention is for
    TPUs alone."""
    there = fk.backends()
    kernels = [(backend, dtype) for dtype in DTYPES for backend in ("triton", "gluon")]
    if scale.dry:
        kernels = [("triton", "float32"), *[("gluon", "float16")] * (not there["gluon"])]
    engines = {n: x for n, x in DRY_ENGINES.items() if not there[n]} if scale.dry else ENGINES
    own = [f"{backend}, {name}, {dtype}" for backend, dtype in kernels for name in entries(scale)]
    theirs = [
        f"{engine}, {name}, {dtype}{more}" for engine, dtypes in engines.items() for dtype, known in dtypes.items()
        for name in entries(scale) if not known or name in known for more in ("", SHARED) if not more or name in KNOWN
    ]  # fmt: skip
    theirs += [
        f"{engine}, {name}, bfloat16{SHARED}, D {dim}" for engine, dims in WIDE.items() if engine in engines
        for dim in dims for name in entries(scale) if name in KNOWN and not scale.dry
    ]  # fmt: skip
    return sorted([*theirs, *own], key=lambda row: row.startswith("flash"))


def waits(row: str) -> bool:
    """Whether other rows run first: what runs this one is not installed here."""
    return torch.cuda.is_available() and bool(fk.backends()[row.partition(",")[0]])


def whole(row: Row) -> bool:
    """Whether a row has all that is asked today: the first results of an H100 have no lse."""
    return all("lse" in x["figures"]["error"] for name, x in row["rows"].items() if name != "count")


def right(row: str, scale: Scale) -> Measure:
    """Errors of one mask or score mod by head size, as parts of the largest number: of out, lse and gradients."""
    parsed = ROW.fullmatch(row)
    assert parsed is not None, row
    backend, name, dtype, shared, dim = parsed.groups()
    kind, case = entries(scale)[name]
    dims = (int(dim),) if dim else scale.dims
    found = {dim: errors(backend, kind, case, dim, dtype, scale, bool(shared)) for dim in dims}

    def measure() -> Iterator[Row]:
        bad = {
            f"D {dim}, {what}": f"{error:.3g}" for dim, each in found.items() for what, error in each.items()
            if not error <= BOUNDS[dtype]
        }  # fmt: skip
        sizes = {str(dim): {"figures": {"error": each}} for dim, each in found.items()}
        count = {"passed": sum(map(len, found.values())) - len(bad), "failed": len(bad)}
        yield {"rows": {**sizes, "count": {"figures": {"cases": count}, "notes": bad}}}

    return measure


def errors(
    backend: str, kind: str, case: cases.Case, dim: int, dtype: str, scale: Scale, shared: bool = False
) -> dict[str, float]:  # fmt: skip
    """{"out": error, "lse": error, "dq": error, ...}, for engines "dq, generated" and so on, too; for Gluon's kernels
    "dq, any order" and so on, of the fused backward without an order."""
    torch.manual_seed(0)
    # two key heads where heads share them, so that which one a query head reads matters
    heads, lengths = max(4 if shared else 2, case.heads), (case.q_len, case.kv_len, case.kv_len)
    made = [torch.randn(case.batch, heads, n, dim).to(getattr(torch, dtype)) for n in lengths]
    if shared:
        kept = zip((heads, heads // 2, heads // 2), made, strict=True)
        made = [x.transpose(1, 2).contiguous().transpose(1, 2)[:, :n] for n, x in kept]
    cotangent = torch.randn_like(made[0])
    known = [x.double().requires_grad_() for x in made]
    own = [x.to(scale.device).requires_grad_() for x in made]
    got, want = ({}, {})
    for found, name, arrays in ((want, "aten", known), (got, backend, own)):
        out, lse = attention(kind, case, name)(*arrays, return_lse=True)
        found |= {"out": out.detach(), "lse": lse.detach()}
        grads = torch.autograd.grad(out, arrays, cotangent.to(out))
        found.update(zip(("dq", "dk", "dv"), grads, strict=True))
        # of an engine also those of generated kernels, from its out and lse
        more = "generated" if name in ENGINES else "any order" if name == "gluon" else ""
        if more:
            out = attention(kind, case, name, deterministic=name in ENGINES)(*arrays)
            grads = torch.autograd.grad(out, arrays, cotangent.to(out))
            found.update(zip((f"{n}, {more}" for n in ("dq", "dk", "dv")), grads, strict=True))
    want["out"] = attention(kind, case, "dense")(*[x.detach() for x in known])  # by another program than the gradients
    return {n: error(x.double().cpu(), want[n.partition(", ")[0]]) for n, x in got.items()}


def attention(kind: str, case: cases.Case, backend: str, deterministic: bool | None = None) -> fk.Attention:
    """An engine's own gradients are asked for, unless they are to have an order: those of most have none."""
    if deterministic is None:
        deterministic = backend not in ENGINES
    return fk.compile(**{kind: case.text}, backend=backend, deterministic=deterministic, **case.params)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference as a part of the largest number; infinite where NaN or infinity is in one alone."""
    if not torch.isfinite(got).equal(torch.isfinite(want)):
        return float("inf")
    got, want = got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-3))
