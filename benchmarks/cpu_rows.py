"""Native kernels beside SDPA and ONNX Runtime in more rows: `python benchmarks/cpu_rows.py`, or a part of it.

"halves": bfloat16 and float16. "prefill": 512 queries behind 8,192 keys; SDPA has a dense mask, flex_attention one of
blocks, and no backward. "short": one to 256 tokens. "onnx": float32 beside ONNX Runtime's operator Attention; this part
needs `pip install onnx onnxruntime`. "invariant": calls with one order of sums, and how many times as long as the usual
ones they take; 8 heads of 64, 8 or 2 key heads. Two heads of 64, four in "short"; no mask or a causal one. The calls
of a row run turn about on one thread, whose own time is taken; a figure is the median over rounds of peer / native,
with the 95 % interval of that median.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from cpu_dims import LEAST, gradients
from store import run_parts
from torch.nn.functional import scaled_dot_product_attention as sdpa

import frisket as fk
from frisket.runtime.bench.race import median_ratio, processor_seconds, rounds_of

LENGTH, CHUNK, DIM, HEADS = 4096, 512, 64, 2
SHORT = {1: 0.7, 16: 0.7, 48: 1.0, 64: 1.0, 128: LEAST, 256: LEAST}  # what a forward is to reach
MOST = 1.15  # times as long as the usual call an invariant one may take
CLOSE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
Rows = Iterator[tuple[str, dict[str, Any]]]


def drawn(q_len: int, kv_len: int, dtype: Any, learns: bool, heads: int = HEADS) -> tuple[Any, ...]:
    torch.manual_seed(0)
    shapes = [(1, heads, n, DIM) for n in (q_len, kv_len, kv_len)]
    return tuple(torch.randn(s).to(dtype).requires_grad_(learns) for s in shapes)


def compared(calls: dict[str, Any], arrays: Any, rounds: int, least: float | None, each: int = 1) -> dict[str, Any]:
    """The row of calls of these arrays, with gradients where those require them; `each` calls are timed together."""
    want = calls["native"](*arrays)
    for call in calls.values():
        close = CLOSE[want.dtype]
        torch.testing.assert_close(torch.as_tensor(call(*arrays)).to(want), want, rtol=10 * close, atol=close)
    if arrays[0].requires_grad:
        cotangent = torch.randn(want.shape).to(want.dtype)
        some = {n: partial(gradients, partial(call, *arrays), arrays, cotangent) for n, call in calls.items()}
    else:
        some = {n: partial(call, *arrays) for n, call in calls.items()}

    def repeated(call: Any) -> None:
        for _ in range(each):
            call()

    times = rounds_of({n: partial(repeated, call) for n, call in some.items()}, rounds, clock=processor_seconds)
    found = {n: median_ratio(t, times["native"]) for n, t in times.items() if n != "native"}
    goals = {} if least is None else {"at least": {"ratios": {f"{n} / native": least for n in found}}}
    return {
        "figures": {"ms": {n: 1e3 * statistics.median(t) / each for n, t in times.items()}},
        "ratios": {f"{n} / native": ratio for n, ratio in found.items()},
        "goals": goals,
    }


def directions(name: str) -> Iterator[tuple[str, bool]]:
    yield f"{name}, forward", False
    yield f"{name}, forward and backward", True


def halves(rounds: int) -> Rows:
    for dtype in (torch.bfloat16, torch.float16):
        for mask in ("True", "causal"):
            calls = {"native": fk.compile(mask, backend="native"), "SDPA": partial(sdpa, is_causal=mask == "causal")}
            title = f"{'no mask' if mask == 'True' else mask}, {str(dtype).removeprefix('torch.')}"
            for name, learns in directions(title):
                yield name, compared(calls, drawn(LENGTH, LENGTH, dtype, learns), rounds, LEAST)


def prefill(rounds: int) -> Rows:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    before = 2 * LENGTH
    seen = torch.ones(CHUNK, before + CHUNK, dtype=torch.bool).tril(before)
    blocks = create_block_mask(lambda b, h, q, k: q + before >= k, None, None, CHUNK, before + CHUNK, device="cpu")
    calls = {
        "native": partial(fk.compile("causal", backend="native"), origin=(0, 0, before, 0)),
        "SDPA": partial(sdpa, attn_mask=seen),
    }
    for name, learns in directions("512 queries behind 8,192 keys"):
        flex = {} if learns else {"flex": partial(torch.compile(flex_attention, dynamic=False), block_mask=blocks)}
        arrays = drawn(CHUNK, before + CHUNK, torch.float32, learns)
        yield name, compared({**calls, **flex}, arrays, rounds, LEAST)


def short(rounds: int) -> Rows:
    calls = {"native": fk.compile("causal", backend="native", engines=False), "SDPA": partial(sdpa, is_causal=True)}
    for length, least in SHORT.items():
        for name, learns in directions(f"causal, {length} x {DIM}"):
            goal = least if not learns or length >= 128 else None
            yield name, compared(calls, drawn(length, length, torch.float32, learns, 4), rounds, goal, each=20)


def invariant(rounds: int) -> Rows:
    att, usual = (fk.compile("causal", backend="native", engines=False, invariant=x) for x in (True, False))
    for dtype in (torch.float32, torch.bfloat16):
        for kv_heads in (8, 2):
            for q_len, kv_len in ((2048, 2048), (1, 512), (1, 4096), (1, 16384)):
                torch.manual_seed(0)
                shapes = (8, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
                arrays = tuple(torch.randn(1, h, n, DIM).to(dtype) for h, n in shapes)
                origin = 0, 0, kv_len - q_len, 0
                calls = {"native": partial(usual, origin=origin), "invariant": partial(att, origin=origin)}
                name = f"{str(dtype).removeprefix('torch.')}, {kv_heads} key heads, {q_len} queries, {kv_len} keys"
                row = compared(calls, arrays, rounds, None, each=1 if q_len > 1 else 20)
                yield name, {**row, "goals": {"at most": {"ratios": {"invariant / native": MOST}}}}


def onnx(rounds: int) -> Rows:
    import onnxruntime
    from onnx import TensorProto, helper

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    shape = [1, HEADS, LENGTH, DIM]
    for mask in ("True", "causal"):
        node = helper.make_node("Attention", ["q", "k", "v"], ["out"], is_causal=int(mask == "causal"))
        inputs, output = ([helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in x]
                          for x in ("qkv", ["out"]))  # fmt: skip
        graph = helper.make_graph([node], "attention", inputs, output)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

        def run(q: Any, k: Any, v: Any, session: Any = session) -> Any:
            return session.run(None, {"q": q.numpy(), "k": k.numpy(), "v": v.numpy()})[0]

        calls = {"native": fk.compile(mask, backend="native"), "ONNX Runtime": run}
        name = f"{'no mask' if mask == 'True' else mask}, {LENGTH} x {DIM}, forward"
        yield name, compared(calls, drawn(LENGTH, LENGTH, torch.float32, False), rounds, LEAST)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = {"halves": halves, "prefill": prefill, "short": short, "onnx": onnx, "invariant": invariant}
    heads = {"short": 4, "invariant": 8}
    run_parts(__doc__, parts, "cpu-rows", lambda part: {"threads": 1, "heads": heads.get(part, HEADS)})
