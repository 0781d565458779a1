"""The figures of docs/reliability.md, benchmarks/endurance.md and benchmarks/numerics.md, from benchmarks/results and
tests/fuzz/campaigns.md: `python docs/endurance.py`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CAMPAIGN = re.compile(r"^\| `(\w+)` \| \d+ \| ([\d,]+) \| [\d,]+ \| (\d+) \|", re.M)  # target, cases, failed


def parts(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["parts"])


def machine(part: dict[str, Any]) -> str:
    m = part["machine"]
    return f"{m['cores']} cores of an {m['cpu']}, Python {m['python']}, {m['date']}"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def explorer() -> str:
    part = parts("explorer-soak")["soak"]
    rows, settings = {n: r["figures"] for n, r in part["rows"].items()}, part["settings"]
    asked, others, before, after = rows["questions"], rows["other clients"]["count"], *list(rows["server"].values())[:2]
    count, ms = asked["count"], asked["ms"]
    return f"""\
`frisket explore` served {settings["pages"]} pages for {settings["minutes"]:g} minutes while {
        settings["others"]
    } threads of other clients made
{sum(others.values()):,} connections: silent, sending a byte now and then, never reading the answer, half a question, no
token, another origin, another name of the host, too large a head. `python benchmarks/explorer_soak.py` repeats it and
fails where a question is lost or the server grows ({machine(part)}, with other work on it).

{
        table(
            ["", ""],
            [
                ["questions answered", f"{count['answered']:,}"],
                ["asked again on a new connection, as browsers do", f"{count['asked again']:,}"],
                ["lost", f"{count['lost']:,}"],
                [
                    "time of a question: median, 99 %, longest",
                    f"{ms['median']:.0f}, {ms['99 %']:.0f}, {ms['longest']:.0f} ms",
                ],
                [
                    "memory of the server after a fifth of the time, at the end",
                    f"{before['MiB']:.1f}, {after['MiB']:.1f} MiB",
                ],
                ["open files, then", f"{before['files']}, {after['files']}"],
            ],
        )
    }"""


def calls() -> str:
    part = parts("memory")["calls"]
    held = [
        [name, *(f"{row['figures']['MiB'][x]:.0f}" for x in ("process", "tables"))]
        for name, row in part["rows"].items()
    ]
    return f"""\
{part["settings"]["calls"]:,} calls on torch tensors of a CPU, of masks that hardly ever come again: other texts,
numbers, lengths up to 300, dtypes, tables, with and without gradients. The tables of remembered answers fill up to
bounds of entries, of bytes for each, and of 256 MiB for all. `python benchmarks/memory.py calls` makes 100,000 calls
unless told otherwise. It fails where the process grows by 32 MiB more than the tables after the first fifth
({machine(part)}, with other work on it).

{table(["", "process, MiB", "of them tables, MiB"], held)}"""


def plans() -> str:
    part = parts("memory")["plans"]
    figures = {name: row["figures"] for name, row in part["rows"].items()}
    lengths = list(next(iter(figures.values()))["MiB"])
    rows = [
        [f"`{n.replace('|', chr(92) + '|')}`", *(f"{f['MiB'][x]:.1f} MiB, {f['s'][x]:.3f} s" for x in lengths)]
        for n, f in figures.items()
    ]
    return f"""\
The most memory that a process adds for one plan of S tokens, and the time of the plan.
`python benchmarks/memory.py plans` repeats it ({machine(part)}, with other work on it).

{table(["mask", *(f"{int(x):,} tokens" for x in lengths)], rows)}

Past a budget of steps the analysis leaves tiles partial: the last plan of `strided` takes less memory than the one
before."""


def kernels() -> str:
    part = parts("memory")["kernels"]
    lengths = list(next(iter(part["rows"].values()))["figures"]["query"])
    tables = []
    for kind in ("forward", "forward and backward"):
        rows = []
        for name, row in part["rows"].items():
            mask, _, what = name.rpartition(", ")
            if what == kind:
                of_query = row["figures"]["query"]
                rows += [
                    [
                        f"`{mask}`",
                        run,
                        *(f"{x[n]:.1f} MiB, {x[n] / of_query[n]:.1f} q" if n in x else "–" for n in lengths),
                    ]
                    for run, x in row["figures"].items()
                    if run != "query"
                ]
        tables.append(f"**{kind}**\n\n{table([kind, '', *(f'{int(n):,} tokens' for n in lengths)], rows)}")
    several, set_ = "\n\n".join(tables), part["settings"]
    return f"""\
