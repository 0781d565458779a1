"""The page of versions, packages and model types: `python docs/compatibility.py` writes docs/compatibility.md and the
table of model types, docs/models.csv, which the site shows on the page with a field that filters it.

The results are those of the programs in tests that its sections name.
"""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from frisket.lowering.architectures import tried

PAGE = Path(__file__).resolve().parent / "compatibility.md"
MODELS = PAGE.with_name("models.csv")
TESTS = PAGE.parents[1] / "tests"
RESULTS = TESTS / "outside" / "transformers.json"
BATCHING = RESULTS.with_name("transformers_batching.json")
FRAMEWORKS = ("python", "numpy", "torch", "jax", "triton")
EXTRAS = ("matplotlib", "flax", "qwix", "transformers")
INTRO = """\
# Compatibility

For those who want to know whether frisket works on their machine, with their versions, inside a package that they use,
or with a model of transformers. Written by `python docs/compatibility.py` from results of programs in `tests`, which
each section names.

## Machines

Where frisket ran, and where it never did. `frisket doctor` has the same list. *Measured on*: tests and benchmarks ran
there. *Compiles*: the vendor's compiler takes every kernel, and results were compared in an interpreter on a CPU.
*Interpreter only*: kernels ran in an interpreter or an emulator. *Never*: nothing ran. On a
machine that never ran it, `frisket check causal` compares every kernel that runs there with float64.

{machines}

## Versions

A slice of the tests on a CPU, in environments made for it: `python tests/versions.py`. The lower bounds of
`pyproject.toml` are the oldest versions here. They have wheels for Python 3.12 too, and for 3.13 with numpy 2.1.0.
numpy 1.26 is tried without frameworks alone: JAX 0.10.0 asks for numpy 2, and environments with frameworks have JAX.
The newest torch of the table needs Triton 3.8. Triton 3.9, in `constraints.txt` with torch's build for CPUs, is tested
by the default tests. The last rows list other extras, and the tests that need them. `nnx.jit` of
flax 0.12.1 fails with JAX 0.10. Continuous batching fails with transformers before 5.19, so `register` refuses these
versions. Every run of CI installs what an install without constraints gives on that day, and runs a part of all tests
there.

{versions}

## Inside other packages

Each package is installed in a new environment, and tiny models with random weights run in it under frisket:
`python tests/real/run.py`. Every run of CI takes one of these jobs.

{packages}

## Models of transformers

Whether a model works under `attn_implementation="frisket"`, and what has been compared. How to use it is on the page
[transformers](transformers.md). Every model type of transformers {transformers} is listed: {count} types. A type is
compared in a tiny configuration with random weights, float32 on a CPU, with the same model under eager attention:
`python tests/outside/transformers_sweep.py`.

{verdicts}

`all` means outputs and gradients of every parameter, and the same with padding on either side. It means `generate`
through dynamic and static caches (sliding where the model has sliding windows) and from padded prompts. It also means
assisted decoding by prompt lookup, and beam search with 3 beams. A part that the model cannot do under eager attention
is left out.

**Continuous batching** is `generate_batch` of three prompts at once, in batches of at most 12 tokens, compared with
eager attention of each prompt alone, without a cache: `python tests/outside/transformers_batching.py`. {ran} of the
{generating} types whose `generate` is equal have run, and {equal} of them give equal tokens. *transformers cannot*
means that its own attention for continuous batching fails for the type as well.

[All model types](models.csv), as a table:
"""
VERDICTS = {  # verdict -> its name, and what it says
    "equal": (
        "equal",
        "All that was compared is equal to eager attention: outputs to 2e-4, gradients of every parameter to 2e-3 of "
        "their largest element, generated tokens exactly.",
    ),
    "as sdpa": (
        "as sdpa",
        "A result is that of transformers' sdpa, where sdpa and eager attention differ from each other.",
    ),
    "differs": ("different", "A result is not that of eager attention."),
    "refused": ("refused", "An error says what is not supported."),
    "fails": ("fails otherwise", "An error that is not frisket's."),
    "its own": (
        "computes attention itself",
        "The model takes no implementation from outside. It warns when it is made with "
        '`attn_implementation="frisket"`, and refuses `frisket_mask`.',
    ),
    "no attention": (
        "no attention",
        "Convolutions, state spaces, Fourier mixing, codecs: frisket has no part in the results.",
    ),
    "no tiny model": (
        "not compared",
        "No tiny configuration of the type works under eager attention here. It is a part of a larger model, needs a "
        "library that is not installed, or inputs and sizes that are not made from names alone. The error is that of "
        "eager attention.",
    ),
    "not run": (
        "not run yet",
        "No result of this version of the plug-in: `python tests/outside/transformers_sweep.py TYPE ...` runs it.",
    ),
}
PARTS = {
    "outputs and gradients": "outputs and gradients",
    "padded left": "padding left",
    "padded right": "padding right",
    "generate, dynamic cache": "dynamic cache",
    "generate, static cache": "static cache",
    "generate, padded left": "generation from padded prompts",
    "assisted decoding": "assisted decoding",
    "beam search": "beam search",
}


