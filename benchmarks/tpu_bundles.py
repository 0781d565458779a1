"""Bundles of TPU kernels by libtpu's own schedules: compiled for TPUs that are not here, ours and splash attention's.

A bundle is what a core issues in a cycle. The kernels of Pallas are loops over the steps of a grid; in the text of a
schedule a branch skips what a step does not do. So a loop falls into the tile itself (it has products of the matrix
unit; ours has two, without the mask and with it), what begins and what ends a row, and the rest, which every step
takes. A kernel's total is these by the exact numbers of steps, rows and tiles. Waits for memory and for results are no
bundles: this is a lower bound, the same for both. Needs the extra `tpu-compile`.
"""

from __future__ import annotations

import atexit
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LEAST = 60  # bundles that a branch skips, from where on it is a part of its own
_LINE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF|CT)?\s*:\s*([> ]*)\{(.*)")


class Schedule(NamedTuple):
    """Bundles of a kernel: of every step, of each kind of tile, of the begin and the end of a row, and the loops inside
    the loop, each of which is counted once."""

    step: int
    tiles: tuple[int, ...]
    row: int
    loops: int

    def total(self, steps: int, rows: int, tiles: Sequence[int]) -> int:
        """Bundles of a head, with so many tiles of each kind."""
        return steps * self.step + rows * self.row + sum(n * each for n, each in zip(tiles, self.tiles, strict=True))


def read(text: str) -> Schedule:
    """The schedule in a text of libtpu's.

    >>> body = [f"0x{i:x} : > {{ %1 = vmatmul }}" for i in range(3, 100)]
    >>> lines = ["0x1 LB: > { %0 = nop }", "0x2 : > { %9 = sbr.rel (%p0) target = $region7 }", *body]
    >>> read("\\n".join([*lines, "0x64 PF: > { %2 = nop } /* Start/End empty region 7 */"]))
    Schedule(step=3, tiles=(97,), row=0, loops=0)
    """
    lines = [found.groups() for line in text.splitlines() if (found := _LINE.match(line))]
    inside = [i for i, (_, depth, _) in enumerate(lines) if ">" in depth]
    ends: dict[str, int] = {}
    for i, (_, _, bundle) in enumerate(lines):
        for region in re.findall(r"(?:Start/End empty region|End region) (\d+)", bundle):
            ends.setdefault(region, i)
    skipped = []
    for i in inside:
        branch = re.search(r"sbr\.rel \([^)]*\) target = \$region(\d+)", lines[i][2])
        end = ends.get(branch[1], 0) if branch else 0
        if end - i > LEAST:
            skipped.append((i + 1, end))
    parts = [p for p in skipped if not any(p != o and p[0] <= o[0] and o[1] <= p[1] for o in skipped)]
    tiles = [any("vmatmul" in bundle for _, _, bundle in lines[begin:end]) for begin, end in parts]
    sizes = [end - begin for begin, end in parts]
    of_tiles = tuple(size for size, tile in zip(sizes, tiles, strict=True) if tile)
    whole = inside[-1] - inside[0] + 1
    loops = sum(tag == "LB" for tag, _, _ in lines) - 1
    return Schedule(whole - sum(sizes), of_tiles, sum(sizes) - sum(of_tiles), loops)


@cache
def folder() -> Path:
    """Where libtpu writes its schedules; to be asked before libtpu is loaded, which reads its arguments once."""
    made = tempfile.TemporaryDirectory(prefix="bundles-")
    atexit.register(made.cleanup)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no machine of a cloud to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    wanted = (
        f"--xla_jf_dump_to={made.name} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {wanted}".strip()
    return Path(made.name)


def schedules(tpu: str, call: Callable[..., Any], shapes: Callable[[Any], Any]) -> dict[str, Schedule]:
    """The schedules of the kernels in a call, by their names, of arguments `shapes` gives for a sharding."""
    import jax
    from jax.experimental import topologies

    dumped = folder()
    device = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[tpu]).devices[0]
    arguments = shapes(jax.sharding.SingleDeviceSharding(device))
    known = set(dumped.iterdir())
    jax.jit(call).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    texts = {path: path.read_text() for path in set(dumped.iterdir()) - known if "schedule" not in path.name}
    for path in texts:
        path.unlink()
    return {path.name.split("-")[1].split(".")[0]: read(text) for path, text in texts.items() if "vmatmul" in text}
