"""Golden planners: a language keeps one text whole, for sorted documents; for other masks, unified diffs against it."""

from difflib import unified_diff

from support import masks

from frisket.dsl.ir import lookup
from frisket.dsl.sugar import k, q
from frisket.lowering.planner.planner import planner

WHOLE = "sorted_documents"
WINDOW = (q >= k) & (q - k < lookup("w", (masks.h,)))
NAMES = (WHOLE, "documents", "window_by_table")


def made(name):
    mask = WINDOW if name == "window_by_table" else masks.written()["documents"]
    return planner(mask, frozenset({"doc"}) if name == WHOLE else frozenset())


def check(golden, name, suffix, printed, prefix=""):
    """`suffix` is that of the language; `printed` writes the text of a planner."""
    text = printed(made(name))
    if name == WHOLE:
        return golden(f"{prefix}{name}{suffix}", text)
    whole = printed(made(WHOLE)).splitlines()
    diff = unified_diff(whole, text.splitlines(), WHOLE, name, n=1, lineterm="")
    return golden(f"{prefix}{name}.diff", "\n".join(diff) + "\n")