def said(parts: list[str]) -> str:
    """The parts that were equal, in few words."""
    if list(PARTS) == parts:
        return "all"
    missing = [PARTS[p] for p in PARTS if p not in parts]
    if len(parts) > 4:
        return "all but " + ", ".join(missing)
    return ", ".join([PARTS[p] for p in parts]) or "nothing"


def models(types: dict[str, Any], batching: dict[str, str]) -> str:
    """The text of docs/models.csv: a row for each model type."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["type", "model", "verdict", "equal in", "what happens", "continuous batching"])
    for kind, found in types.items():
        verdict, parts = VERDICTS[found["verdict"]][0], found.get("parts")
        batched = (batching[kind] or "equal tokens") if kind in batching else ""
        lines.writerow(
            [kind, found.get("model", ""), verdict, said(parts) if parts else "", found.get("why", ""), batched]
        )
    return text.getvalue()


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def outcome(result: dict[str, Any]) -> str:
    """The counts of a run, or why there was none."""
    return str(result.get("why") or f"{result.get('passed', 0):,} passed, {len(result['failures'])} failed")


def versions() -> str:
    """The table of environments, and what failed in them."""
    results: dict[str, Any] = json.loads((TESTS / "versions.json").read_text(encoding="utf-8"))
    rows = []
    for name, result in results.items():
        has = result.get("versions", {})
        others = ", ".join(f"{x} {has[x]}" for x in EXTRAS if x in has)
        rows.append([name, *(has.get(x, "") for x in FRAMEWORKS), others, outcome(result), result["date"]])
    failures = [f"- {name}: `{x}`" for name, result in results.items() for x in result.get("failures", [])]
    text = table(["environment", *FRAMEWORKS, "others", "tests", "date"], rows)
    return "\n".join([text, *(["", "Failed:", "", *failures] if failures else [])])


def packages() -> str:
    """The table of jobs: what each compares, at which versions, and when it last ran."""
    rows = []
    for file in sorted(TESTS.glob("real/*/job.toml")):
        job = tomllib.loads(file.read_text(encoding="utf-8"))
        result = json.loads(file.with_name("result.json").read_text(encoding="utf-8"))
        has = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        rows.append([f"`{file.parent.name}`", has, job["about"], outcome(result), result["date"]])
    return table(["job", "versions", "what is compared", "tests", "date"], rows)


def pages() -> dict[Path, str]:
    """The texts of the page and of its table."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    types, batching = results["types"], json.loads(BATCHING.read_text(encoding="utf-8"))
    counts = Counter(x["verdict"] for x in types.values())
    verdicts = [[name, str(counts[v]), text] for v, (name, text) in VERDICTS.items() if counts[v]]
    text = INTRO.format(
        transformers=results["transformers"],
        count=len(types),
        machines=table(["machine", "state", "how"], [list(x) for x in tried()]),
        versions=versions(),
        packages=packages(),
        verdicts=table(["verdict", "model types", "what it says"], verdicts),
        ran=len(batching),
        equal=sum(not why for why in batching.values()),
        generating=sum(x["verdict"] == "equal" and "generate, dynamic cache" in x["parts"] for x in types.values()),
    )
    return {PAGE: text, MODELS: models(types, batching)}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
