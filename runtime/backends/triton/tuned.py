"""Tiles that `frisket tune` measured on a GPU, kept on disk.

An entry is a file with the tiles of one kind of call (`tiles.kind_of`). A kind is a device's name, versions of Triton
and frisket, dtype, head sizes, the class of the mask, and lengths up to the next power of two. The first line is the
digest of the rest. An entry that other users may write to, whose digest differs, or whose tiles no kernel can have is
not used, and a warning says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import frisket
from frisket.grammar.memo import Memo
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.runtime.machine.caller import warn_once
from frisket.runtime.machine.cpp_build import directories, ours, put, writable
from frisket.runtime.machine.settings import Settings

KERNELS = ("forward", "dq", "dkv")
SIDES, WARPS, STAGES = (16, 32, 64, 128, 256), (1, 2, 4, 8, 16), range(1, 9)
Tile = tuple[int, int, int, int]  # queries, keys, warps, stages
Key = tuple[tuple[str, Any], ...]  # the facts of a kind of call, by name
_known = Memo("tiles that were measured", 256)
_unused: ContextVar[bool] = ContextVar("measured tiles are not used", default=False)


@dataclass(frozen=True)
class MeasuredTiles:
    """The fastest tile of each kernel that was raced, and the day of the race."""

    tiles: Mapping[str, Tile]
    date: str

    def applied(self, target: Target) -> Target:
        """A target with these tiles; parts that were not raced stay."""
        source = f"measured on this GPU on {self.date} by frisket tune"
        parts: dict[str, Any] = {}
        for name, tile in self.tiles.items():
            part = target if name == "forward" else getattr(target, name) or replace(target, dq=None, dkv=None)
            numbers: dict[str, Any] = dict(zip(("block_q", "block_k", "num_warps", "num_stages"), tile, strict=True))
            if name == "forward":
                target = replace(target, measured=source, **numbers)
            else:
                parts[name] = replace(part, measured=source, decode=None, dv=None, **numbers)
        dv: dict[str, Any] = {"dv": None} if "dkv" in parts else {}  # one kernel was raced for both
        return replace(target, **parts, **dv)


@contextmanager
def without() -> Iterator[None]:
    """Inside, calls take no measured tiles."""
    before = _unused.set(True)
    try:
        yield
    finally:
        _unused.reset(before)


def device_name(device: Any) -> str:
    """The name of a torch device's GPU, of the current one where none is named; "" without one."""
    import sys

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_name(device if getattr(device, "type", "") == "cuda" else None))


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    triton = ""
    with suppress(PackageNotFoundError):
        triton = version("triton")
    return {"triton": triton, "frisket": frisket.__version__}


def up_to(length: int) -> int:
    """The next power of two."""
    return 1 << max(0, int(length) - 1).bit_length()


def tiles_of(key: Key) -> MeasuredTiles | None:
    """The measured tiles of a kind of call; None without an entry, or where FRISKET_TUNED=0."""
    if _unused.get() or not Settings.read().tuned or not dict(key)["device"]:
        return None
    where = key, Settings.read().cache_dir
    known = _known.get(where)
    if known is None:
        known = _known.put(where, (_read(key),))
    return known[0]  # type: ignore[no-any-return]


def keep(key: Key, tiles: Mapping[str, Tile], date: str) -> Path | None:
    """Keep the tiles of a kind of call, and other kernels' tiles of its entry. None where no folder can be written
    to."""
    folder = writable("tuned")
    if folder is None:
        return None
    earlier = _read(key)
    merged = {**(earlier.tiles if earlier is not None else {}), **tiles}
    body = json.dumps({"key": [list(x) for x in key], "tiles": merged, "date": date}, sort_keys=True).encode()
    put(path := folder / _file(key), sha256(body).hexdigest().encode() + b"\n" + body)
    _known.clear()
    return path


def _file(key: Key) -> str:
    return f"{sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"


def _read(key: Key) -> MeasuredTiles | None:
    for folder in directories("tuned"):
        path = folder / _file(key)
        if not path.exists():
            continue
        try:
            return _parsed(path, key)
        except (ValueError, TypeError, KeyError, OSError) as error:
            why = str(error) or type(error).__name__
            warn_once(f"{path} is not used: {why}\n  delete it, and run `frisket tune` again")
    return None


def _parsed(path: Path, key: Key) -> MeasuredTiles:
    if not (ours(path) and ours(path.parent)):
        raise ValueError("others may write to it")
    digest, _, body = path.read_bytes().partition(b"\n")
    if sha256(body).hexdigest().encode() != digest:
        raise ValueError("its digest differs from its contents")
    entry = json.loads(body)
    if entry["key"] != json.loads(json.dumps([list(x) for x in key])):
        raise ValueError("it is about other calls")
    tiles = {str(n): tuple(x) for n, x in entry["tiles"].items()}
    for name, (queries, keys, warps, stages) in tiles.items():
        if name not in KERNELS or queries not in SIDES or keys not in SIDES:
            raise ValueError(f"{name} has no tile of {queries} x {keys}")
        if warps not in WARPS or stages not in STAGES:
            raise ValueError(f"{name} has no tile of {warps} warps and {stages} stages")
    return MeasuredTiles(tiles, str(entry["date"]))
