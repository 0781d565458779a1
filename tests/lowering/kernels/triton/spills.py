"""The default tiles that spill, as docs/triton.md lists them."""

import re

from support.pages import DOCS

PAGE = DOCS / "triton.md"
TABULATED = ("sm_80", "sm_90", "sm_100", "gfx942")  # of what reports know, those with figures of all default tiles
ROW = r"\| (sm_\d+|gfx\d+) \| (\d+) \| (\w+) \| `attention_(\w+)` \| (\d+) \| (\d+) \|"


def listed():
    """(version of Triton, architecture, head size, mask, kernel): the bytes that spill."""
    found = {}
    for arch, dim, mask, kernel, old, new in re.findall(ROW, PAGE.read_text(encoding="utf-8")):
        found |= {(v, arch, int(dim), mask, kernel): int(n) for v, n in (("3.6", old), ("3.9", new)) if int(n)}
    return found
