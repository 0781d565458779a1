"""The parts of gpu.py that run more than one call: tokens in another order, CUDA graphs, training steps of a small
model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gpu_masks import DOCUMENTS, contests, ours
from gpu_scale import Call, Entrants, Measure, Row, Scale, Times, drawn, one_after_another, waited, watched
from reorder_tables import tables
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import frisket as fk
from frisket.runtime.bench import race

PACKED = f"{DOCUMENTS} documents"


def documents(length: int, scale: Scale, seed: int) -> torch.Tensor:
    """The document of each of a batch's tokens, packed one after another."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, DOCUMENTS, (length,), generator=draw).sort().values
    return ids.to(scale.device, torch.int32)


def packed(length: int, heads: int, scale: Scale) -> fk.Attention:
    """Attention within documents whose table is an argument of each call."""
    return ours(replace(contests(length, heads, scale.device)[PACKED], params={}))


# -- orders -----------------------------------------------------------------------------------------------

ORDERS = {  # mask and tokens, and those of a dry run
    "13 x 13 in 256 x 256": (("natten2d(256, 256, 13, 13)", 65536), ("natten2d(8, 12, 3, 3)", 96)),
    "dilated window": (("causal & dilated(1024, 4)", 16384), ("causal & dilated(16, 4)", 96)),
    "64 documents, shuffled": (("causal & same(doc)", 16384), ("causal & same(doc)", 96)),
}


def order_rows(scale: Scale) -> list[str]:
    return [*ORDERS]


def order(row: str, scale: Scale) -> Measure:
    """A mask with its tokens in the order that frisket finds and as they come: forward and gradients. Moving q, k, v
    and the result is part of a call."""
    mask, length = ORDERS[row][scale.dry]
    dim, params = scale.dims[-1], tables(mask, length)
    heads = 1 if scale.dry else scale.width // dim
    tile: dict[str, Any] = {"block": (16, 16), "moving": 0} if scale.dry else {}
    ordered = fk.reorder(mask, length, **tile, **params)
    options: dict[str, Any] = {"backend": "triton" if scale.dry else None, "engines": False, **params}
    ways = {"order": fk.compile(mask, reorder=ordered, **options), "as they come": fk.compile(mask, **options)}
    measures: dict[str, Measure] = {}
    for learns, direction in enumerate(("forward", "backward")):
        arrays = [x.requires_grad_(bool(learns)) for x in drawn(1, heads, length, length, dim, scale)]
        entrants = Entrants(scale)
        for name, att in ways.items():
            entrants.enter(name, partial(call_of, att, arrays, bool(learns)))
        measures[direction] = partial(watched, entrants.calls, scale, partial(of_orders, order=ordered), entrants.notes)
    return lambda: one_after_another(measures, scale)


def call_of(att: fk.Attention, arrays: list[torch.Tensor], learns: bool) -> Call:
    """The forward, or the gradients alone."""
    if not learns:
        return partial(att, *arrays)
    out = att(*arrays)
    return partial(torch.autograd.grad, out, arrays, torch.ones_like(out), retain_graph=True)


def of_orders(times: Times, order: fk.Order) -> Row:
    row = race.row(times, ["order"])
    row["figures"]["tiles"] = {"before": order.before.visited, "after": order.after.visited}
    return row


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder as Llama's, without rotary embeddings."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    tokens: int  # of a batch, packed into one sequence


MODEL, DRY_MODEL = Model(4, 2048, 32, 8, 5632, 32000, 8192), Model(1, 32, 2, 1, 64, 64, 48)


# -- CUDA graphs ------------------------------------------------------------------------------------------


REDUCED = "torch.compile, reduce-overhead"


def graph_rows(scale: Scale) -> list[str]:
    return ["forward", "forward and backward", REDUCED]


def graph(row: str, scale: Scale) -> Measure:
    """A plan of documents and its call, by Python and by the replay of a CUDA graph. Documents and arrays have changed
    since it was captured. Times are those of the host and the device together."""
    if row == REDUCED:
        return reduced(scale)
    measures: dict[str, Measure] = {}
    for length in scale.grouped_lengths if scale.dry else (512, *scale.grouped_lengths):
        step = PackedStep(length, row != "forward", scale)
        replay = captured(step)
        step.change()
        entrants = Entrants(scale)
        entrants.enter("eager", lambda step=step: step)
        entrants.enter("replay", lambda replay=replay: replay)
        of_graph = partial(race.row, ours=["replay"])
        measures[str(length)] = partial(watched, entrants.calls, scale, of_graph, entrants.notes, waited)
    return lambda: one_after_another(measures, scale)


