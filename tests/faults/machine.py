"""Caches, compilers, mounts and processes that faults share."""

from __future__ import annotations

import ctypes
import fcntl  # noqa: F401 (imported before a process becomes another user, who may not read it)
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from frisket.runtime.machine import cpp_build

LIMIT = 600  # seconds for a process


class NotHereError(Exception):
    """This machine cannot have the fault."""


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder in memory, where there is such a place."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="frisket-faults-", dir=place, ignore_cleanup_errors=True) as made:
        yield Path(made)


@contextmanager
def mounted(options: str) -> Iterator[Path]:
    """A file system of its own in memory."""
    with folder() as place:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode:
            raise NotHereError(f"mounting is not allowed here: {done.stderr.strip()}")
        try:
            yield place
        finally:
            for _ in range(50):
                if subprocess.run(["umount", str(place)], capture_output=True).returncode == 0:
                    break
                time.sleep(0.1)


def script(path: Path, text: str) -> str:
    """A program of sh, and its name."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\n{text}\n')
    path.chmod(0o755)
    return str(path)


def environment(cache: Path, **more: str) -> dict[str, str]:
    """The environment of a process with this cache and no settings of the caller's."""
    kept = {n: x for n, x in os.environ.items() if not n.startswith(("FRISKET_", "CXX", "OMP_"))}
    own = {"FRISKET_CACHE_DIR": str(cache), "TMPDIR": str(cache.parent), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2"}
    return {**kept, **own, **more}


def python(text: str, env: dict[str, str], arguments: tuple[str, ...] = (), **more) -> subprocess.CompletedProcess:
    """Run a text in a group of processes of its own, all of which are ended after `LIMIT` seconds."""
    began = subprocess.Popen(
        [sys.executable, "-c", text, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, **more,
    )  # fmt: skip
    try:
        out, err = began.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        end(began.pid)
        out, err = began.communicate()
        raise AssertionError(f"no end after {LIMIT} seconds:\n{out[-2000:]}{err[-2000:]}") from None
    return subprocess.CompletedProcess(text, began.returncode, out, err)


def said(text: str, env: dict[str, str], **more) -> list[str]:
    """The lines that a text prints, which ends well."""
    done = python(text, env, **more)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout.splitlines()


def end(group: int) -> None:
    """End all processes of a group that this program has made."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def separate(function, *given) -> Counter[str]:
    """Run a function in a forked process, whose environment and children are its own."""
    receive, give = os.pipe()
    pid = os.fork()
    if pid == 0:
        words = "no words"
        try:
            words = json.dumps(function(*given))
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        finally:
            os.write(give, words.encode())
            os._exit(0)
    os.close(give)
    with os.fdopen(receive) as file:
        words = file.read()
    os.waitpid(pid, 0)
    assert words.startswith("{"), words
    return Counter(json.loads(words))


def whole(library: Path) -> bool:
    """Whether a library on disk has its checksum behind it."""
    held = library.read_bytes()
    return held[-cpp_build.DIGEST :] == cpp_build._digest(library.stem, held[: -cpp_build.DIGEST])


def answer(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


def source(number: int) -> str:
    return f'extern "C" int answer() {{ return {number}; }}\n'
