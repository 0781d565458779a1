"""The results of gpu.py: which rows are there, on which machine they were measured, and what they lack."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_parts import PARTS
from gpu_scale import Row, Scale
from store import keep

from frisket.runtime.bench import schema

SAME = ("gpu", "torch", "jax", "triton")  # of the run of a row that need not be measured again
Parts = dict[str, Any]  # of a file of results


def device() -> dict[str, Any]:
    """The GPU and what runs on it, for the head of a part."""
    if not torch.cuda.is_available():
        return {"gpu": "none: Triton's interpreter"}
    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name, "compute capability": f"{found.major}.{found.minor}", "cuda": torch.version.cuda,
        "multiprocessors": found.multi_processor_count, "memory_gb": round(found.total_memory / 1e9),
    }  # fmt: skip


def loaded(path: Path) -> Parts:
    """The parts of a file, none where there is no file. Rows that name no run are of the last run of their part."""
    parts: Parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    for part in parts.values():
        for row in part["rows"].values():
            row.setdefault("run", run_of(part["machine"], part.get("settings", {})))
    return parts


def run_of(machine: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """What a row says of the run that measured it."""
    return {n: x for n, x in {**machine, **settings}.items() if n in ("date", "rounds", *SAME)}


def file_of(folder: Path, gpu: str) -> str:
    """The name of the file for the rows of a GPU: "gpu", or with the GPU's name where gpu.json has those of another."""
    owners = {part["machine"]["gpu"] for part in loaded(folder / "gpu.json").values()}
    return "gpu" if owners <= {gpu} else "gpu-" + re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-")


def whole(part: str, name: str, parts: Parts) -> bool:
    """Whether a row was measured to its end, with all that is asked today."""
    here = parts.get(part, {"rows": {}})
    return name in here["rows"] and name not in here.get("notes", {}) and PARTS[part].whole(here["rows"][name])


def in_turn(part: str, names: Sequence[str], parts: Parts) -> list[str]:
    """Rows in the order in which they run: those that no machine has measured first, then those whose results lack what
    is asked today, then the others; those last for which something is not installed here."""
    known = parts.get(part, {}).get("rows", {})
    return sorted(names, key=lambda n: (PARTS[part].waits(n), 0 if n not in known else 1 + whole(part, n, parts)))


def lacking(part: str, names: Sequence[str], parts: Parts) -> list[str]:
    """Rows that no machine has measured, or whose results lack what is asked today."""
    return [n for n in in_turn(part, names, parts) if not whole(part, n, parts)]


def failures(row: Row) -> bool:
    """Whether a row has a case that failed."""
    return any(x.get("figures", {}).get("cases", {}).get("failed") for _, x in schema.leaves({"": row}))


def merged(before: Row, after: Row) -> Row:
    """An unfinished row, with the rows inside it that an earlier run of this machine measured and this one did not."""
    return {**after, "rows": {**before["rows"], **after["rows"]}} if "rows" in before and "rows" in after else after


class Results:
    """The file of this machine's GPU in a folder, written after every row."""

    def __init__(self, folder: Path, machine: dict[str, Any], scale: Scale) -> None:
        self.folder, self.machine, self.file = folder, machine, file_of(folder, machine["gpu"])
        self.settings = {"rounds": scale.rounds, "dtype": str(scale.dtype).removeprefix("torch.")}
        self.parts = loaded(folder / f"{self.file}.json")

    def done(self, part: str, name: str) -> bool:
        """Whether a row need not be measured again."""
        if not whole(part, name, self.parts) or failures(row := self.parts[part]["rows"][name]):
            return False
        return self.here(row, ("date", *SAME) if PARTS[part].of_the_day else SAME)

    def here(self, row: Row, same: Sequence[str] = SAME) -> bool:
        """Whether this machine has measured a row, with the versions that are installed now."""
        return all(row["run"].get(n) == self.machine.get(n) for n in same)

    def failed(self, part: str, name: str) -> bool:
        return str(self.parts.get(part, {}).get("notes", {}).get(name, "")).startswith("failed")

    def add(self, part: str, name: str, row: Row | None, lacks: str) -> None:
        """Keep a row, and what it lacks: "" where it is whole. Without a row an earlier one stays."""
        here = self.parts.setdefault(part, {"rows": {}})
        rows, notes = here["rows"], {n: x for n, x in here.get("notes", {}).items() if n != name}
        if row is not None:
            before = rows.get(name)
            row = merged(before, row) if lacks and before and self.here(before) else row
            rows[name] = {**row, "run": run_of(self.machine, self.settings)}
        here["notes"] = notes | ({name: lacks} if lacks else {})
        keep(self.file, part, rows, self.settings, notes=here["notes"], device=self.machine, folder=self.folder)
