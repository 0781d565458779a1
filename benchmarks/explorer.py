"""From a keystroke to the picture in `frisket explore`: `python benchmarks/explorer.py`. Needs chromium on the PATH.

A character goes to a browser without a window as a keyboard sends it, and changes the mask; the clock of the page runs
from the event's time to the end of the frame with the new picture, facts and cost. The masks take turns, in another
order each round. "analysis" is the server's share; "least" is the round in which nothing else ran. Browser, server and
analysis share one machine.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
from store import keep, shown
from support import browser

from frisket.runtime.explore.server import Analyst, Server
from frisket.runtime.explore.server import page as page_of

TOKENS, DOCUMENTS = 131_072, 200
GOAL = 100.0  # milliseconds
# mask: what stands there, the place where something is typed, and what is
CASES = {
    "causal & window(4096)": ("causal & window(409)", -1, "6"),
    "causal & same(doc)": ("causal & same(do)", -1, "c"),
    "prefix(1024) | window(4096) | dilated(8192, 64)": ("prefix(1024) | window(409) | dilated(8192, 64)", 25, "6"),
}
QUIET = "under === null && !waiting && document.documentElement.dataset.ready === 'yes'"


def typed(page: browser.Page, name: str) -> tuple[float, float]:
    """Milliseconds from one keystroke to the picture, and of them the analysis."""
    text, place, character = CASES[name]
    place = place if place >= 0 else len(text) + place
    page.evaluate(f"write({text!r})")
    page.until(QUIET)
    page.settle()
    page.evaluate(f"$('source').setSelectionRange({place}, {place}), performance.clearMeasures()")
    page.type(character)
    page.until("performance.getEntriesByName('repaint').length > 0")
    assert page.evaluate("$('source').value") == name
    assert page.evaluate("wanted.length === 0 && found.data.kvLen") == TOKENS, "the picture was not whole"
    spent = page.evaluate("performance.getEntriesByName('repaint')[0].duration")
    analysis = re.search(r"analysis([\d.]+) ms", page.text("#cost"))
    return spent, float(analysis[1])


def measured(page: browser.Page, rounds: int) -> dict[str, list[tuple[float, float]]]:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    order, draw = list(CASES), random.Random(0)
    for i in range(rounds + 2):  # two to warm up
        draw.shuffle(order)
        for name in order:
            found = typed(page, name)
            if i >= 2:
                times[name].append(found)
    return times


def row(times: list[tuple[float, float]]) -> dict:
    spent, analysis = zip(*times, strict=True)
    figures = {
        "least": min(spent),
        "median": statistics.median(spent),
        "95 of 100": statistics.quantiles(spent, n=20, method="inclusive")[-1],
        "analysis, median": statistics.median(analysis),
    }
    rounded = {n: round(x, 1) for n, x in figures.items()}
    return {"figures": {"ms": rounded}, "goals": {"at most": {"ms": {"median": GOAL}}}}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=31)
    rounds, load = options.parse_args().rounds, os.getloadavg()[0]
    doc = np.sort(np.random.default_rng(0).integers(0, DOCUMENTS, TOKENS)).astype(np.int32)
    state = {
        "text": "causal", "values": {}, "q_len": TOKENS, "kv_len": TOKENS, "batch": 1, "heads": 1,
        "block": [128, 128], "documents": 8,
    }  # fmt: skip
    with Server(Analyst({"doc": doc}), lambda nonce: page_of(state, {"doc": doc}, nonce)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with browser.Page(origin=server.url.rsplit("/", 2)[0]) as page:
                page.go(server.url)
                named = page.ask("Browser.getVersion")["product"]
                times = measured(page, rounds)
        finally:
            server.shutdown()
            thread.join()
    rows = {name: row(found) for name, found in times.items()}
    for name, found in rows.items():
        print(shown(name, found))
    settings = {
        "tokens": TOKENS, "documents": DOCUMENTS, "window": [1280, 800], "browser": named, "rounds": rounds,
        "processes that wait to run": round(load, 1),  # 0 on a machine of its own
    }  # fmt: skip
    keep("explorer", "keystroke", rows, settings)


if __name__ == "__main__":
    main()
