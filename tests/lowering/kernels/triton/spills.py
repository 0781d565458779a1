"""The default tiles that spill, as benchmarks/notes/triton.md lists them."""

import re

from support.pages import DOCS

PAGE = DOCS.parent / "benchmarks" / "notes" / "triton.md"
TABULATED = ("sm_80", "sm_90", "sm_100", "gfx942")  # of what reports know, those with figures of all default tiles
OTHERS = ("sm_75", "sm_86", "sm_87", "sm_89", "sm_110", "sm_120", "sm_121")  # those with figures of a causal mask
CAUSAL = ("gfx90a", "gfx950", "gfx1100", "gfx1201")  # of AMD's those with figures of a causal mask
ROW = r"\| (sm_\d+|gfx\w+) \| (\d+) \| (\w+) \| `attention_(\w+)` \| (\d+) \| (\d+) \|"


def listed():
    """(version of Triton, architecture, head size, mask, kernel): the bytes that spill."""
    found = {}
    for arch, dim, mask, kernel, old, new in re.findall(ROW, PAGE.read_text(encoding="utf-8")):
        found |= {(v, arch, int(dim), mask, kernel): int(n) for v, n in (("3.6", old), ("3.9", new)) if int(n)}
    return found
