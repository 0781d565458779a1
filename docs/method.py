"""The tables of docs/method.md, from benchmarks/results: `python docs/method.py` writes them between their comments.

`python docs/method.py --pdf docs/assets/method.pdf` prints the page with chromium. The title of the PDF has a checksum
of the text that it was made of.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import performance  # noqa: E402

PAGE, PDF = HERE / "method.md", HERE / "assets" / "method.pdf"
MARK = re.compile(r"(<!-- (\w+), written by docs/method\.py -->\n).*?(<!-- end -->)", re.S)
MASKS = {  # of the page -> rows of an H100
    "causal": "causal", "no mask": "full", "window of 1,024": "window 1024", "window of 128": "window 128",
    "12 documents": "12 documents", "documents of 512": "documents of 512", "prefix": "prefix",
    "sinks and window of 1,024": "sinks, window 1024", "causal, soft cap": "softcap, causal",
    "causal, ALiBi": "ALiBi, causal",
}  # fmt: skip
SIZES = {"forward": (64, 128, 256), "backward": (64, 128)}
STYLE = """
@page { size: A4; margin: 15mm 17mm 14mm }
body { font: 9.2pt/1.33 "DejaVu Serif", Georgia, serif; color: #111; text-align: justify; hyphens: auto }
h1, h2, h3 { font-family: "DejaVu Sans", Arial, sans-serif; text-align: left; break-after: avoid }
h1 { font-size: 18pt; margin: 0 0 2mm }
h2 { font-size: 12.5pt; margin: 4mm 0 1.3mm }
h3 { font-size: 10.2pt; margin: 3mm 0 1mm }
p, ul, ol { margin: 0 0 1.8mm }
li { margin: 0 0 .5mm }
a { color: inherit; text-decoration: none }
img { display: inline-block; width: 47%; margin: 0 1% }
img[src$=svg] { display: block; width: 82%; margin: 0 auto }
pre, table, img { break-inside: avoid }
pre { background: #f3f3f3; padding: 1.5mm 2mm; margin: 0 0 1.8mm; white-space: pre-wrap; text-align: left }
code { font: 8.1pt "DejaVu Sans Mono", monospace }
table { border-collapse: collapse; margin: 1mm auto 2.5mm; font-size: 8pt; text-align: left }
table code { font-size: 7.2pt }
th, td { padding: .35mm 1.8mm; border-bottom: .2pt solid #999 }
thead th { border-bottom: .8pt solid #111 }
"""


def parts(file: str) -> dict[str, Any]:
    return json.loads((performance.RESULTS / f"{file}.json").read_text(encoding="utf-8"))["parts"]  # type: ignore[no-any-return]


def table(head: Iterable[str], rows: Iterable[Iterable[str]], words: int = 1) -> str:
    """A table whose first `words` columns are texts."""
    return "\n".join(performance.table([*head], [[*row] for row in rows], words)).rstrip()


def spread(file: str, part: str, rows: str, pair: str) -> str:
    """The range of a ratio over the rows whose names match; empty without any."""
    found = performance.multiples(parts(file), part, rows, pair)
    text = performance.spread(pair, found) if found else ""
    return re.sub(r" \*\*slower in (\d+) of (\d+) rows\*\*", r" (slower in \1 of \2)", text)


def over(peer: str, masks: Iterable[str]) -> str:
    """Speed-ups over a peer on an H100, by mask, direction and head size."""
    columns = [(way, size) for way, sizes in SIZES.items() for size in sizes]
    return table(
        ["mask", *(f"{way}, D {size}" for way, size in columns)],
        [
            [
                m,
                *(
                    spread("gpu", "speed", f"{way}: {MASKS[m]}, D {size}, \\d+", f"{peer} / frisket")
                    for way, size in columns
                ),
            ]
            for m in masks
        ],
    )


def cpu() -> str:
    rows = [x for x in performance.HEADLINES if x.file.startswith("cpu-")]
    body = []
    for x in rows:
        part = parts(x.file)[x.part]
        dtype = part["settings"].get("dtype", "") if x.dtype is None else x.dtype
        peer = x.pair.partition(" / ")[0]
        on = ", ".join(filter(None, (performance.device(part), dtype)))
        body.append([x.words, on, performance.PEERS.get(peer, peer), spread(x.file, x.part, x.rows, x.pair)])
    return table(["what", "machine", "peer", "speed-up"], body, 3)


def planning() -> str:
    body = []
    for names, row in performance.schema.leaves(parts("layout")["peers"]["rows"]):
        peer = names[-1].split()[-1]
        (pair, (ratio, *_)) = next(iter(row["ratios"].items()))
        ms = row["figures"]["ms"]
        numbers = [performance.number(ms[pair.partition(" / ")[0]]), performance.number(ms["frisket"])]
        body.append([names[0], f"`{peer}`", *numbers, performance.number(ratio)])
    for names, row in performance.schema.leaves(parts("tpu-tables")["tables"]["rows"]):
        if "ratios" in row and names[-1].startswith("16,"):
            ms = row["figures"]["ms"]
            pair = [performance.number(x) for x in (ms["splash"], ms["frisket"], row["ratios"]["splash / frisket"][0])]
            body.append([f"{names[0]}, {names[-1]}, all tables", "`process_mask`", *pair])
    return table(["mask", "peer", "peer, ms", "frisket, ms", "speed-up"], body, 2)


def splash() -> str:
    body = []
    found = parts("tpu-tables")
    for mask in found["v5e"]["rows"]:
        cells = []
        for way in ("forward", "backward"):
            for kind in ("v5e", "v5p", "v6e"):
                row = found[kind]["rows"][mask]["rows"].get(f"8,192 tokens, {way}")
                cells.append(f"{1 / row['ratios']['frisket / splash'][0]:.2f}" if row else "")
        body.append([mask, *cells])
    return table(
        ["mask, 8,192 tokens", *(f"{w}, {k}" for w in ("forward", "backward") for k in ("v5e", "v5p", "v6e"))], body
    )


def layouts() -> str:
    body = []
    for mask, row in parts("layout")["targets"]["rows"].items():
        figures = row["figures"]["ms"]["again"], row["figures"]["MB at most"]["held"]
        method = row["notes"]["method"].replace("bounds", "curves")
        body.append([mask, method, *map(performance.number, figures)])
    return table(["mask", "method", "ms", "MB at most"], body, 2)


def library() -> str:
    leaves = [*performance.schema.leaves(parts("layout")["library"]["rows"])]
    rows, body, left_out = [(n[-1], x) for n, x in leaves if "figures" in x], [], defaultdict(dict)
    for names, x in leaves:
        if why := x["notes"].get("not measured"):
            left_out[why][f"`{names[0]}`"] = None
    for length in dict.fromkeys(n for n, _ in rows):
        notes = [x["notes"] for n, x in rows if n == length]
        ms = [x["figures"]["ms"]["again"] for n, x in rows if n == length]
        solved = sum(x["method"] != "coarse to fine" for x in notes)
        pairs = sum(bool(x["figures"]["tiles settled one by one"]["all"]) for n, x in rows if n == length)
        exact = sum(bool(x["exact"]) for x in notes)
        body.append(
            [length, *map(str, (len(notes), exact, solved, pairs)), *map(performance.number, (median(ms), max(ms)))]
        )
    head = ["length", "masks", "exact", "by curves alone", "with tiles evaluated", "median, ms", "slowest, ms"]
    reasons = "; ".join(f"{' and '.join(names)}, {why}" for why, names in left_out.items())
    return f"{table(head, body)}\n\nLonger sequences leave out masks whose tables would be too large: {reasons}."


def page_rows(page: str, mark: str) -> list[list[str]]:
    """The rows of a table that another script writes, without its head."""
    text = (HERE / page).read_text(encoding="utf-8").split(f"<!-- {mark}", 1)[1].split("<!-- end -->")[0]
    return [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", text, re.M)][2:]


def campaigns() -> str:
    words = {
        "meaning": "meaning of a text", "layout": "kinds of all tiles", "simplifier": "simplified expressions",
        "gradients": "outputs and gradients", "kernels": "C++ kernels", "answers": "implications and counts",
    }  # fmt: skip
    rows = {row[0].strip("`"): row[1:] for row in page_rows("reliability.md", "totals")}
    return table(
        ["compared with dense evaluation", "random cases", "failed"], [[text, *rows[n]] for n, text in words.items()]
    )


def orders() -> str:
    return table(["mask", "unordered", "NATTEN, STA", "frisket"], page_rows("reordering.md", "papers"))


def reorder() -> str:
    rows = parts("reorder")["orders"]["rows"]
    names = dict.fromkeys(n.rpartition(", ")[0] for n in rows)
    ways = ("forward", "forward and backward")
    cells = [[performance.ratio(rows[f"{n}, {way}"]["ratios"]["unordered / order"]) for way in ways] for n in names]
    return table(["mask", *ways], [[n, *x] for n, x in zip(names, cells, strict=True)])


TABLES: dict[str, Callable[[], str]] = {
    "campaigns": campaigns, "layouts": layouts, "library": library, "orders": orders, "reorder": reorder,
    "flex": lambda: over("flex", MASKS), "cudnn": lambda: over("SDPA cudnn", ("causal", "no mask")), "cpu": cpu,
    "planning": planning, "splash": splash,
}  # fmt: skip


def page() -> str:
    """The page with its tables as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    return MARK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


def document() -> str:
    """The page as HTML for print. Links to other pages are text."""
    from markdown import markdown

    from frisket import __version__

    text = re.sub(r"<!--.*?-->\n?", "", page()).replace(" [As a PDF](assets/method.pdf), from the same source.", "")
    text = re.sub(r"(?<!!)\[([^\]]+)\]\([^)]+\)", r"\1", text)
    text = re.sub(r"(!\[[^\]]*\]\()", rf"\1{HERE.as_uri()}/", text)
    text = re.sub(r"\n(\*(?:Proof|Evidence))", r"<br>\n\1", text)
    text = text.replace("# Method\n", f"# frisket: attention masks as programs\n\nMethod, version {__version__}\n", 1)
    body = markdown(text, extensions=["tables", "fenced_code", "sane_lists"])
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>{checksum()}</title><style>{STYLE}</style>{body}"


def checksum() -> str:
    """The title of a current PDF."""
    return f"frisket method {hashlib.sha256((page() + STYLE).encode()).hexdigest()[:16]}"


def main() -> None:
    command = argparse.ArgumentParser(description="Write the tables of docs/method.md.")
    command.add_argument("--pdf", type=Path, metavar="OUT", help="print the page to a PDF")
    options = command.parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    if options.pdf is None:
        return
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("no chromium prints the page: apt-get install -y chromium")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "method.html"
        source.write_text(document(), encoding="utf-8")
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-pdf-header-footer",
            f"--user-data-dir={folder}/user",
        ]
        subprocess.run(
            [browser, *flags, f"--print-to-pdf={options.pdf.resolve()}", source.as_uri()],
            check=True,
            capture_output=True,
        )


if __name__ == "__main__":
    main()