class PackedStep:
    """The plan of a batch of packed documents and its call, with gradients or without."""

    def __init__(self, length: int, learns: bool, scale: Scale) -> None:
        dim = scale.dims[0]
        self.length, self.heads, self.learns, self.scale = length, scale.width // dim, learns, scale
        self.arrays = [x.requires_grad_(learns) for x in drawn(1, self.heads, length, length, dim, scale)]
        self.doc, self.attention = documents(length, scale, 0), packed(length, self.heads, scale)

    def change(self) -> None:
        """Other documents and numbers, in the same memory."""
        self.doc.copy_(documents(self.length, self.scale, 1))
        with torch.no_grad():
            for x in self.arrays:
                x.copy_(torch.randn_like(x))

    def __call__(self) -> tuple[torch.Tensor, ...]:
        plan = self.attention.plan(self.length, self.length, 1, self.heads, doc=self.doc)
        out = self.attention(*self.arrays, plan=plan)
        return (out, *torch.autograd.grad(out, self.arrays, torch.ones_like(out))) if self.learns else (out,)


def captured(step: Call) -> Call:
    """The step as a replay of its CUDA graph; without a GPU the step itself."""
    if not torch.cuda.is_available():
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles, and copies to the GPU what no graph can capture
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        results = step()

    def replay() -> Any:
        recorded.replay()
        return results

    return replay


SMALL = (Model(4, 512, 8, 2, 1408, 1024, 512), Model(4, 1024, 16, 4, 2816, 1024, 2048))


