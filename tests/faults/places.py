"""Caches on disks that are full, read only, noexec, or somebody else's."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from frisket.runtime.machine import cpp_build

from .machine import NotHereError, environment, folder, mounted, said, separate, source, whole

OTHER, THIRD = 65534, 65533  # users of whom nobody else is
BUILD = """
import os, sys, tempfile
tempfile.tempdir = os.environ["TMPDIR"]  # whether it can be written to or not
from frisket.runtime.machine import cpp_build
cpp_build.RETRY = cpp_build.LaterError.wait = 0
for number in map(int, sys.stdin.read().split()):
    try:
        found = cpp_build.library(f'extern "C" int answer() {{ return {number}; }}\\n')
        print(found.answer(), found._name)
    except cpp_build.BuildError as error:
        print("error", " ".join(str(error).split()))
"""
CALL = """
import os, sys, tempfile, warnings
tempfile.tempdir = os.environ["TMPDIR"]
warnings.simplefilter("always")
import torch, frisket as fk
from frisket.runtime.machine import cpp_build
cpp_build.RETRY = cpp_build.LaterError.wait = 0
q, k, v = torch.randn(3, 1, 2, 150, 16, generator=torch.Generator().manual_seed(1))
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
att = fk.compile("causal", engines=False)
def right(out):
    return (out - want).abs().max().item() < 1e-5
for freed in (False, True):
    with warnings.catch_warnings(record=True) as told:
        print("right" if right(att(q, k, v)) else "wrong", att.stages(q, k, v).target.backend)
    print(*{" ".join(str(w.message).split()) for w in told if "native" in str(w.message)})
    try:
        print("right" if right(fk.compile("causal", backend="cpp")(q, k, v)) else "wrong")
    except fk.BackendError as error:
        print("error", " ".join(str(error).split()))
    print("next", flush=True)
    if not freed:
        FREE
