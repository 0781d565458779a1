"""Writes what was measured, from benchmarks/results: `python docs/performance.py`.

docs/performance.md is the summary: headline results (`HEADLINES`), then every comparison that frisket loses, collected
by one rule. The pages of `PAGES` have the tables: those for users are in docs/performance, with charts, those for
contributors in benchmarks. A section says its machine in its first line, or in its headings where machines differ.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from frisket.runtime.bench import schema

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = ROOT / "benchmarks" / "results"
OURS = ("native", "library", "frisket", "pallas-mosaic-gpu", "triton", "graph")
# the machine's rates, and frisket itself
NOT_PEERS = ("read", "sum", "float32", "4k", "64k", "graph, looked up", "invariant")
BY_NAME = "frisket, "  # a call of frisket that names its backend
Part = dict[str, Any]

INTRO = """\
# Benchmarks

For readers who want to know where frisket is faster or slower than another library. After this page you can find the
table of your case, and repeat it.

> **Never measured: Blackwell, GPUs of AMD, and TPUs.** The Triton, Gluon and Pallas kernels for them are compiled ahead
> of time and tested in interpreters. Their speed there is not known. `python benchmarks/gpu.py PART` and
> `frisket bench --suite gpu` measure it on your device.

## Headline results

Speed-up: the peer's time / frisket's time. Above 1 frisket is faster. Brackets hold the 95 %
interval of the median of one row; a range goes from the slowest row to the fastest. **Slower** is a loss beyond the
interval. The H100 runs the kernel that a call takes without `backend=`. CPUs run frisket's C++ kernels (AVX-512 unless
a row says AVX2).
"""
SLOWER = """\
## What is slower

Every measured row in which a peer is faster than frisket by more than the interval, counted by table. A ratio is the
peer's time / frisket's time.
"""
METHOD = """\
## How it was measured

Everything except what the H100 ran was measured by the programs in `benchmarks/`. Machines: {machine}.
`python docs/performance.py` writes these pages from their results.

A ratio is *time of the first / time of the second*. `flex / native` is the speed-up of frisket's native kernel over
flex_attention: above 1 frisket is faster.
All libraries of a row run in one process on the same arrays, in an order that changes from round to round. Their
results are compared first. Figures are medians over rounds. `native` is the generated C++ kernel, which runs where a
C++ compiler is installed unless you choose `library`; `library` is the same plan as calls of torch or JAX. Other work
ran on the machine during some measurements: ratios stay comparable, milliseconds less so.

`frisket bench` makes such a table for any mask on your machine; `--chart bench.png` draws it:

```console
$ frisket bench 'causal & window(64)' --q-len 256 --rounds 3 --framework torch --peers sdpa
causal & window(64), torch
...
  SDPA with a mask ...
  SDPA is_causal ... it takes plain causal masks alone, of as many queries as keys
...
```

## All tables
"""
GOALS = """\
Every measured row that misses a goal of the design, counted by table.
"""
ROWS = """\
## All rows

The rows above, and those in which a peer is faster than frisket by more than the interval.
"""
PREDICTED_GOALS = """\
## Predictions that miss a goal