The most memory that a call adds to its arrays and its results, in MiB and as a multiple of the query's. A call has one
head of {set_["head_dim"]} numbers in {set_["dtype"]}, documents of {set_["document"]:,} tokens. It is the second call
of a process: the first one plans and builds, and what it leaves behind counts. `python benchmarks/memory.py kernels`
repeats it ({machine(part)}, with other work on it).

{several}

Each thread of a native kernel keeps packed tiles: at most 8 MiB forward, 16 MiB backward. lse takes 4 bytes for each
query; with gradients, lse and norms take 12. Where threads share a key head, each part of its queries sums its own dK
and dV. XLA's threads, one for each core, keep memory too: with 16 of them a call by `jax, cpp` takes two to three
times as much as with two. Sums of parts take at most 256 MiB, so at ten million tokens there is one part. Gradients by
library calls take some six times the query, and by XLA eight times. A document mask takes some 50 bytes a token more,
for copies of its table. The dash is for XLA's calls that took more than 400 seconds, next to other work.

Nothing grows with pairs of tokens: a score for each pair of a million tokens would be 3.6 TiB. Tests check for torch
and JAX, native kernels and library calls, that memory grows with tokens and not with pairs. On torch they also check
that 24 threads do not each take memory of the query's size."""


ON_CPU = ("dense", "sdpa", "flex", "cpp", "aten", "xla")
INTERPRETED = ("triton", "gluon", "pallas-tpu", "pallas-mosaic-gpu")
DTYPES = ("float32", "bfloat16", "float16")
WRONG = "wrong rows of 256"
BITS = """\
Equal calls give equal bits on one machine. Tests hold this for torch's and JAX's kernels of a CPU, for library calls in
torch, and for Triton's kernels in its interpreter. The native forward of torch is also held to equal bits with one, two
and three threads. Its gradients may round differently with another number of threads, by which the queries of a key are
divided. With as many threads, native gradients of q, k and v have equal bits in torch and JAX. Tiles of another size,
another length, another batch or another backend may round differently, and no test asks for their bits."""