"""


def built(numbers: list[int], env: dict[str, str], **more) -> list[tuple[int | None, str]]:
    """(the answer, where its library is) of each kernel in a new process; None and the words of an error."""
    receive, give = os.pipe()
    os.write(give, " ".join(map(str, numbers)).encode())
    os.close(give)
    with os.fdopen(receive) as told:
        lines = said(BUILD, env, stdin=told, **more)
    parts = [line.partition(" ") for line in lines]
    found = [(None if first == "error" else int(first), rest) for first, _, rest in parts]
    for number, (answer, _) in zip(numbers, found, strict=True):
        assert answer in (number, None), f"kernel {number} says {answer}"
    return found


def clean(*places: Path) -> None:
    """Nothing half-written is left."""
    for place in places:
        for path in place.rglob("*"):
            assert path.suffix not in (".tmp", ".lock"), f"{path} is left behind"
            assert path.suffix != ".so" or whole(path), f"{path} is not whole"


def full(draw: random.Random) -> dict[str, int]:
    """A disk with room for some of what a build writes."""
    counts: Counter[str] = Counter()
    with mounted("size=256k,mode=700") as disk, folder() as elsewhere:
        cache, temporary = disk / "cache", disk / "temporary"
        for _ in range(2):
            shutil.rmtree(cache, ignore_errors=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            fill(disk, draw.randrange(0, 120_000))
            number = draw.randrange(1000)
            (found,) = built([number], environment(cache, TMPDIR=str(temporary)))
            counts["built" if found[0] == number else "refused"] += 1
            if found[0] is None:
                assert "No space left on device" in found[1], found
                assert "set FRISKET_CACHE_DIR to another directory" in found[1], found
            clean(disk)
            assert built([number], environment(cache, TMPDIR=str(elsewhere)))[0][0] == number
            clean(disk, elsewhere)
            counts["built elsewhere"] += 1
            (disk / "filler").unlink()
            assert built([number], environment(cache, TMPDIR=str(temporary)))[0][0] == number
    return counts


def fill(disk: Path, room: int) -> None:
    """Leave so many bytes, about, on a disk."""
    state = os.statvfs(disk)
    with open(disk / "filler", "wb") as file:
        file.write(bytes(max(0, state.f_bavail * state.f_bsize - room)))


def full_call(draw: random.Random) -> dict[str, int]:
    """A call on a full disk, and again in the same process when there is space."""
    with mounted("size=8m,mode=700") as disk:
        (disk / "temporary").mkdir()
        fill(disk, draw.randrange(0, 20_000))
        text = CALL.replace("FREE", f"os.unlink({str(disk / 'filler')!r})")
        lines = said(text, environment(disk / "cache", TMPDIR=str(disk / "temporary")))
        first, again = lines[: lines.index("next")], lines[lines.index("next") + 1 :]
        assert first[0] == "right aten", lines
        assert again[0] == "right cpp", lines
        assert again[2] == "right", lines
        for words in first[1:]:
            assert "No space left on device" in words, lines
            assert "set FRISKET_CACHE_DIR to another directory" in words, lines
        clean(disk)
    return {"calls": 4}


def read_only(draw: random.Random) -> dict[str, int]:
    """A cache that was filled before its disk became read only."""
    old, new = draw.sample(range(1000), 2)
    with mounted("size=8m,mode=700") as disk, folder() as elsewhere:
        cache = disk / "cache"
        built([old], environment(cache))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        found = built([old, new], environment(cache, TMPDIR=str(elsewhere)))
        assert found[0] == (old, str(next((cache / "native").glob("*.so")))), found
        assert found[1][0] == new, found
        assert found[1][1].startswith(str(elsewhere)), found
        refused = built([old, new + 1000], environment(cache, TMPDIR=str(disk)))
        assert refused[0][0] == old, refused
        assert refused[1][1].count("cannot be written to") + refused[1][1].count("Read-only file system") == 2, refused
        clean(elsewhere)
    return {"found": 2, "built elsewhere": 1, "refused": 1}


def no_exec(draw: random.Random) -> dict[str, int]:
    """A disk from which nothing can be loaded as code."""
    number = draw.randrange(1000)
    with mounted("size=8m,mode=700,noexec") as disk, folder() as elsewhere:
        cache = disk / "cache"
        for _ in range(2):  # built, then found
            ((found, where),) = built([number], environment(cache, TMPDIR=str(elsewhere)))
            assert found == number, where
            assert where.startswith(str(elsewhere)), where
        ((found, words),) = built([number], environment(cache, TMPDIR=str(disk)))
        assert found is None, words
        assert "failed to map segment" in words, words
        assert "set FRISKET_CACHE_DIR to another directory" in words, words
        clean(disk, elsewhere)
        assert not [*disk.rglob("*.so")], "what nobody can load stays"
    return {"built elsewhere": 1, "found": 1, "refused": 1}


# -- folders and files of others -----------------------------------------------------------------------------------


def planted(native: Path, number: int, env: dict[str, str]) -> Path:
    """A library that says 666, whole, under the name of another kernel: somebody knows how to make one."""
    built([666], env)
    (made,) = native.glob("*.so")
    name = name_of(number, env)
    content = made.read_bytes()[: -cpp_build.DIGEST]
    made.rename(made.with_name(f"{name}.so"))
    made.with_suffix(".cpp").unlink()
    forged = native / f"{name}.so"
    forged.write_bytes(content + cpp_build._digest(name, content))
    return forged


def name_of(number: int, env: dict[str, str]) -> str:
    text = f"from frisket.runtime.machine import cpp_build; print(cpp_build._sought({source(number)!r}, 'native')[0])"
    return said(text, env)[0]


# what somebody did to the folder and the file -> whether the file may be loaded by the user OTHER
OWNERS: dict[str, tuple[Callable[[Path], object], bool]] = {
    "both are this user's": (lambda so: None, True),
    "both are root's": (lambda so: [os.chown(x, 0, 0) or x.chmod(0o755) for x in (so.parent, so)], True),
    "the folder is a third user's": (lambda so: os.chown(so.parent, THIRD, THIRD) or so.parent.chmod(0o755), False),
    "the file is a third user's": (lambda so: os.chown(so, THIRD, THIRD) or so.chmod(0o755), False),
    "a group writes the folder": (lambda so: so.parent.chmod(0o770), False),
    "anybody writes the folder": (lambda so: so.parent.chmod(0o707), False),
    "a group writes the file": (lambda so: so.chmod(0o660), False),
    "anybody writes the file": (lambda so: so.chmod(0o606), False),
    "root's, and not to be read": (lambda so: os.chown(so.parent, 0, 0), False),
}


def owners(draw: random.Random) -> dict[str, int]:
    """Folders and files of another user, or that others may write to, as a user who is not root sees them."""
    if os.geteuid():
        raise NotHereError("only root can be several users")
    counts: Counter[str] = Counter()
    for how, (work, trusted) in OWNERS.items():
        with folder() as place:
            place.chmod(0o755)
            cache, number = place / "home" / "cache", draw.randrange(600)
            cache.parent.mkdir()
            forged = planted(cache / "native", number, environment(cache))
            for path in (cache.parent, cache, forged.parent, forged):
                os.chown(path, OTHER, OTHER)
                path.chmod(0o700 if path.is_dir() else 0o600)
            work(forged)
            found = separate(as_other, number, cache)["answer"]
            assert found == (666 if trusted else number), f"{how}: {found}"
            counts["trusted" if trusted else "not trusted"] += 1
    return counts


def as_other(number: int, cache: Path) -> dict[str, int]:
    """The answer of a kernel, as the user OTHER gets it."""
    os.setgroups([])
    os.setgid(OTHER)
    os.setuid(OTHER)
    os.environ.update(environment(cache))
    tempfile.tempdir = str(cache.parent)
    os.environ.pop("CXX", None)
    return {"answer": cpp_build.library(source(number)).answer()}


def links(draw: random.Random) -> dict[str, int]:
    """Links in the place of the cache and of its files."""
    number = draw.randrange(600)
    with folder() as place:
        (place / "real").mkdir(mode=0o700)
        (place / "temporary").mkdir(mode=0o700)
        cache, env = place / "cache", environment(place / "cache", TMPDIR=str(place / "temporary"))
        cache.symlink_to("real")
        assert built([number], env)[0] == (number, str(cache / "native" / f"{name_of(number, env)}.so"))
        for target in ("nowhere/at/all", "cache"):  # to nothing, and round in a circle
            cache.unlink()
            cache.symlink_to(target)
            ((found, where),) = built([number], env)
            assert found == number, where
            assert where.startswith(str(place / "temporary")), where
            shutil.rmtree(place / "temporary")
            (place / "temporary").mkdir(mode=0o700)
        cache.unlink()
        # files of the cache as links to files elsewhere: those stay as they are
        native = cache / "native"
        native.mkdir(parents=True, mode=0o700)
        cache.chmod(0o700)
        precious = place / "precious"
        precious.write_text("precious")
        for suffix in (".so", ".cpp", ".lock"):
            (native / f"{name_of(number, env)}{suffix}").symlink_to(precious)
        assert built([number], env)[0][0] == number
        assert precious.read_text() == "precious"
        assert not any(x.is_symlink() for x in native.iterdir())
        clean(place)
        if os.geteuid() == 0:
            shutil.rmtree(place / "temporary")
            (place / "temporary").mkdir(mode=0o700)
            native.rename(place / "moved")
            native.symlink_to(place / "moved")
            os.lchown(native, OTHER, OTHER)  # it may lead elsewhere by the time that something is loaded
            ((found, where),) = built([number], env)
            assert found == number, where
            assert where.startswith(str(place / "temporary")), where
    return {"links": 7}


FAULTS = {
    "disk-full": (full, 20),
    "disk-full-in-a-call": (full_call, 2),
    "read-only": (read_only, 3),
    "noexec": (no_exec, 3),
    "owners": (owners, 1),
    "links": (links, 1),
}