By [the static model of a GPU](#predictions-of-a-model).
"""


class Headline(NamedTuple):
    """A line of the first table: rows of a part, by a regular expression of their names, compared with one peer."""

    words: str
    file: str
    part: str
    rows: str
    pair: str  # of ratios, or of the first figures where the rows have no ratios
    title: str  # of the section with the rows
    dtype: str | None = None  # that of the settings unless given


DIMS, DIMS_ROWS = "Causal and no mask, 4,096 tokens, head sizes 40 to 256, {}", ".* 4096 x .*"
BOTH = "with and without backward"
FORWARD_H100, BACKWARD_H100 = "Forward, torch, on an H100", "Backward, torch, on an H100"
MANY = "Masks and score mods, 2,048 to 32,768 tokens, head sizes 64 to {}, {}"
PLAIN = "Causal and no mask, 2,048 to 32,768 tokens, head sizes 64 to {}, {}"
HEADLINES = (
    Headline(DIMS.format(BOTH), "cpu-dims", "xeon", DIMS_ROWS, "SDPA / native", "float32 on an Intel Xeon"),
    Headline(DIMS.format(BOTH), "cpu-dims", "amx", DIMS_ROWS, "SDPA / native", "bfloat16 on an Intel Xeon"),
    Headline(DIMS.format(BOTH) + ", AVX2", "cpu-dims", "avx2", DIMS_ROWS, "SDPA / native",
             "float32 with AVX2 on an AMD EPYC"),
    Headline(f"Causal and no mask, 4,096 tokens, head size 64, {BOTH}", "cpu-rows", "halves", ".*bfloat16.*",
             "SDPA / native", "bfloat16 and float16, 4,096 tokens, on an AMD EPYC", "bfloat16"),
    Headline(f"Causal, 1 to 64 tokens, head size 64, {BOTH}", "cpu-rows", "short", "causal, (1|16|48|64) x .*",
             "SDPA / native", "Few tokens, float32, on an Intel Xeon", "float32"),
    Headline("Masks and score mods, 4,096 tokens, forward", "cpu-torch", "forward", ".*", "flex / native",
             "Forward, torch"),
    Headline("Causal within 16 documents, 4,096 tokens, forward", "cpu-torch", "forward", ".*16 documents",
             "flex / native", "Forward, torch"),
    Headline("One query over 32,768 keys", "cpu-torch", "decode", "native", "SDPA / native",
             "One query over 32,768 keys, torch"),
    Headline("Call overhead on tiny inputs", "cpu-torch", "overhead", "native", "SDPA / native",
             "Call overhead on tiny inputs, torch"),
    Headline("Planning a window or documents, 4,096 and 8,192 tokens", "layout", "peers", ".*",
             "create_block_mask / frisket", "Compared with libraries that look at every pair", "one core"),
    Headline(MANY.format(256, "forward"), "gpu", "speed", "forward: .*", "flex / frisket", FORWARD_H100),
    Headline(MANY.format(128, "backward"), "gpu", "speed", "backward: .*", "flex / frisket", BACKWARD_H100),
    Headline("Documents, head sizes 64 to 256, forward", "gpu", "speed", "forward: .*documents.*", "flex / frisket",
             FORWARD_H100),
    Headline("Documents, head sizes 64 and 128, backward", "gpu", "speed", "backward: .*documents.*", "flex / frisket",
             BACKWARD_H100),
    Headline(PLAIN.format(256, "forward"), "gpu", "speed", "forward: (causal|full), .*", "SDPA cudnn / frisket",
             FORWARD_H100),
    Headline(PLAIN.format(128, "backward"), "gpu", "speed", "backward: (causal|full), .*", "SDPA cudnn / frisket",
             BACKWARD_H100),
    Headline("One query over 32,768 keys, batch 1 to 32", "gpu", "speed", "decode: causal.*", "flex / frisket",
             "One query over 32,768 keys on an H100"),
    Headline("One query over 32,768 keys, batch 1 to 32", "gpu", "speed", "decode: causal.*", "SDPA / frisket",
             "One query over 32,768 keys on an H100"),
    Headline("Planning documents, 131,072 tokens, tables on the device", "gpu", "layout", ".*",
             "create_block_mask / frisket", "Planning, on an H100", ""),
)  # fmt: skip
PEERS = {"flex": "compiled flex_attention", "SDPA cudnn": "SDPA with cuDNN", "create_block_mask": "`create_block_mask`"}
SIZES_CPU, SIZES_H100 = (40, 64, 80, 128, 256), (64, 128, 192, 256)


# paths of pages
SUMMARY = "docs/performance.md"
H100 = "docs/performance/h100.md"
H100_SERVING = "docs/performance/h100-serving.md"
CPU = "docs/performance/cpu.md"
SIZES = "docs/performance/cpu-sizes.md"
DECODING = "docs/performance/cpu-decoding.md"
LAYOUTS = "docs/performance/layouts.md"
OVERHEAD = "docs/performance/overhead.md"
CHECKED = "benchmarks/h100.md"
PREDICTIONS = "benchmarks/predictions.md"
BUNDLES = "benchmarks/tpu.md"
GOALS_PAGE = "benchmarks/goals.md"
PAGES = {  # title, and who it is for
    H100: ("Attention on an H100", "For readers who train with torch on an H100"),
    H100_SERVING: (
        "Decoding, JAX and planning on an H100", "For readers who serve a model on an H100, or call it from JAX",
    ),
    CPU: ("Attention on CPUs", "For readers who run torch or JAX on a CPU"),
    SIZES: (
        "Head sizes and dtypes on CPUs", "For readers whose heads are not of 64 numbers in float32",
    ),
    DECODING: ("Decoding on CPUs", "For readers who decode from a KV cache on a CPU"),
    LAYOUTS: (
        "Layouts, answers and exports", "For readers who plan masks of many tokens, or ask questions about them",
    ),
    OVERHEAD: ("Overhead of a call", "For readers of short sequences, or of many different calls"),
    CHECKED: ("What an H100 checked", "For contributors to the kernels"),
    PREDICTIONS: (
        "Predictions of a model", "For contributors who work on kernels or tiles for an H100",
    ),
    BUNDLES: ("Bundles of TPU kernels", "For contributors to the kernels for TPUs"),
    GOALS_PAGE: ("Targets and earlier commits", "For contributors"),
}  # fmt: skip


class Topic(NamedTuple):
    """A section: one file of results, and what is shown of its parts."""

    file: str
    page: str  # of PAGES
    title: str
    text: str
    command: str
    show: Callable[[dict[str, Part]], Iterator[str]]
    parts: tuple[str, ...] = ()  # shown, where another section shows the rest of the file


# -- tables -----------------------------------------------------------------------------------------------


def table(head: list[str], body: list[list[str]], words: int = 1) -> Iterator[str]:
    """A table in Markdown; the first `words` columns are aligned left."""
    yield "| " + " | ".join(x.replace(" beside ", " with ") for x in head) + " |"
    yield "|---" * words + "|---:" * (len(head) - words) + "|"
    for line in body:
        yield "| " + " | ".join(x.replace("|", "\\|") for x in line) + " |"
    yield ""


def number(x: float) -> str:
    if isinstance(x, int) or x == int(x):
        return f"{int(x):,}"
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def ratio(found: list[float], goal: schema.Goal | None = None) -> str:
    """`ratio([1.98, 1.94, 2.24])` is "1.98 (1.94 to 2.24)"; one digit more where it would read as its missed goal."""
    digits = 0 if found[0] >= 100 else 1 if found[0] >= 10 else 2
    digits += goal is not None and f"{found[0]:.{digits}f}" == f"{goal.bound:.{digits}f}"
    said = [f"{x:,.{digits}f}" for x in found]
    return said[0] + (f" ({said[1]} to {said[2]})" if len(said) == 3 else "")


def is_contest(pair: str) -> bool:
    """Whether a ratio is the speed-up of frisket over a peer."""
    peer, ours = pair.split(" / ")
    return ours in OURS and peer not in (*OURS, *NOT_PEERS) and not peer.startswith(BY_NAME)


def ratio_heading(pair: str) -> str:
    peer, ours = pair.split(" / ")
    return f"speed-up of {ours} over {peer}" if is_contest(pair) else f"{peer} as a multiple of {ours}"


def slower(pair: str, found: list[float]) -> bool:
    """Whether a peer was faster than ours, beyond the interval."""
    return is_contest(pair) and found[-1] < 1


def missed(row: dict[str, Any]) -> dict[tuple[str, str], schema.Goal]:
    return {(g.quantity, g.name): g for g in schema.goals(row) if not g.met}


def wanted(goal: schema.Goal) -> str:
    """A goal in words, to three digits."""
    return f"{goal.side} {float(f'{goal.bound:.3g}'):g}"


def marked(row: dict[str, Any], pair: str) -> str:
    """A ratio, and whether the peer is faster."""
    found = row["ratios"][pair]
    return ratio(found) + (" **slower**" if slower(pair, found) else "")


def named(names: tuple[str, ...]) -> str:
    """A row's name; masks as code."""
    return ", ".join(f"`{n}`" if any(c in n for c in "&|(=") or n in ("causal",) else n for n in names)


def contests(parts: dict[str, Part], part: str) -> Iterator[str]:
    """A line for each peer: its time, ours, the ratios."""
    rows = list(schema.leaves(parts[part]["rows"]))
    tiers = [t for t in OURS if any(t in row["figures"]["ms"] for _, row in rows)]
    body = []
    for names, row in rows:
        ms = row["figures"]["ms"]
        peers = dict.fromkeys(p.split(" / ")[0] for p in row["ratios"])
        for peer in peers:
            pairs = [f"{peer} / {t}" for t in tiers]
            cells = [marked(row, p) if p in row["ratios"] else "" for p in pairs]
            times = [number(ms[t]) if t in ms else "" for t in tiers]
            body.append([named(names), peer, number(ms[peer]), *times, *cells])
    head = ["", "peer", "peer, ms", *(f"{t}, ms" for t in tiers), *(f"speed-up of {t}" for t in tiers)]
    yield from table(head, body)


def figures(parts: dict[str, Part], part: str, quantity: str) -> Iterator[str]:
    """A line for each row, a column for each figure of one quantity, then the ratios."""
    rows = [(n, r) for n, r in schema.leaves(parts[part]["rows"]) if quantity in r.get("figures", {})]
    columns = list(dict.fromkeys(c for _, r in rows for c in r["figures"][quantity]))
    first = any(quantity == next(iter(r["figures"])) for _, r in rows)  # ratios are of what comes first
    pairs = list(dict.fromkeys(p for _, r in rows for p in r.get("ratios", {}) if first))
    body = []
    for names, row in rows:
        own = row["figures"][quantity]
        cells = [number(own[c]) if c in own else "" for c in columns]
        cells += [marked(row, p) if p in row.get("ratios", {}) else "" for p in pairs]
        body.append([named(names), *cells])
    yield from table([quantity, *columns, *map(ratio_heading, pairs)], body)


def picture(file: str, part: str, title: str) -> Iterator[str]:
    yield f"![{title}: time of peers and of frisket](performance/{file}-{part.replace(' ', '-')}.svg)\n"


# -- the first screen -------------------------------------------------------------------------------------


def multiples(parts: dict[str, Part], part: str, rows: str, pair: str) -> list[list[float]]:
    """The ratios of a pair in the rows whose names match; without ratios, those of the first figures."""
    peer, ours = pair.split(" / ")
    found = []
    for names, row in schema.leaves(parts[part]["rows"]):
        times = next(iter(row.get("figures", {}).values()), {})
        if not re.fullmatch(rows, ", ".join(names)):
            continue
        if pair in row.get("ratios", {}):
            found.append(row["ratios"][pair])
        elif not row.get("ratios") and {peer, ours} <= set(times):
            found.append([times[peer] / times[ours]])
    return found


def spread(pair: str, found: list[list[float]]) -> str:
    """One ratio with its interval, or the smallest and the largest of many; and how many are losses."""
    lost = sum(slower(pair, x) for x in found if len(x) == 3)  # a lone median has no interval
    if len(found) == 1:
        return ratio(found[0]) + (" **slower**" if lost else "")
    middles = [x[0] for x in found]
    text = f"{ratio([min(middles)])} to {ratio([max(middles)])}"
    return text + (f" **slower in {lost} of {len(found)} rows**" if lost else "")


def device(part: Part) -> str:
    """The GPU of a part, or its CPU and how many threads ran."""
    machine, threads = part["machine"], part["settings"].get("threads")
    if "gpu" in machine:
        return re.sub(r"NVIDIA | \d+GB.*", "", machine["gpu"])
    cpu = machine["cpu"].replace("(R)", "").removesuffix(" Processor")
    return cpu + (f", {threads} thread{'s' if threads > 1 else ''}" if threads else "")


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def headlines(every: dict[str, dict[str, Part]]) -> Iterator[str]:
    gpus: list[list[str]] = []
    cpus: list[list[str]] = []
    for x in HEADLINES:
        part = every[x.file][x.part]
        found = multiples(every[x.file], x.part, x.rows, x.pair)
        peer = x.pair.partition(" / ")[0]
        dtype = part["settings"].get("dtype", "") if x.dtype is None else x.dtype
        on = ", ".join(filter(None, (device(part), dtype)))
        link = f"[{len(found)} row{'s' if len(found) > 1 else ''}](#{anchor(x.title)})"
        of = gpus if x.file == "gpu" else cpus
        of.append([x.words, on, PEERS.get(peer, peer), spread(x.pair, found), link])
    head, cpu, gpu = ["what", "machine", "peer", "speed-up", "rows"], every["cpu-dims"], every["gpu"]
    yield "### On an H100, bfloat16\n"
    yield from table([n for n in head if n != "machine"], [[x, *rest] for x, _, *rest in gpus], words=2)
    yield "Speed-up by head size, causal, 8,192 tokens, H100 (all rows:"
    yield f"[forward](#{anchor(FORWARD_H100)}), [backward](#{anchor(BACKWARD_H100)})):\n"
    peers = ("flex", "SDPA cudnn")
    yield from by_size(gpu, "speed", SIZES_H100, [
        (f"{way}, over {PEERS[peer]}", f"{way}: causal, D {{}}, 8192", f"{peer} / frisket")
        for way in ("forward", "backward") for peer in peers
    ])  # fmt: skip
    yield "### On CPUs\n"
    yield from table(head, cpus, words=3)
    yield f"Speed-up over SDPA by head size, 4,096 tokens, {device(cpu['native'])}, float32"
    yield f"([all rows](#{anchor('float32 on an AMD EPYC')})):\n"
    lines = [(f"{mask}, {way}", f"{mask}, 4096 x {{}}, {way}") for mask in ("causal", "no mask") for way in WAYS]
    yield from by_size(cpu, "native", SIZES_CPU, [(words, rows, "SDPA / native") for words, rows in lines])


WAYS = ("forward", "forward and backward")


def by_size(
    parts: dict[str, Part], part: str, sizes: tuple[int, ...], lines: list[tuple[str, str, str]]
) -> Iterator[str]:
    """A line for each (words, rows, pair), a column for each head size; empty where nothing was measured."""
    body = []
    for words, rows, pair in lines:
        cells = [multiples(parts, part, rows.format(size), pair) for size in sizes]
        body.append([words, *(spread(pair, x) if x else "" for x in cells)])
    yield from table(["head size", *map(str, sizes)], body)


# -- topics -----------------------------------------------------------------------------------------------


def of_cpu(parts: dict[str, Part]) -> Iterator[str]:
    for part, title in (("forward", "Forward"), ("backward", "Forward and backward"), ("bf16", "In bfloat16")):
        yield f"### {title}, torch\n"
        yield from contests(parts, part)
        if part != "bf16":
            yield from picture("cpu-torch", part, f"{title}, torch")
    share = parts["forward"]["rows"]["causal"]["figures"]
    product, of = share["gflops"]["product"], share[SHARE]
    yield f"A matrix product of torch in the same rounds runs at {product:.0f} GFLOP/s; causal runs at "
    yield f"{of['native']:.2f} of that natively, at {of['library']:.2f} by library calls.\n"
    yield "### One query over 32,768 keys, torch\n"
    yield "`read` and `sum` are torch reading as much memory once: the least time to expect.\n"
    yield from figures(parts, "decode", "ms")
    yield "### 65,536 tokens under `causal & window(1024)`, torch\n"
    yield from figures(parts, "long", "ms")
    yield from figures(parts, "long", "MB beyond results")
    yield "### Call overhead on tiny inputs, torch\n"
    yield from figures(parts, "overhead", "us")
    yield "### First calls in a new process, torch\n"
    yield from figures(parts, "first", "ms")


SHARE = "share of the product's rate"
PREDICTED = "gpu-model"  # its figures are no measurements
SERVING = """\
A row says how keys and values are stored, then the queries of a sequence x the number of sequences; a column, the
tokens of each sequence. 64 heads, 8 key heads, head size 128. The share is the time in which the memory, at 90 % of its
data sheet's rate, delivers all visible keys and values, divided by the time of the kernels. Launches, 3 us each, count
in the second table alone. Lengths are on the device: the host knows only the capacity of the cache. flex is
flex_attention's decoding with the tile that torch 2.13 takes by default: 64 keys, one stage and two warps, which spill
13 KB a thread at 16 queries of 8 heads. Its parts are assumed to be combined as fast as ours.
"""
CASCADE = """Sequences share a prefix and have 1,024 more tokens each, in pages of 64: one call for all, and a cascade,
which reads the prefix once. Launches count 3 us each, those of planners in the last table alone.
"""
PREFILL = """\
Parts of prompts behind long caches. Rows are how keys and values are stored, and queries a sequence x sequences;
columns are tokens of each sequence, the queries' among them. 64 heads, 8 key heads, head size 128; one key head is what
one of eight GPUs has. `undivided` is the same tile with a program for every tile of queries of every head. Bytes of HBM
count programs in the order of their launch, side by side, with what was read last in L2: keys and values come more
often than once where programs that share them do not run at the same time. No row is bound by these bytes. For example,
320 queries are 20 tiles of each of 8 key heads: 160 programs of a sequence, and 132 run at the same time. The last 28
start when the first have ended, next to programs of the next sequence. They read the keys and values of their sequence
once more, so with 8 sequences the bytes are 2.12 times the least. At 8k a sequence has 34 MB, which L2 still holds; at
32k it has 134 MB.
"""

SCHEDULES = """\
Time that other schedules would save: 16 heads of 128, the tiles that frisket takes, cycles at the nominal clock. `as
launched` is what launches do, with the table that divides long rows and the kernel that reads it; the other columns
are upper bounds, which leave out the cost of a schedule in the kernel. The time to compare with is that of heads
one after another, the longest rows of each first, as launches have them. `longest of all first` starts the long rows
of all heads before the short ones of any. The model prefers it, but rows of a head that run at a time share keys in
L2: on an H100 documents of 32,768 tokens take twice as long in that order. A persistent grid has as many programs as
fit, and each takes one row after another. `long rows split, at most` divides rows longer than what a place has in the
mean, and combines their parts in a second launch. A packed tile holds the queries of a group of heads, as few queries
have them; dkv walks the heads of a group already.
"""

BESIDE = """\
Rates of Triton's kernels by the model and on an H100 with Triton 3.6: TFLOP/s of visible work at 32,768 tokens
in all, 2,048 columns, by tokens of a sequence. flex_attention is that of torch 2.13 in the model and 2.11 on the
GPU. Short windows are too fast in the model, because no load waits for memory beyond L2. Dense rows are too slow,
because power takes less of the clock. The second table says how alike both order 14 to 18 tiles of a kernel at 8,192
tokens; a ratio is the measured time of the tile that the model puts first, divided by that of the fastest. The
results have steps of serving, too. Causal rows of 2,048 tokens at D 128 were measured with heads one after another; the
model has today's order.

The constants of the model were not refitted, although two of them differ on this GPU. Power takes less of its clock.
Without that part of the model frisket's causal kernels are within 5 % in the mean, but flex_attention's causal forward
is 15 % too fast: the ratio of the two would be further off. And L2 delivered 33 bytes a cycle of an SM, for tiles of
64 x 64 at D 128, where the model has 28.

The model has the forward of documents of 512 tokens, at 32,768 tokens and D 128, at 1.06 (Triton 3.6) and 1.09 (Triton
3.9) of flex_attention's speed. An H100 has Triton's kernels at 1.15, and the forward that calls take at 1.25.
"""

UNITS = """\
The Gluon forward on a B200. A figure is the number of cycles that a tile takes of a unit, in one of the four schedulers
of an SM, for all warps of the scheduler. A tile has 256 queries, or 128 at head size 256. It has 128 keys, or 64 with a
score mod or at head size 256. The figures are counts of compiled instructions at published rates: nothing is simulated.
The largest figure of a row is the least time of a tile. Some exponentials are a polynomial; the row `exp2 on MUFU
alone` has none.

The cycles in turns add what waits for what, without any latency: a softmax for its scores, a product for its weights
and for the products before it. `weights at once` and `no scores ahead` are the kernel without these steps.
"""


def of_model(parts: dict[str, Part]) -> Iterator[str]:
    for part, title in (
        ("figures", "Our kernels and flex_attention's"),
        ("mosaic", "Our kernels for Mosaic GPU and flex_attention's"),
        ("jax", "Triton's forward as JAX calls it, without tensor descriptors"),
        ("masks", "The mask of a partial tile"),
        ("validation", "flex_attention, as published"),
    ):
        for name in (n for n in parts if n.startswith(part)):
            yield f"### {title}, {name.partition(', ')[2]}\n"
            for quantity in dict.fromkeys(q for _, r in schema.leaves(parts[name]["rows"]) for q in r["figures"]):
                yield from figures(parts, name, quantity)
    for name in (n for n in parts if n.startswith("measured")):
        yield f"### Compared with an H100, {name.partition(', ')[2]}\n"
        yield BESIDE
        for quantity in ("TFLOP/s", "rank correlation"):
            yield from figures(parts, name, quantity)
    titles = {
        "serving": ("Steps of serving", SERVING),
        "cascade": ("Shared prefixes", CASCADE),
        "prefill": ("Chunked prefill", PREFILL),
        "schedules": ("Schedules", SCHEDULES),
        "units": ("Units of a Blackwell SM", UNITS),
    }
    for name in (n for n in parts if n.partition(",")[0] in titles):
        title, text = titles[name.partition(",")[0]]
        yield f"### {title}, {name.partition(', ')[2]}\n"
        yield text
        for quantity in dict.fromkeys(q for _, r in schema.leaves(parts[name]["rows"]) for q in r["figures"]):
            yield from figures(parts, name, quantity)
    for name in (n for n in parts if n.startswith("sensitivity")):
        yield f"### Predictions with one constant a fifth higher or lower, {name.partition(', ')[2]}\n"
        yield from figures(parts, name, "change of TFLOP/s, %")


def of_jax(parts: dict[str, Part]) -> Iterator[str]:
    for part, title in (("forward", "Forward"), ("backward", "Forward and backward")):
        yield f"### {title}, JAX\n"
        yield from contests(parts, part)
        yield from picture("cpu-jax", part, f"{title}, JAX")
    yield "### First calls, and call overhead on tiny inputs, JAX\n"
    yield from figures(parts, "forward", "s, first call")
    yield from figures(parts, "overhead", "us")


def each(*shown: tuple[str, str, str]) -> Callable[[dict[str, Part]], Iterator[str]]:
    """(part, title, quantity) one after the other."""

    def show(parts: dict[str, Part]) -> Iterator[str]:
        for part, title, quantity in shown:
            yield f"### {title}\n"
            yield from figures(parts, part, quantity)

    return show


def of_bundles(parts: dict[str, Part]) -> Iterator[str]:
    for tpu in ("v5e", "v5p", "v6e"):
        if tpu in parts:
            machine, settings = parts[tpu]["machine"], parts[tpu]["settings"]
            yield f"For a {tpu}, kernels were compiled on {machine['date']} with libtpu {settings['libtpu']} and JAX "
            yield f"{machine['jax']}. frisket is to take at most 1.02 of splash attention's bundles of a head.\n"
            yield from each(
                (tpu, f"Bundles of a head on a {tpu}, by libtpu's schedules", "thousands of bundles"),
                (tpu, f"Bundles of its parts on a {tpu}", "bundles"),
            )(parts)


def of_layouts(parts: dict[str, Part]) -> Iterator[str]:
    yield "### Compared with libraries that look at every pair\n"
    yield from contests(parts, "peers")
    yield "### A million tokens\n"
    yield from figures(parts, "targets", "ms")
    yield "### A causal window of 1,024 over the length\n"
    yield from figures(parts, "growth", "ms")
    yield from figures(parts, "growth", "MB at most")
    slopes = {n: r["figures"]["slope"]["64k to 8M tokens"] for n, r in parts["growth"]["rows"].items()}
    said = " and ".join(f"{x:.2f} (`{n}`)" for n, x in slopes.items())
    yield f"From 64k to 8M tokens the time grows with the length to the power {said}.\n"
    yield "### The whole library\n"
    body, counted = [], [(n, r) for n, r in schema.leaves(parts["library"]["rows"])]
    for length in dict.fromkeys(n[-1] for n, _ in counted):
        rows = [r for n, r in counted if n[-1] == length and "figures" in r]
        ms = sorted(r["figures"]["ms"]["again"] for r in rows)
        exact = sum(bool(r["notes"]["exact"]) for r in rows)
        body.append([length, str(len(rows)), str(exact), number(median(ms)), number(ms[-1])])
    yield from table(["", "masks", "exact", "median, ms", "slowest, ms"], body)
    vague = dict.fromkeys(n[0] for n, r in counted if r.get("notes", {}).get("exact") is False)
    if vague:
        yield f"Not exact within their budget, and `layout.exact` says so: {', '.join(f'`{n}`' for n in vague)}.\n"
    yield "### Front end and import\n"
    yield from figures(parts, "front_end", "ms")
    yield from figures(parts, "import", "ms")


def of_answers(parts: dict[str, Part]) -> Iterator[str]:
    for part in parts:
        yield f"### {int(part.split()[0]):,} tokens\n"
        yield from figures(parts, part, "ms")


def of_exports(parts: dict[str, Part]) -> Iterator[str]:
    yield from figures(parts, "exports", "ms")
    for names, row in schema.leaves(parts["exports"]["rows"]):
        for export, why in row.get("notes", {}).items():
            yield f"`{export}` of {named(names[::-1])} is refused: {why}.\n"
    for peer in ("create_block_mask", "process_mask"):
        yield f"### Compared with `{peer}`\n"
        yield from contests(parts, peer)


def of_deals(_: dict[str, Part]) -> Iterator[str]:
    yield "[Context parallelism](parallel.md#how-tokens-are-distributed) has the table.\n"


def deals(parts: dict[str, Part]) -> Iterator[str]:
    """The table of docs/parallel.md: work of the busiest rank over the mean, and the share of a full ring."""
    body = []
    for name, row in parts["deals"]["rows"].items():
        even, sent = (row["figures"][x] for x in ("imbalance", "sent, of a full ring"))
        ways = ("frisket", "contiguous", "zig-zag", "sorted round robin", "heap", "per document")
        shares = {n: f"{100 * x:.0f}" if x > 0.1 else f"{100 * x:.2g}" for n, x in sent.items()}
        body.append([name, *(f"{even[n]:.3f} · {shares[n]} %" if n in even else "–" for n in ways)])
    yield from table(["mask", *ways], body, words=7)


FORWARD = """\
TFLOP/s of visible work: 4 x head size for each visible pair and head. A row is a mask, its head size (D) and tokens.
`frisket` names no backend and takes no [engine](engines.md); `frisket, triton` and `frisket, gluon` name one. The
results also have engines that frisket calls by name, and a dense formula. A cell is empty where a library does not have
the mask, or ran out of memory. Causal rows of 2,048 tokens at D 128 were measured with heads one after another; calls
now start the longest rows of all heads first.
"""
BACKWARD = """\
The gradients of q, k and v alone: 10 x head size for each visible pair and head. Windows of 128 were measured with
other tiles than today's, which take 3 to 4 % less time ([tiles](#tiles-on-an-h100)). Gradients at head size 256, 8,192
tokens, are in no row. Under a causal mask they ran at 336 TFLOP/s (flex_attention 136, SDPA with FlashAttention 240,
with cuDNN 411). Without a mask they ran at 318 (141, 258 and 366). At head size 512 flex_attention has no tile that
fits. There, under a causal mask of 8,192 tokens, Triton's forward ran at 155 and the gradients at 101 TFLOP/s (SDPA 108
and 28). The model finds today's tiles faster than those.
"""
ONE_QUERY = "Bytes of keys and values that a step must read, as a share of the rate at which the GPU copies memory.\n"
STEPS = """\
A row has the queries of a sequence, how keys and values are stored, and the contestant; a column has sequences x tokens
of each. 64 heads, 8 key heads, head size 128. A figure is the rate at which all keys, values, scales and page numbers
are read, as a share of the rate at which the GPU copies memory. Arrays of `1 x 8192` fit in L2 and are read again and
again: their shares are not those of HBM. One query over keys of int8 in one piece was measured with tiles of 64 keys;
today's, of 128, took 0.88 of the time at 8 x 32,768.
"""
RIGHT = """\
Results and gradients at head sizes 64 and 128, compared with float64; of Gluon's forward, results alone. Every mask and
score mod of the library has run on Triton and on Gluon in both dtypes. Not compared yet:

- FlashAttention 4;
- `gym_sliding_window`, `document_by_batch` and `same_by_batch(t, start, m)`, which are newer;
- the lse of 7 masks in bfloat16 on Triton, which ran on the first day alone;
- engines (`sdpa`, `cudnn`) with query heads that share a key head, and with transposed arrays.

39 of the 97 also ran on Gluon in bfloat16 at head sizes 192 and 256; the largest error was 0.0041. Seven tests
of the part `cases` failed: three by a mistake of the plug-in that moves tensors to the GPU, three because they need the
interpreter, and one because its tile fits no GPU. Four files have not run to their end.
`python benchmarks/gpu.py left` lists every row that is missing.

"""
TAKEN = """\
Rows in which a tile took at most 0.97 of the time of the default, and whether it is the default now:

| row | default now |
|---|---|
| forward, causal and window 1024, D 64 | 64 x 64, 3 stages |
| forward, documents, D 128 | 64 x 64, 3 stages, the second (0.96); 64 x 32 was not taken |
| dkv, causal and documents, D 128 | 64 x 64, 2 stages, with Triton 3.6; Triton 3.9 would spill 104 bytes |
| dkv, causal, D 64 | no |
| dkv, window 128, D 128 | 64 x 64, 2 stages, with Triton 3.6 (0.96, and 0.96 again on another day) |
| dq and dkv, window 128, D 64 | 64 x 32 and 32 x 64, 3 stages: together 0.97 (0.747 of 0.773 ms) on another day |
| forward and dq, window 1024, D 128 | no: windows of more than 768 keys have the tile of causal masks |

Of tiles that are equal within the runs, dq at D 64 under long windows took 64 x 64 with 2 stages.
"""
RATES = ("jax-forward", "jax-backward")
TITLES = {
    "jax-forward": "Forward, JAX", "jax-backward": "Backward, JAX", "jax-cases": "Tests in JAX",
    "cases": "Tests in torch", "first": "First calls", "layout": "Planning", "profile": "Counters of a profiler",
    "orders": "Tokens in another order", "graphs": "CUDA graphs", "steps": "Training steps of a small model",
}  # fmt: skip


def of_attention(parts: dict[str, Part]) -> Iterator[str]:
    """Forward and backward of torch on the GPU."""
    yield on_gpu(parts)
    rows = parts["speed"]["rows"]
    for way, text in (("forward", FORWARD), ("backward", BACKWARD)):
        found = rates({n.partition(": ")[2]: x for n, x in rows.items() if n.startswith(way)})
        yield f"### {way.capitalize()}, torch, on an H100\n\n{text}"
        yield from of_rows(found, "tflops")
        yield from of_softcap(found) if way == "forward" else ()


def of_serving(parts: dict[str, Part]) -> Iterator[str]:
    """What a GPU ran besides `of_attention` and `of_checks`."""
    yield on_gpu(parts)
    rows: dict[str, dict[str, Any]] = {name: x["rows"] for name, x in parts.items() if name not in CHECKS}
    if steps := {n: x for n, x in rows.pop("speed", {}).items() if n.startswith("decode")}:
        yield f"### One query over 32,768 keys on an H100\n\n{ONE_QUERY}"
        yield from of_rows(steps, "share of bandwidth")
    if serving := rows.pop("serving", {}):
        yield f"### Steps of serving on an H100\n\n{STEPS}"
        yield from of_rows(by_cache(serving), OF_COPY)
    for name, own in in_order(rows):
        yield f"### {gpu_title(name)}\n"
        yield from of_rows(rates(own), "tflops") if name in RATES else of_quantities(parts, name)


def of_checks(parts: dict[str, Part]) -> Iterator[str]:
    """What a GPU compared with float64, the tests that it ran, and the tiles that were tried."""
    yield on_gpu(parts)
    for name, part in parts.items():
        if lacks := part.get("notes"):
            yield f"Not measured to the end, in the part `{name}`: {'; '.join(lacks)}.\n"
    rows: dict[str, dict[str, Any]] = {name: parts[name]["rows"] for name in CHECKS if name in parts}
    if smoke := [n for n in rows.pop("smoke", {}) if n != "versions"]:
        yield f"`smoke` compared these calls with float64, and they agree: {'; '.join(smoke)}.\n"
    if right := rows.pop("right", {}):
        yield f"### Masks and score mods on an H100\n\n{RIGHT}"
        yield from of_right(right)
    if tune := rows.pop("tune", {}):
        yield "### Tiles on an H100\n"
        yield from of_tune(tune)
    for name, _ in in_order(rows):
        yield f"### {gpu_title(name)}\n"  # of tests, how many passed, not how long they took
        yield from figures(parts, name, "cases") if "cases" in name else of_quantities(parts, name)


CHECKS = ("smoke", "right", "tune", "cases", "jax-cases", "profile")


def gpu_title(part: str) -> str:
    return f"{TITLES.get(part, f'`{part}`')}, on an H100"


def in_order(rows: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(rows.items(), key=lambda x: [*TITLES, x[0]].index(x[0]))


def forward_rows(parts: dict[str, Part]) -> dict[str, Any]:
    rows = parts.get("speed", {}).get("rows", {})
    return {n.partition(": ")[2]: x for n, x in rows.items() if n.startswith("forward")}


def softcap_shares(rows: dict[str, Any]) -> dict[str, float]:
    """Row -> the speed of causal attention with a soft cap, as a share of that without one."""
    return {
        name: row["figures"]["tflops"]["frisket"] / rows[plain]["figures"]["tflops"]["frisket"]
        for name, row in rows.items() if (plain := name.removeprefix("softcap, ")) != name and plain in rows
    }  # fmt: skip


def of_softcap(rows: dict[str, Any]) -> Iterator[str]:
    if shares := softcap_shares(rows):
        yield "Causal attention with a soft cap reaches this share of the rate without one:\n"
        yield from (f"- {n.removeprefix('softcap, causal, ')}: {x:.2f}" for n, x in shares.items())
        yield ""


SOFTCAP = 0.85  # of the rate without a soft cap, at least: a goal between two rows of the forward
ELSEWHERE = ("dense", *(BY_NAME + n for n in ("cudnn", "sdpa", "flash")))  # in the results alone
CLOSEST = ("flex", "SDPA cudnn", "cudnn")  # peers with a column for the ratio
OF_COPY = "share of the copy rate"
HOW = ("passed", "failed")


def of_rows(rows: dict[str, Any], quantity: str) -> Iterator[str]:
    yield from figures({"": {"rows": rows}}, "", quantity)


def on_gpu(parts: dict[str, Part]) -> str:
    """The GPU, its driver, clock and power, versions and dates."""
    words = {
        "gpu": "", "date": "", "cuda": "CUDA ", "python": "Python ", "torch": "torch ", "triton": "Triton ",
        "jax": "JAX ",
    }  # fmt: skip
    heads = [x["machine"] for x in parts.values()]
    known = {n: dict.fromkeys(m[n] for m in heads if n in m) for n in words}
    told = [words[n] + " and ".join(x) for n, x in known.items() if x]
    notes = parts.get("smoke", {}).get("rows", {}).get("versions", {}).get("notes", {})
    if notes.get("driver", "").count(", ") == 3:
        _, driver, clock, power = notes["driver"].split(", ")
        told.insert(1, f"driver {driver}, at most {clock} and {power}")
    return ", ".join(told) + ".\n"


def rates(rows: dict[str, Any]) -> dict[str, Any]:
    """Rows with TFLOP/s first, for a table: by mask, head size and tokens."""
    found = {}
    for names, row in schema.leaves(rows):
        of = {n: x for n, x in row.get("figures", {}).get("tflops", {}).items() if n not in ELSEWHERE}
        pairs = {p: x for p, x in row.get("ratios", {}).items() if p.split(" / ")[0] in CLOSEST}
        if of:
            found[", ".join(names)] = {"figures": {"tflops": of}, "ratios": pairs}
    masks = list(dict.fromkeys(n.partition(", D ")[0] for n in found))

    def order(name: str) -> tuple[int, ...]:
        mask, _, sizes = name.partition(", D ")
        return masks.index(mask), *map(int, re.findall(r"\d+", sizes))

    return {n: found[n] for n in sorted(found, key=order)}


def by_cache(rows: dict[str, Any]) -> dict[str, Any]:
    """Steps of serving with a column for each cache."""
    found: dict[str, Any] = {}
    for (step, cache), row in schema.leaves(rows):
        for who, share in row["figures"]["share of bandwidth"].items():
            found.setdefault(f"{step}, {who}", {"figures": {OF_COPY: {}}})["figures"][OF_COPY][cache] = share
    return found


def of_right(rows: dict[str, Any]) -> Iterator[str]:
    """Entries, results and gradients by backend and dtype, and those that failed."""
    counts: dict[str, list[dict[str, int]]] = {}
    for name, row in rows.items():
        backend, *_, dtype = name.split(", ")
        counts.setdefault(f"{backend}, {dtype}", []).append(row["rows"]["count"]["figures"]["cases"])
    body = [[n, *map(number, (len(x), *(sum(y[how] for y in x) for how in HOW)))] for n, x in counts.items()]
    yield from table(["", "masks and score mods", *HOW], body)
    for name, row in rows.items():
        if bad := row["rows"]["count"].get("notes", {}):
            said = ", ".join(f"{n} by {x}" for n, x in bad.items())
            yield f"`{name}` was wrong, as parts of the largest number: {said}.\n"


def of_tune(rows: dict[str, Any]) -> Iterator[str]:
    """The best tile of each kernel and the one that frisket took when it was measured."""
    tried: dict[str, list[tuple[float, str, float, float]]] = {}
    for name, row in rows.items():
        ms = row["figures"]["ms"]
        usual = ms["as chosen"]
        own = [(x / usual, tile, x, usual) for tile, x in ms.items() if tile != "as chosen"]
        tried.setdefault(name.rpartition(", ")[0], []).extend(own)
    yield f"The best of {min(map(len, tried.values()))} to {max(map(len, tried.values()))} tiles, queries x keys."
    yield "`as chosen` was the default when the row was measured, and differs by up to 4 % from run to run. Times of dq"
    yield "and dkv are of all kernels of the backward.\n"
    yield TAKEN
    best = {n: min(x) for n, x in tried.items()}
    body = [[n, number(usual), tile, number(x), f"{of:.2f}"] for n, (of, tile, x, usual) in best.items()]
    yield from table(["", "as chosen, ms", "best tile", "ms", "best / as chosen"], body)


def of_quantities(parts: dict[str, Part], part: str) -> Iterator[str]:
    rows = list(schema.leaves(parts[part]["rows"]))
    for quantity in dict.fromkeys(q for _, r in rows for q in r.get("figures", {})):
        yield from figures(parts, part, quantity)


def of_any(parts: dict[str, Part]) -> Iterator[str]:
    for part in parts:
        yield f"### {part[0].upper() + part[1:]}\n"
        yield from of_quantities(parts, part)


TOPICS = (
    Topic("cpu-torch", CPU, "Attention on the CPU, torch",
          "Batch 1, 8 heads of 64, 4,096 tokens, float32, two threads.",
          "python benchmarks/cpu.py", of_cpu),
    Topic("cpu-jax", CPU, "Attention on the CPU, JAX",
          "The same sizes. `peer` is `jax.nn.dot_product_attention`, and a "
          "dense formula where it lacks the score mod.", "python benchmarks/cpu_jax.py", of_jax),
    Topic("cpu-dims", SIZES, "Native kernels of every head size",
          "Two heads, one thread. Rows are mask, tokens x head size, "
          "direction. Both CPUs have AVX-512. The Intel Xeon also has a matrix unit (AMX), which multiplies bfloat16, "
          "and float32 as six products of bfloat16 from 1,024 tokens and head size 64 on.",
          "python benchmarks/cpu_dims.py",
          each(("native", "float32 on an AMD EPYC", "ms"), ("avx2", "float32 with AVX2 on an AMD EPYC", "ms"),
               ("xeon", "float32 on an Intel Xeon", "ms"), ("amx", "bfloat16 on an Intel Xeon", "ms"))),
    Topic("cpu-rows", SIZES, "Half precision, chunks, short rows, ONNX Runtime", "Two heads of 64 (four where rows are "
          "short), one thread.",
          "python benchmarks/cpu_rows.py",
          each(("halves", "bfloat16 and float16, 4,096 tokens, on an AMD EPYC", "ms"),
               ("prefill", "A chunk of a prompt, float32, on an AMD EPYC", "ms"),
               ("short", "Few tokens, float32, on an Intel Xeon", "ms"),
               ("onnx", "Compared with ONNX Runtime, float32, on an AMD EPYC", "ms"))),
    Topic("decode-stored", DECODING, "Decoding on stored keys",
          "One query over 2 key heads. The first two tables have 8 query "
          "heads and one thread, and their ratios are times: below 1 is faster. The last one has all threads, and its "
          "ratio is a rate: at 1, keys and values are read as fast as torch adds them up. Arrays lie in huge pages, as "
          "those of torch's caches, where the system has them. 8,192 tokens of one sequence "
          "lie in the caches, which torch adds up several times as fast as memory. GQA 8 (eight query heads of a key "
          "head) and 8 bits are bound by products and conversions.",
          "python benchmarks/decode_stored.py",
          each(("pages", "Pages of a pool, compared with one array", "ms"), ("entries", "Entries of other types", "ms"),
               ("rate", "Read bandwidth compared with torch.sum, all threads", "ms"))),
    Topic("reorder", DECODING, "Attention in the order of its mask",
          "One head of 64, float32, one thread. frisket moves "
          "the tokens into another order, attends, and moves the result back; the peer is the order as given.",
          "python benchmarks/reorder.py",
          each(("orders", "Speed-up by an order", "ms"))),
    Topic("reorder", GOALS_PAGE, "Attention in the order of its mask, compared with earlier commits",
          "The same arrays, without an order of `fk.reorder`.", "python benchmarks/reorder.py",
          each(("commits", "Milliseconds by commit", "ms")), parts=("commits",)),
    Topic("decode-overhead", DECODING, "Overhead of a decoding step", "A `step` appends "
          "one token, plans, and attends; `nothing` is a jitted step that does nothing. `attention` is the kernel "
          "alone, planned before; `overhead` is the step without it.",
          "FRISKET_BACKEND=native python benchmarks/decode_overhead.py",
          each(("jax", "JAX, under jit", "us"), ("torch", "torch, eager", "us"))),
    Topic("overhead", OVERHEAD, "What a call of Triton's kernels costs the host",
          "Kernels are launched without a device: only "
          "Python is timed. bfloat16, 2 heads of 256 tokens.", "python benchmarks/overhead.py",
          each(("host", "Microseconds of the processor", "us"))),
    Topic("graph-overhead", OVERHEAD, "What a call costs in a graph of torch.compile",
          "causal by native kernels, 4 heads of "
          "64, float32, one thread, inductor; calls without gradients under `no_grad`. `graph, looked up` looks up "
          "the prepared call at every call, as earlier versions did.", "python benchmarks/graph_overhead.py",
          each(("forward", "Forward", "us"), ("with backward", "Forward and backward", "us"))),
    Topic("changing-tables", OVERHEAD, "What a call with another table costs",
          "Native kernels, one head of 16, float32, one "
          "thread. `changed` is the first call with a table, planned in C++, `repeated` the second; `planned by the "
          "host` is the first call without planners in C++. `replanning` is what a changed table adds.",
          "python benchmarks/changing_tables.py", each(("torch", "torch tensors", "us"),)),
    Topic("jax-binding", OVERHEAD, "What the JAX binding costs",
          "Tracing and lowering for a platform needs no device. `of the "
          "processor` is CPU time, which other processes do not lengthen.",
          "python benchmarks/jax_binding.py",
          each(("trace", "To trace and lower causal attention", "s"), ("dispatch", "A warm call under jit", "us"),
               ("eager", "A warm call outside of jit", "us"))),
    Topic("layout", LAYOUTS, "Layouts", "The time to find which tiles of 128 are full, partial or empty, on one core. "
          "`first` is the first layout of a mask, which also simplifies it; `again` is a later one.",
          "python benchmarks/layout.py", of_layouts),
    Topic("answers", LAYOUTS, "Answers about masks",
          "Milliseconds to answer a question; each answer scans the tables. No other "
          "library that we know answers these questions without evaluating every pair.", "python benchmarks/answers.py",
          of_answers),
    Topic("exports", LAYOUTS, "Exports",
          "The time from a mask to the inputs of another library, layout included, on one "
          "thread.",
          "python benchmarks/exports.py", of_exports),
    Topic("tpu-tables", LAYOUTS, "Tables and visits of TPU kernels", "Tables are for both directions in tiles of 512. "
          "Visited tiles are counted in the interpreter, at 4,096 tokens.", "python benchmarks/tpu_tables.py",
          each(("tables", "From the text of a mask to the tables of its kernels", "ms"),
               ("visits", "Tiles that are computed", "tiles computed"),
               ("visits", "Steps of the grid that splash attention takes for them", "steps of the grid"))),
    Topic("tpu-tables", BUNDLES, "Bundles of TPU kernels", "A bundle is what a core issues in one cycle. Kernels are "
          "compiled for TPUs ahead of time, and no TPU has run them.", "python benchmarks/tpu_tables.py v5e v5p v6e",
          of_bundles, parts=("v5e", "v5p", "v6e")),
    Topic("transformers-training", CPU, "A training step through transformers",
          "A tiny Llama, 4,096 tokens, one thread: "
          "forward, backward and optimiser.",
          "python benchmarks/transformers_training.py",
          each(("files", "Files packed into one sequence", "ms"), ("four", "Four documents", "ms"),
               ("one", "One document: plain causal", "ms"))),
    Topic("sdpa", CPU, "Masks of SDPA",
          "`frisket.sdpa` and torch's function under dense masks, heads of 64, float32, one "
          "thread. A first call has a mask that no call brought before. frisket looks there for one range of visible "
          "keys in each row, and `table` reads all entries.",
          "python benchmarks/sdpa.py",
          each(("training", "Forward and backward of [2, 4, 2048, 64]", "ms"),
               ("recognition", "A forward of [1, 4, S, 64]: ranges or a table", "ms"))),
    Topic("explorer", LAYOUTS, "A keystroke in the explorer",
          "131,072 tokens in tiles of 128. The time is from the key to the "
          "frame with the new picture, facts and cost, in Chromium without a window. The analysis is part of it.",
          "python benchmarks/explorer.py", each(("keystroke", "Milliseconds", "ms"))),
    Topic("gpu", H100, "Attention on an H100", "", "python benchmarks/gpu.py speed", of_attention),
    Topic("gpu", H100_SERVING, "Decoding, JAX and planning on an H100", "",
          "python benchmarks/gpu.py PART", of_serving,
          parts=("serving", "jax-forward", "jax-backward", "first", "layout", "orders", "graphs", "steps")),
    Topic("gpu", CHECKED, "What an H100 checked", "", "python benchmarks/gpu.py PART", of_checks,
          parts=CHECKS),
    Topic("gpu-model", PREDICTIONS, "Predictions of a model",
          "Only *Compared with an H100* has measured figures. Kernels, ours and flex_attention's alike, are compiled "
          "for an H100 ahead of time, disassembled and simulated by a model of its SMs. `steady loop` is the loop of "
          "full tiles alone at the nominal clock; `full model` adds partial tiles, prologues, tails, waves over 132 "
          "SMs, memory and power. 16 heads, batch 1, bfloat16. Against published speeds of flex_attention, the model "
          "is some 10 % too fast for the forward, and 7 % too slow to 73 % too fast for the backward. So compare "
          "two kernels by it, and do not rely on its TFLOP/s.",
          "python benchmarks/gpu_model.py figures",
          of_model),
    Topic("compiles", OVERHEAD, "Kernels that a script compiles",
          "A script tries masks and score mods as a notebook does: other "
          "lengths, another window, another soft cap, a table under another name. It runs with an empty cache (cold) "
          "and again with the kernels on disk.", "python benchmarks/compiles.py", of_any),
    Topic("engines", CPU, "Engines: SDPA and the kernels",
          "The table `Cpu` compares torch's SDPA with native kernels and "
          "library calls, one thread, 8 heads of 64. `Choose` is the time to choose an engine for a new mask.",
          "python benchmarks/engines.py", of_any),
    Topic("context-parallel", LAYOUTS, "Sequences over ranks",
          "A million tokens over 64 ranks: a model, not a measurement.",
          "python benchmarks/context_parallel.py", of_deals),
)  # fmt: skip


def topics() -> list[Topic]:
    """The sections in the order of their pages."""
    pages = list(PAGES)
    return sorted(TOPICS, key=lambda t: pages.index(t.page))


def loaded(topic: Topic) -> dict[str, Part]:
    found = json.loads((RESULTS / f"{topic.file}.json").read_text(encoding="utf-8"))
    schema.check(found)
    return found["parts"]  # type: ignore[no-any-return]


def against(every: dict[str, dict[str, Part]]) -> list[list[str]]:
    """(where, what, measured, wanted): all losses and all goals that were missed."""
    found = []
    for file, parts in every.items():
        for part, x in parts.items():
            for names, row in schema.leaves(x["rows"]):
                where = [f"{file}, {part}", named(names)]
                short = missed(row)
                for pair, value in row.get("ratios", {}).items():
                    goal = short.pop(("ratios", pair), None)
                    if goal:
                        found.append([*where, pair, ratio(value, goal), wanted(goal)])
                    elif slower(pair, value):
                        found.append([*where, pair, ratio(value), "more than 1"])
                for goal in short.values():
                    what = f"{goal.name}, {goal.quantity}"
                    found.append([*where, what, number(goal.value), wanted(goal)])
                for who, ours, peer in first_calls(row):
                    found.append([*where, f"first call, {who}", f"{ours:.2f} s", f"{peer:.2f} s, as the peer"])
    return found


def linked(rows: list[list[str]]) -> list[list[str]]:
    """The rows; the first of each part has a link to its section."""
    found, before = [], ""
    for where, *rest in rows:
        found.append([where if where == before else f"[{where}](#{anchor(topic_of(where).title)})", *rest])
        before = where
    return found


def topic_of(where: str) -> Topic:
    """The section that shows `file, part`."""
    file, _, part = where.partition(", ")
    of_file = [t for t in TOPICS if t.file == file]
    return next((t for t in of_file if part in t.parts), of_file[0])


def first_calls(row: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Those of ours that take longer than the peer's."""
    first = row.get("figures", {}).get("s, first call", {})
    yield from ((t, first[t], first["peer"]) for t in OURS if first.get(t, 0.0) > first.get("peer", 0.0))


def pages() -> dict[str, str]:
    """Path -> text."""
    every = {t.file: loaded(t) for t in topics()}
    found = {name: tables(name, every) for name in PAGES}
    found = {SUMMARY: summary(every, found), **found}
    places: dict[str, str] = {}
    for name, text in found.items():
        for title in re.findall(r"^#+ (.*)", text, re.M):
            places.setdefault(anchor(title), name)
    return {name: relinked(name, text, places) for name, text in found.items()}


def relinked(page: str, text: str, places: dict[str, str]) -> str:
    """A page whose links, written from docs/ or as the anchor of any page, lead there from where it stands."""

    def target(match: re.Match[str]) -> str:
        path, sign, title = match[1].partition("#")
        path = posixpath.normpath(f"docs/{path}") if path else places[title]
        if path == page:
            return f"](#{title})"
        return f"]({posixpath.relpath(path, posixpath.dirname(page))}{sign}{title})"

    return re.sub(r"\]\((?!https?:)([^)]*)\)", target, text)


def summary(every: dict[str, dict[str, Part]], tables: dict[str, str]) -> str:
    heads = [x["machine"] for parts in every.values() for x in parts.values() if "gpu" not in x["machine"]]
    cpus = sorted({f"{m['cores']} cores of an {m['cpu']}" for m in heads})
    days = sorted(m["date"] for m in heads)
    found = {n: sorted({m[n].split("+")[0] for m in heads if n in m}) for n in ("torch", "jax")}
    versions = ", ".join(f"{n} {' and '.join(x)}" for n, x in found.items())
    machine = f"{' and '.join(cpus)} without an accelerator, {days[0]} to {days[-1]}, with {versions}"
    lines = [INTRO, *headlines(every), SLOWER, *counted([*losses(measured(every))], every)]
    return joined([*lines, METHOD.format(machine=machine), *contents(tables)])


def contents(tables: dict[str, str]) -> Iterator[str]:
    """The pages for users with their sections, and a line that leads to the others."""
    others = []
    for name, text in tables.items():
        page = f"[{PAGES[name][0]}](../{name})"
        if name.startswith("benchmarks/"):
            others.append(page)
        else:
            yield f"- **{page}**"
            yield from (f"    - [{title}](#{anchor(title)})" for title in re.findall(r"^## (.*)", text, re.M))
    yield f"- For contributors, in `benchmarks/`: {', '.join(others)}\n"


def tables(name: str, every: dict[str, dict[str, Part]]) -> str:
    """A page of tables. Where it has one section, its headings are those of the section."""
    title, readers = PAGES[name]
    inside = [t for t in topics() if t.page == name]
    lines = [f"# {title}\n", f"{readers}. [Benchmarks](../{SUMMARY}) says how it was measured.\n"]
    lines += goals(every) if name == GOALS_PAGE else []
    alone = [t.title for t in inside] == [title]
    for topic in inside:
        lines += [] if alone else [f"## {topic.title}\n"]
        lines += section(topic, every[topic.file])
    text = joined(lines)
    return re.sub(r"^###", "##", text, flags=re.M) if alone else text


def measured(every: dict[str, dict[str, Part]]) -> dict[str, dict[str, Part]]:
    return {file: parts for file, parts in every.items() if file != PREDICTED}


def goals(every: dict[str, dict[str, Part]]) -> Iterator[str]:
    """Goals that were missed: counted by table, then every row, losses among them."""
    shares = softcap_shares(rates(forward_rows(every["gpu"])))
    short = [(n, x) for n, x in shares.items() if x < SOFTCAP]
    soft = [["gpu, speed", n, "rate / rate without a soft cap", f"{x:.2f}", f"at least {SOFTCAP:g}"] for n, x in short]
    rows = against(measured(every)) + soft
    yield GOALS
    yield from counted([x for x in rows if x[-1].startswith("at ")], every)
    yield ROWS
    yield from table(["results", "row", "what", "measured", "wanted"], linked(rows), words=3)
    if predicted := against({PREDICTED: every[PREDICTED]}):
        yield PREDICTED_GOALS
        yield from table(["results", "row", "what", "predicted", "wanted"], linked(predicted), words=3)


def losses(every: dict[str, dict[str, Part]]) -> Iterator[list[str]]:
    """(where, what, measured) of the rows in which a peer is faster, whatever their goals."""
    for file, parts in every.items():
        for part, x in parts.items():
            for names, row in schema.leaves(x["rows"]):
                for pair, value in row.get("ratios", {}).items():
                    if slower(pair, value):
                        yield [f"{file}, {part}", named(names), pair, ratio(value)]
                for who, ours, peer in first_calls(row):
                    yield [f"{file}, {part}", named(names), f"first call, {who}", f"{ours:.2f} s vs. {peer:.2f} s"]


def counted(rows: list[list[str]], every: dict[str, dict[str, Part]]) -> Iterator[str]:
    """Rows of `losses` or `against`, counted by table and by what is compared."""
    groups: dict[tuple[str, str], list[list[str]]] = {}
    for row in rows:
        groups.setdefault((row[0], row[2]), []).append(row)
    body = []
    for (where, what), found in groups.items():
        file, _, name = where.partition(", ")
        part = every[file][name]
        title = topic_of(where).title
        link = f"[{title}](#{anchor(title)}): {name}"
        line = [link, device(part), found[0][1], what, *found[0][3:]]
        if len(found) > 1:
            of = sum(what in r.get("ratios", {}) for _, r in schema.leaves(part["rows"]))
            line[2] = f"{len(found)} of {of} rows" if of else f"{len(found)} rows"
            line[4:] = [_range([x[i].partition(" (")[0] for x in found]) for i in range(3, len(found[0]))]
        body.append(line)
    head = ["results", "machine", "rows", "what", "measured", "wanted"][: len(body[0])]
    yield from table(head, body, words=4)


def _range(texts: list[str]) -> str:
    """`_range(["at least 2.2", "at least 3"])` is "at least 2.2 to 3"."""
    low, *_, high = sorted(texts, key=lambda x: float(x.split()[-1].replace(",", "")))
    return low if low == high else f"{low} to {high.split()[-1]}"


def section(topic: Topic, parts: dict[str, Part]) -> Iterator[str]:
    yield from [on_machine(parts) + topic.text + "\n"] if topic.text else []
    yield from topic.show(parts)
    yield f"Repeat it: `{topic.command}`; [the results](../benchmarks/results/{topic.file}.json).\n"


def on_machine(parts: dict[str, Part]) -> str:
    """The machine of a section, where there is one. Costs of orders are on another page, and deals are a model."""
    found = {device({**x, "settings": {}}) for n, x in parts.items() if n not in ("costs", "deals")}
    return f"On an {found.pop()}. " if len(found) == 1 else ""


def joined(lines: list[str]) -> str:
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def charts() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """(name of a file, what draws it)."""
    for file in ("cpu-torch", "cpu-jax"):
        parts = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["parts"]
        for part in ("forward", "backward"):
            rows = schema.ratios({part: parts[part]}, "native")
            rows = {name: {p: x for p, x in of.items() if p not in OURS} for name, of in rows.items()}
            axis = "time of a peer / time of the native kernel"
            yield f"{file}-{part}.svg", partial(_draw, rows, axis)


def _draw(rows: Any, axis: str, path: Path) -> None:
    schema.draw(rows, path, axis=axis)


def main() -> None:
    folder = HERE / "performance"
    folder.mkdir(exist_ok=True)
    kept = {ROOT / name for name in PAGES}
    for name, text in pages().items():
        (ROOT / name).write_text(text, encoding="utf-8")
    for name, draw in charts():
        draw(folder / name)
        kept.add(folder / name)
    for stray in set(folder.iterdir()) - kept:
        stray.unlink()


if __name__ == "__main__":
    main()
