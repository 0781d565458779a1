"""The page of versions, packages and model types: `python docs/compatibility.py` writes docs/compatibility.md.

The results are those of the programs in tests that its sections name.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "compatibility.md"
TESTS = PAGE.parents[1] / "tests"
RESULTS = TESTS / "outside" / "transformers.json"
BATCHING = RESULTS.with_name("transformers_batching.json")
FRAMEWORKS = ("python", "numpy", "torch", "jax", "triton")
EXTRAS = ("matplotlib", "flax", "qwix", "transformers")
INTRO = """\
# Compatibility

For those who want to know whether frisket works with their versions, inside a package that they use, or with a model of
transformers. Written by `python docs/compatibility.py` from results of programs in `tests`, which each section names.

## Versions

A slice of the tests on a CPU, in environments made for it: `python tests/versions.py`. The lower bounds of
`pyproject.toml` are the oldest versions here. They have wheels for Python 3.12 too, and for 3.13 with numpy 2.1.0.
numpy 1.26 is tried without frameworks alone: JAX 0.10.0 asks for numpy 2, and environments with frameworks have JAX.
The newest torch of the table asks for Triton 3.8, so Triton 3.9 is not in it: `constraints.txt` names it with torch's
build for CPUs. The default tests run there. The last rows list other extras, and the tests that need them. `nnx.jit` of
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
"""
# verdict: heading, what it says, the columns beside the type and the model's class
SECTIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "equal": (
        "Equal",
        "All that was compared is equal to eager attention: outputs to 2e-4, gradients of every parameter to 2e-3 of "
        "their largest element, generated tokens exactly.",
        ("compared",),
    ),
    "as sdpa": (
        "As sdpa",
        "A result is that of transformers' sdpa, where sdpa and eager attention differ from each other.",
        ("compared", "why"),
    ),
    "differs": ("Different", "A result is not that of eager attention.", ("compared", "why")),
    "refused": ("Refused", "An error says what is not supported.", ("compared", "why")),
    "fails": ("Fails otherwise", "An error that is not frisket's.", ("compared", "why")),
    "its own": (
        "Attention that the model computes itself",
        "These models compute attention themselves and take no implementation from outside. They warn when they are "
        'made with `attn_implementation="frisket"`, and refuse `frisket_mask`.',
        ("why",),
    ),
    "no attention": (
        "No attention",
        "These models have no attention that asks for an implementation: convolutions, state spaces, Fourier mixing, "
        "codecs. frisket has no part in their results.",
        (),
    ),
    "no tiny model": (
        "Not compared",
        "No tiny configuration of these types works under eager attention here, so there is nothing to compare with: "
        "a type is a part of a larger model, needs a library that is not installed, or inputs and sizes that are not "
        "made from names alone. The error is that of eager attention.",
        ("why",),
    ),
}
SECTIONS["not run"] = (
    "Not run yet",
    "No result of this version of the plug-in: `python tests/outside/transformers_sweep.py TYPE ...` runs them.",
    (),
)
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


def row(kind: str, found: dict[str, Any], columns: tuple[str, ...]) -> str:
    model = found.get("model", "")
    cells = [f"`{kind}`", f"`{model}`" if model else ""]
    for column in columns:
        text = said(found.get("parts", [])) if column == "compared" else found.get("why", "")
        cells.append(text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*"))
    return "| " + " | ".join(cells) + " |"


def batching(types: dict[str, Any]) -> list[str]:
    """The section on continuous batching: types by what `generate_batch` gave."""
    found: dict[str, str] = json.loads(BATCHING.read_text(encoding="utf-8"))
    equal = [f"`{kind}`" for kind, why in found.items() if not why]
    generates = "generate, dynamic cache"
    count = sum(x["verdict"] == "equal" and generates in x["parts"] for x in types.values())
    others = {kind: {"why": why} for kind, why in found.items() if why}
    lines = [
        "### Continuous batching\n",
        '`generate_batch` under `attn_implementation="frisket"`, three prompts at once, in batches of at most 12 '
        "tokens, compared with eager attention of each prompt alone, without a cache; the tiny models of above whose "
        "`generate` is equal. Results of `python tests/outside/transformers_batching.py`. *transformers cannot* means "
        "that its own attention for continuous batching fails for the type as well.\n",
        f"{len(found)} of the {count} types have run.\n",
        f"Equal tokens, {len(equal)} types: {', '.join(equal)}.\n",
        "| type | what happens |",
        "|---|---|",
    ]
    rows = [row(kind, x, ("why",)).split(" | ", 2) for kind, x in others.items()]
    return [*lines, *(f"{first} | {last}" for first, _, last in rows), ""]


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


def page() -> str:
    """The whole page."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    types = results["types"]
    intro = {"versions": versions(), "packages": packages()}
    lines = [INTRO.format(transformers=results["transformers"], count=len(types), **intro)]
    lines += ["| verdict | model types |", "|---|---|"]
    kinds = {verdict: [k for k in types if types[k]["verdict"] == verdict] for verdict in SECTIONS}
    for verdict, (heading, _, _) in SECTIONS.items():
        lines.append(f"| {heading} | {len(kinds[verdict])} |")
    lines.append(
        "\n`all` means: outputs and gradients of every parameter; the same with padding on the left and on the right; "
        "`generate` through dynamic and static caches (sliding where the model has sliding windows) and from padded "
        "prompts; assisted decoding by prompt lookup; beam search with 3 beams. A part that the model cannot do under "
        "eager attention is left out.\n"
    )
    for verdict, (heading, text, columns) in SECTIONS.items():
        if not kinds[verdict]:
            continue
        titles = {"compared": "equal in", "why": "what happens"}
        lines += [f"### {heading}\n", text, ""]
        lines.append("| type | model | " + "".join(f"{titles[c]} | " for c in columns).rstrip())
        lines.append("|---|---|" + "---|" * len(columns))
        lines += [row(k, types[k], columns) for k in kinds[verdict]]
        lines.append("")
    return "\n".join([*lines, *batching(types)]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