def reduced(scale: Scale) -> Measure:
    """The loss of a small decoder on packed documents, without gradients: eager, compiled, and compiled into CUDA
    graphs that hold attention. Documents change before the last call, whose losses are compared."""
    measures: dict[str, Measure] = {}
    for of in (DRY_MODEL,) if scale.dry else SMALL:
        doc, attention = documents(of.tokens, scale, 0), packed(of.tokens, of.heads, scale)
        tokens = torch.randint(0, of.vocabulary, (1, of.tokens), generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        decoder, tokens = Decoder(of).to(scale.device, scale.dtype), tokens.to(scale.device)

        def attend(q: Any, k: Any, v: Any, doc: Any, attention: fk.Attention = attention) -> torch.Tensor:
            return attention(q, k, v, doc=doc)

        def build(mode: str | None, decoder: Any = decoder, tokens: Any = tokens, doc: Any = doc) -> Call:
            run = decoder
            if mode is not None:
                how = {"backend": "eager"} if scale.dry else {"mode": mode}
                run = torch.compile(decoder, fullgraph=True, **how)

            def call() -> torch.Tensor:
                with torch.no_grad():
                    return run(tokens, attend, doc).clone()  # the next replay writes over the result

            doc.copy_(documents(len(doc), scale, 0))
            for _ in range(3):  # torch warms up, records, replays
                call()
            doc.copy_(documents(len(doc), scale, 1))
            return call

        entrants = Entrants(scale)
        for name, mode in {"eager": None, "compiled": "default", "reduce-overhead": "reduce-overhead"}.items():
            entrants.enter(name, partial(build, mode))
        of_graphs = partial(race.row, ours=["reduce-overhead"])
        measures[str(of.tokens)] = partial(watched, entrants.calls, scale, of_graphs, entrants.notes, waited)
    return lambda: one_after_another(measures, scale)


# -- training steps ---------------------------------------------------------------------------------------


CLOSE = 0.25  # the norm of the difference of two gradients as a part of the norm of one; of other masks it is above 1
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


class Layer(torch.nn.Module):
    def __init__(self, of: Model) -> None:
        super().__init__()
        linear, self.dim = partial(torch.nn.Linear, bias=False), of.width // of.heads
        self.q, self.out = linear(of.width, of.width), linear(of.width, of.width)
        self.k, self.v = (linear(of.width, of.kv_heads * self.dim) for _ in "kv")
        self.gate, self.up, self.down = (
            linear(of.width, of.inner),
            linear(of.width, of.inner),
            linear(of.inner, of.width),
        )
        self.before, self.between = torch.nn.RMSNorm(of.width), torch.nn.RMSNorm(of.width)

    def forward(self, x: torch.Tensor, attend: Attend, mask: Any) -> torch.Tensor:
        normal = self.before(x)
        q, k, v = (f(normal).unflatten(2, (-1, self.dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(attend(q, k, v, mask).transpose(1, 2).flatten(2))
        normal = self.between(x)
        return x + self.down(functional.silu(self.gate(normal)) * self.up(normal))


class Decoder(torch.nn.Module):
    def __init__(self, of: Model) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(of.vocabulary, of.width)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = torch.nn.ModuleList(Layer(of) for _ in range(of.layers))
        self.last = torch.nn.RMSNorm(of.width)

    def forward(self, tokens: torch.Tensor, attend: Attend, mask: Any) -> torch.Tensor:
        """The loss of the next tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, attend, mask)
        logits = functional.linear(self.last(x[:, :-1]), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def step_rows(scale: Scale) -> list[str]:
    return ["eager", "torch.compile of each layer"]


def step(row: str, scale: Scale) -> Measure:
    """Forward, backward and AdamW of a decoder on packed documents, the plan or block mask of the step included. The
    contestants begin with the same numbers; the gradient of one weight in the first step is compared."""
    of, compiled = DRY_MODEL if scale.dry else MODEL, row != "eager"
    doc = documents(of.tokens, scale, 0)
    tokens = torch.randint(0, of.vocabulary, (1, of.tokens), generator=torch.Generator().manual_seed(0))
    entrants, differences = Entrants(scale), dict[str, float]()
    for name, (mask, attend) in ways(of, scale, compiled).items():

        def build(mask: Any = mask, attend: Attend = attend) -> Call:
            return training(of, scale, compiled, tokens.to(scale.device), doc, mask, attend)

        def agrees(gradient: torch.Tensor, first: torch.Tensor, name: str = name) -> None:
            difference = float((gradient.float() - first.float()).norm() / first.float().norm())
            differences[name] = difference
            if not difference <= CLOSE and name != NO_DOCUMENTS:
                raise AssertionError(f"{name}: a gradient differs by {difference:.3g} of its norm")

        entrants.enter(name, build, agrees)

    def of_steps(times: Times) -> Row:
        result = race.row(times)
        result["ratios"] = {pair: x for pair, x in result["ratios"].items() if not pair.startswith(NO_DOCUMENTS)}
        result["figures"]["tokens/s"] = {n: 1e3 * of.tokens / ms for n, ms in result["figures"]["ms"].items()}
        return {**result, "figures": {**result["figures"], "difference of a gradient": differences}}

    return lambda: watched(entrants.calls, scale, of_steps, entrants.notes, waited)


NO_DOCUMENTS = "SDPA causal, no documents"  # another function, for its time


def ways(of: Model, scale: Scale, compiled: bool) -> dict[str, tuple[Callable[[torch.Tensor], Any], Attend]]:
    """By contestant: what a step makes of the table of documents, and attention that takes it."""
    n, attention = of.tokens, packed(of.tokens, of.heads, scale)
    flex = flex_attention if compiled or scale.dry else torch.compile(flex_attention, dynamic=False)

    def planned(doc: torch.Tensor) -> Any:
        return doc if compiled else attention.plan(n, n, 1, of.heads, doc=doc)  # graphs of torch.compile take no plan

    def ours_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        return attention(q, k, v, doc=mask) if compiled else attention(q, k, v, plan=mask)

    def blocks(doc: torch.Tensor) -> Any:
        def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) & (doc[q] == doc[k])

        return create_block_mask(visible, None, None, n, n, device=scale.device, _compile=not scale.dry)

    def expanded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        k, v = (x.repeat_interleave(of.heads // of.kv_heads, 1) for x in (k, v))
        return sdpa(q, k, v, attn_mask=mask)

    return {
        "frisket": (planned, ours_of),
        "flex": (blocks, lambda q, k, v, mask: flex(q, k, v, block_mask=mask, enable_gqa=True)),
        "SDPA, dense mask, expanded heads": (lambda doc: (doc[:, None] == doc).tril(), expanded),
        NO_DOCUMENTS: (lambda doc: None, lambda q, k, v, mask: sdpa(q, k, v, is_causal=True, enable_gqa=True)),
    }


def training(
    of: Model, scale: Scale, compiled: bool, tokens: torch.Tensor, doc: torch.Tensor, mask: Any, attend: Attend
) -> Call:  # fmt: skip
    """A step of a new decoder, which returns the gradient of one weight."""
    torch.manual_seed(0)
    decoder = Decoder(of).to(scale.device, scale.dtype)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-4, fused=scale.device == "cuda")
    for layer in decoder.layers if compiled else ():
        layer.compile(fullgraph=True, backend="eager" if scale.dry else "inductor")

    def step() -> torch.Tensor:
        decoder(tokens, attend, mask(doc)).backward()
        gradient = decoder.layers[0].q.weight.grad
        optimizer.step()
        optimizer.zero_grad()
        return gradient

    return step