def errors(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """The tables of a dtype; `rows` have figures of output and gradients."""
    tables = []
    for what in ("output", "gradients"):
        figures = {title: row[what] for title, row in rows.items() if what in row}
        shown = [*dict.fromkeys(n for found in figures.values() for n in found if n != "bound"), "bound"]
        cells = [[title, *(f"{x[n]:.1e}" if n in x else "–" for n in shown)] for title, x in figures.items()]
        tables.append(f"**{name}, {what}**\n\n{table([name, *shown], cells)}")
    return "\n\n".join(tables)


def interpreted(found: dict[str, Any]) -> tuple[str, str]:
    """The tables of kernels that interpreters run: errors, and wrong rows."""
    rows: dict[str, dict[str, Any]] = {}  # by dtype and title
    for backend in INTERPRETED:
        for name, row in found[backend]["rows"].items():
            for what, figures in row["figures"].items():
                rows.setdefault(name, {}).setdefault(what, {}).update(figures)
    dtypes = {
        dtype: {name.removeprefix(f"{dtype}, "): row for name, row in rows.items() if name.startswith(f"{dtype}, ")}
        for dtype in DTYPES
    }
    wrong = {name: row[WRONG] for name, row in rows.items() if WRONG in row}
    head = ["", *next(iter(wrong.values()))]
    return (
        "\n\n".join(errors(dtype, each) for dtype, each in dtypes.items()),
        table(head, [[name, *map(str, x.values())] for name, x in wrong.items()]),
    )


def numbers() -> str:
    found = parts("numerics")
    several = "\n\n".join(
        errors(dtype, {title: row["figures"] for title, row in found[dtype]["rows"].items()}) for dtype in DTYPES
    )
    rows = [[t, *(str(x) for x in r["figures"][WRONG].values())] for t, r in found["not finite"]["rows"].items()]
    accelerators, wrong = interpreted(found)
    return f"""\
Errors from float64 for 256 queries and keys of 64 numbers under `{found["float32"]["settings"]["mask"]}`, and
for one query over 16,384 and over 1,048,576 keys. An error is relative to the largest number that its sums can reach.
`dense` is a softmax written out in the dtype, `sdpa` torch's with a dense mask, `flex` torch's flex_attention,
compiled. `cpp`, `aten` and `xla` are frisket's, and `bound` is what frisket promises for them: tests hold it.

A bound is `u + min(1, 2**-20 * (1 + s))` for outputs and `2 * u + min(1, 2**-20 * (1 + s))` for gradients. Here `s` is
the largest absolute score and `u` the rounding of the dtype: 2**-23 (float32), 2**-7 (bfloat16), 2**-10 (float16). A
bound of 1.0 promises nothing: no sum is off by more than it can reach. A dash is NaN or infinity. Numbers below 1e-38
may become 0, so those have no bound. `flex` has no gradients on a CPU.
`python benchmarks/numerics.py` repeats it ({machine(found["float32"])}).

{several}

A key that is NaN or infinite reaches no query that does not see it. A value that some query sees must be finite, as in
dense attention: 0 times infinity is NaN. {WRONG[0].upper()}{WRONG[1:]} under a causal window of 200: those
that are not the rows of float64 attention to visible keys alone:

{table(["", *ON_CPU], rows)}

A score of -inf hides its key. Where a query has no other score, its output is 0, and so is its gradient. Tests hold
this for every backend.

Interpreters run the kernels for GPUs and TPUs on the same inputs: Triton's own; the project's for Gluon's forward on
Hopper (`sm_90`) and Blackwell (`sm_100`); Pallas's for TPUs, and with JAX
{found["pallas-mosaic-gpu"]["machine"]["jax"]} for GPUs. The bounds are the same, and tests hold them. A million keys
would take hours there. The kernels of Gluon and of Pallas for GPUs take bfloat16 and float16 alone.

An interpreter adds and multiplies on a CPU, in float32. It does not show how a GPU approximates `exp2`, `log` and
`tanh`, how a tensor core or a TPU rounds a sum of products, or what either does with numbers below 1e-38. Triton's has
two repairs: one reads bfloat16 as numbers, the other rounds a product of float32 once, since numpy's sums depend on the
shape of a tile and a GPU's do not.

{accelerators}

{WRONG[0].upper()}{WRONG[1:]}, in float32 where a kernel takes it and else in float16:

{wrong}"""


def training() -> str:
    found = parts("long-run")
    steps = ("1", "20", "200", "500", "1000", "2000")
    rows, losses = [], []
    for framework, part in found.items():
        for name, row in part["rows"].items():
            run = name.removeprefix(f"{framework}, ")
            loss = row.get("figures", {}).get("loss")
            if loss and run != "eager":
                rows.append([name, *(f"{row['figures']['distance'][n]:.1e}" for n in steps)])
            if loss:
                losses.append([name, *(f"{x:.3g}" for x in loss.values())])
    part = found["torch"]
    return f"""\
A model of bytes takes 2,000 steps on packed documents: two layers, {part["settings"]["length"]} tokens a step, float32,
AdamW, equal weights at the start. `eager` is attention written out with a dense mask, on one thread. `threads` is
`eager` on two threads. It has the bits of one thread here, so it is no measure of rounding. Therefore `third` and
`fifth` add the first third or fifth of the keys by themselves, and their sums round in another order. A distance is the
norm of the difference from `eager`'s weights, over the norm of what those have moved. `python benchmarks/long_run.py`
repeats it ({machine(part)}).

![Distance of weights over the steps of training](../docs/assets/long-run.svg)

{table(["distance after so many steps", *(f"{int(n):,}" for n in steps)], rows)}

{further(found["jax"])}

{table(["loss, nats a byte", "largest difference in 20 steps", "mean of the last 100 steps"], losses)}"""


def further(part: dict[str, Any]) -> str:
    """The sentence on how much further than `third` and `fifth` frisket is in JAX."""
    ours, third, fifth = (part["rows"][f"jax, {n}"]["figures"]["distance"] for n in ("frisket", "third", "fifth"))
    shares = {n: ours[n] / max(third[n], fifth[n]) for n in ("1", "20", "200", "500")}
    said = ", ".join(f"{x:.2f} at step {n}" for n, x in shares.items())
    return f"""\
In JAX, frisket's distance as a share of the larger one of `third` and `fifth` is {said}. The goal was at most 1."""


def totals() -> str:
    """The cases of each target, over all campaigns."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for target, *found in CAMPAIGN.findall((ROOT / "tests" / "fuzz" / "campaigns.md").read_text(encoding="utf-8")):
        counts[target] = [x + int(n.replace(",", "")) for x, n in zip(counts[target], found, strict=True)]
    rows = [[f"`{target}`", f"{cases:,}", str(failed)] for target, (cases, failed) in counts.items()]
    return f"""\
Cases of all campaigns. In the five failures of `kernels` the check was wrong, and was mended.

{table(["target", "cases", "failed"], sorted(rows, key=lambda row: -int(row[1].replace(",", ""))))}"""


def bounds() -> str:
    """The bounds, and how near to them the errors of each backend come."""
    found = parts("numerics")
    rows = []
    for dtype in DTYPES:
        cases = [row["figures"] for row in found[dtype]["rows"].values()]
        cases += [
            row["figures"]
            for backend in INTERPRETED for name, row in found[backend]["rows"].items() if name.startswith(f"{dtype}, ")
        ]  # fmt: skip
        for what in ("output", "gradients"):
            shares: dict[str, float] = {}
            for figures in (x[what] for x in cases if what in x and "bound" in x[what]):
                for name in figures.keys() - {"bound", "dense", "sdpa", "flex"}:
                    shares[name] = max(shares.get(name, 0), figures[name] / figures["bound"])
            worst = max(shares, key=lambda name: shares[name])
            rows.append([dtype, what, f"{shares[worst]:.2f}", f"`{worst}`"])
    not_finite = [[t, *(str(x) for x in r["figures"][WRONG].values())] for t, r in found["not finite"]["rows"].items()]
    return f"""\
Let `s` be the largest absolute score, and `u` the rounding of the dtype: 2**-23 (float32), 2**-7 (bfloat16) or 2**-10
(float16). An output is off by at most `u + min(1, 2**-20 * (1 + s))` of the largest number that its sums can reach. A
gradient is off by at most `2 * u + min(1, 2**-20 * (1 + s))`. Numbers below 1e-38 may become 0. Tests hold the bounds
for scores from 0.001 to 1e30 and for up to a million keys. Kernels of CPUs run, those of
GPUs and TPUs run in interpreters. The largest error of any backend, as a share of its bound:

{table(["dtype", "", "largest error as a share of the bound", "backend"], rows)}

[All errors](../benchmarks/numerics.md), compared with dense attention, SDPA and flex_attention, are in `benchmarks/`.

A key that is NaN or infinite reaches no query that does not see it. A value that some query sees must be finite, as in
dense attention: 0 times infinity is NaN. {WRONG[0].upper()}{WRONG[1:]} under a causal window of 200: those
that are not the rows of float64 attention to visible keys alone:

{table(["", *ON_CPU], not_finite)}

A score of -inf hides its key. Where a query has no other score, its output is 0, and so is its gradient.

{BITS}"""


SECTIONS = {
    "docs/reliability.md": {"totals": totals, "bounds": bounds, "plans": plans, "kernels": kernels},
    "benchmarks/endurance.md": {"explorer": explorer, "calls": calls, "training": training},
    "benchmarks/numerics.md": {"numbers": numbers},
}


def page(name: str) -> str:
    """A page with its sections as the results have them."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for title, section in SECTIONS[name].items():
        start, end = f"<!-- {title}, written by docs/endurance.py -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        assert found, title
        text = f"{before}{start}\n{section()}\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for name in SECTIONS:
        (ROOT / name).write_text(page(name), encoding="utf-8")
