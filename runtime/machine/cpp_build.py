"""Generated C++ to a loaded library: compiled at first use, kept on disk, never trusted without its checksum.

`VARIANTS` are the CPUs that kernels can be built for; the features of this one say which of them run here. Threads of
native kernels are torch's own with torch, a pool of ours elsewhere and after a fork.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import resources
from pathlib import Path
from typing import Any

from frisket.dsl.errors import BackendError, FrisketError, LoweringError
from frisket.grammar.memo import Memo, memo
from frisket.lowering.kernels.cpp import call as cpp_call

from .caller import warn_once
from .settings import Settings, cache_folder

# Not -ffast-math: it deletes the rounding trick of exp2 and every check for NaN. Loops are not unswitched: g++ 12.2
# made wrong code of a loop with a condition on the tile in it, and nothing is faster for it. Tuned for a Zen, g++ takes
# some chains of fused multiply-adds apart: then products that must have equal bits do not. clang ignores the flag.
FLAGS = tuple(
    "-std=c++17 -O3 -fno-unswitch-loops -ffp-contract=fast -fno-math-errno -fno-trapping-math -fno-signed-zeros "
    "-fno-exceptions -fno-rtti -w -pthread -shared -fPIC --param=avoid-fma-max-bits=0".split()
)
COMPILERS = ("g++", "clang++", "c++")  # where CXX names none
DEFINED = re.compile(r'extern "C" [\w ]+[ *](\w+)\([^;{]*\) \{')  # functions that a library must have
KILLED = re.compile("Killed signal|terminated with signal 9")  # in a compiler driver's messages
STOPS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", 1))
PROBE = 'extern "C" int frisket_probe() { return 1; }\n'
ENTRIES = 1024  # libraries on disk; beyond, the ones used longest ago go
LOADED = 256  # libraries found without looking at the disk
ORPHANED = 3600.0  # seconds after which a temporary file may be removed
PATIENCE = 120.0  # seconds to wait for another process that builds the same kernel
RETRY = 60.0  # seconds after which a kernel is tried again that lacked memory or space
DIGEST = hashlib.sha256().digest_size


class BuildError(LoweringError, BackendError):
    """A kernel could not be compiled or kept, though other kernels can be; the text has the compiler's words."""


class LaterError(BuildError):
    """A kernel could not be compiled or kept now; a call `wait` seconds later tries again."""

    wait = RETRY


class InterruptedCompilerError(LaterError):
    """A signal to stop reached the compiler, perhaps with all processes of a terminal or a notebook."""

    wait = 0.0


class PendingError(LaterError):
    """A kernel is being compiled in the background."""


_defers: ContextVar[bool] = ContextVar("defers", default=False)
kernel_step: ContextVar[str] = ContextVar("kernel step", default="")  # the last one here: "built" or "loaded"
_loaded = Memo("runtime.machine.cpp_build.library", LOADED)
# why, in words, and until when: an error would hold the arrays of its call
_failed = Memo("runtime.machine.cpp_build.refused", LOADED)
_building: dict[tuple[str, ...], threading.Lock] = {}
_guard = threading.Lock()


def library(source: str, variant: str = "native") -> ctypes.CDLL:
    """A C++ source as a loaded library: `library('extern "C" int one() { return 1; }').one()`.

    Calls of its functions release the GIL. Libraries stay loaded, because others may hold their functions.
    `BackendError`: a CPU without what the variant needs; `BuildError`: no compiler, or it refuses the source.
    `LaterError`: the compiler is killed, or no directory can be written to; `PendingError`: see `deferring`.
    """
    key = source, variant, os.environ.get("CXX", ""), os.environ.get("PATH", ""), Settings.read().cache_dir or ""
    with _guard:
        if (cached := _loaded.get(key)) is not None:
            return cached  # type: ignore[no-any-return]
        if _defers.get() and key in _threads:
            raise PendingError
        lock = _building.setdefault(key, threading.Lock())
    with lock:  # one thread builds, the others wait for it
        kind, why, until = _failed.get(key) or (BuildError, "", 0.0)
        if time.monotonic() < until:
            raise kind(why)
        try:
            lib: ctypes.CDLL = _loaded.get(key) or _find_or_build(source, variant, key)
        except BuildError as error:
            with _guard:
                if not isinstance(error, PendingError):
                    wait = error.wait if isinstance(error, LaterError) else math.inf
                    _failed.put(key, (type(error), str(error), time.monotonic() + wait))
                    _building.pop(key, None)
            raise
        with _guard:
            _loaded.put(key, lib)
            _building.pop(key, None)
    return lib


def build_ahead(source: str) -> bool:
    """Build a library on disk unless it is there; returns whether it was built. Raises as `library` does."""
    return not there(source) and bool(_build(source, *_sought(source, "native")))


def there(source: str) -> bool:
    """Whether a library is on disk."""
    return _on_disk(_sought(source, "native")[0]) is not None


@contextmanager
def deferring(when: bool = True) -> Iterator[None]:
    """Inside, with FRISKET_COMPILE=background, a kernel that is not on disk is compiled in a thread. `library`
    raises `PendingError` until it is there. This is for callers that have library calls to run meanwhile."""
    before = _defers.set(when and Settings.read().compile == "background")
    try:
        yield
    finally:
        _defers.reset(before)


def fall_back(error: BuildError) -> None:
    """Warn once why library calls run in place of a kernel that no call named."""
    if isinstance(error, PendingError):
        text = "native kernels are being compiled in the background, as FRISKET_COMPILE says; library calls run until "
        text += "they are there, slower and with other roundings"
    else:
        text = "a native kernel could not be built, so library calls run in its place, slower and right; "
        text += f"backend='native' makes this an error:\n{error}"
    warn_once(text)


def reason(framework: str | None = None) -> str:
    """A reason why native kernels cannot be built and loaded here, on arrays of any framework; empty when they can.
    `library` remembers both."""
    if not sys.platform.startswith("linux"):
        return f"native kernels are built on Linux only; this is {sys.platform}"
    try:
        return "" if library(PROBE).frisket_probe() == 1 else "a library just built does not work"
    except FrisketError as error:
        if isinstance(error, LaterError):  # a later call may have kernels
            fall_back(error)
        return str(error).splitlines()[0]


def _after_fork() -> None:
    """Replace the locks, and forget the builds: a thread of the parent does not exist in the child."""
    global _guard, _slots, _forked
    _guard = threading.Lock()
    _building.clear()
    _threads.clear()
    _slots = threading.Semaphore(HALF)
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- builds in threads beside the program, on half of the cores -----------------------------------

_threads: dict[tuple[str, ...], threading.Thread] = {}  # of builds that wait or run
HALF = max(1, (os.cpu_count() or 1) // 2)
_slots = threading.Semaphore(HALF)


def _begin(source: str, variant: str, key: tuple[str, ...]) -> bool:
    """Build a kernel in a thread, once at a time; False where no thread can be had. The interpreter ends after the
    builds that run, without those that wait."""

    def build() -> None:
        _defers.set(False)
        try:
            with _slots, suppress(FrisketError):  # the next call finds the kernel, or why it is not there
                if threading.main_thread().is_alive():
                    library(source, variant)
        finally:
            _threads.pop(key, None)

    thread = threading.Thread(target=build, name="frisket compiler", daemon=False)
    if _threads.setdefault(key, thread) is thread:
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter ends
            del _threads[key]
            return False
    return True


# -- the CPU -----------------------------------------------------------------------------------------

V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe".split())
V4 = V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
SCALAR = ("-DFRISKET_SCALAR", "-fno-tree-vectorize", "-fno-tree-slp-vectorize")  # the prelude's vectors have one lane
AMX = frozenset("avx512_bf16 amx_tile amx_bf16 amx_int8".split())
MATRIX_UNIT = "-DFRISKET_AMX"  # multiply bfloat16 and int8 on the matrix unit

# name: (flags of the compiler, what /proc/cpuinfo has to list). "native" is whatever this CPU has.
VARIANTS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "native": (("-march=native",), frozenset()),
    "amx": (("-march=x86-64-v4", "-mavx512bf16", MATRIX_UNIT), V4 | AMX),
    "avx512bf16": (("-march=x86-64-v4", "-mavx512bf16"), V4 | {"avx512_bf16"}),
    "avx512": (("-march=x86-64-v4",), V4),
    "avx2": (("-march=x86-64-v3",), V3),
    "scalar": (SCALAR, frozenset()),
    "neon": (("-march=armv8-a",), frozenset({"asimd"})),
}


@memo(group="once")
def this_cpu() -> tuple[str, frozenset[str]]:
    """The CPU as a text, and its features beyond the least of its kind, in the words of /proc/cpuinfo.

    Two machines share the text only if code built for one runs on the other."""
    entries: dict[str, str] = {}  # of the first CPU; none where there is no such file
    try:
        with Path("/proc/cpuinfo").open() as lines:
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon and entries:  # a blank line: the other CPUs are alike
                    break
                entries[name.strip()] = " ".join(value.split())
    except OSError:
        pass
    # x86 and Arm name the row otherwise
    features = frozenset((entries.get("flags") or entries.get("Features", "")).split())
    kind = ("model name", "cpu family", "model", "CPU implementer", "CPU part", "CPU variant")
    return " ".join([platform.machine(), *(entries.get(n, "-") for n in kind), *sorted(features)]), features


def lacking(variant: str) -> str:
    """The features that this CPU lacks to run a variant; empty when it can."""
    flags, required = VARIANTS[variant]
    if missing := sorted(required - this_cpu()[1]):
        return f"this CPU has no {', '.join(missing)}"
    return "the system lets no program use this CPU's matrix unit" if MATRIX_UNIT in flags and not _allowed() else ""


@memo(group="once")
def _allowed() -> bool:
    """Whether this process may use the matrix unit. This asks Linux for it, by
    arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA)."""
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)


def flags_of(variant: str) -> tuple[str, ...]:
    """The compiler's flags for a variant."""
    flags = VARIANTS[variant][0]
    # -march=native has the unit's instructions even where the system lets no process use them
    return (*flags, MATRIX_UNIT) if "-march=native" in flags and not lacking("amx") else flags


def best_variant() -> str:
    """The widest of the named variants that runs here: what "native" amounts to."""
    return next(name for name in ("amx", "avx512bf16", "avx512", "avx2", "neon", "scalar") if not lacking(name))


# -- the compiler ---------------------------------------------------------------------------------


def compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: CXX, which may have arguments, else g++, clang++ or c++; None without."""
    named = os.environ.get("CXX", "")
    command = [named] if shutil.which(named) else named.split()  # a path may have blanks
    for name in [command[0]] if command else COMPILERS:
        if path := shutil.which(name):
            return (path, *command[1:])
    return None


def compiler_version(command: tuple[str, ...]) -> str:
    """The first line of --version, asked once for each state of the program on disk."""
    try:
        state = os.stat(command[0])
    except OSError as error:  # deleted since it was found
        raise LaterError(f"the C++ compiler {' '.join(command)} does not run: {error}") from None
    return _asked(command, os.path.realpath(command[0]), state.st_mtime_ns, state.st_size)


@memo(group="once")
def _asked(command: tuple[str, ...], *_state: object) -> str:
    try:
        version = _run([*command, "--version"], check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaterError(f"the C++ compiler {' '.join(command)} does not run: {error}\n  set CXX to another") from None
    return version.partition("\n")[0]


def _run(command: list[str], check: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the compiler; its messages are English, and may have any bytes."""
    env = {**os.environ, "LC_ALL": "C", **environment}
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=check, env=env)


# -- the cache --------------------------------------------------------------------------------------


def directories(kind: str = "native") -> list[Path]:
    """The folders of libraries, in order: FRISKET_CACHE_DIR or the user's cache, then the temporary directory."""
    return [cache_folder() / kind, Path(tempfile.gettempdir()) / f"frisket-{getattr(os, 'getuid', int)()}"]


def writable(kind: str = "native") -> Path | None:
    """The first of the directories that can be written to by this user alone; None where there is none."""
    return next((d for d in directories(kind) if not barred(d)), None)


def barred(folder: Path) -> str:
    """A reason why nothing can be kept in a folder, which is made if it is not there; empty if something can."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # who writes there may replace it
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    if not ours(folder):
        return f"{folder} belongs to another user, or others may write to it"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written to"


def ours(path: Path) -> bool:
    """Whether no user but this one and root may write to a file or a folder, or has made a link to it: code is loaded
    from nowhere else. Windows knows no such modes."""
    if os.name == "nt":
        return path.exists()
    try:
        named, state = path.lstat(), path.stat()
    except OSError:
        return False
    return {named.st_uid, state.st_uid} <= {0, os.geteuid()} and not state.st_mode & 0o022


def _sought(source: str, variant: str) -> tuple[str, list[str]]:
    """The name of a library on disk, and the command that compiles it."""
    if why := lacking(variant):
        raise BackendError(f"variant {variant!r} does not run here: {why}")
    command = compiler()
    if command is None:
        text = f"no C++ compiler: none of {', '.join(COMPILERS)} is on PATH\n  install one, or set CXX"
        if named := os.environ.get("CXX"):
            text = f"no C++ compiler: CXX is {named!r}, which is not there"
        raise BuildError(text)  # it may have been there a moment ago, and library calls go on
    flags = (*FLAGS, *flags_of(variant))
    machine = this_cpu()[0] if variant == "native" else ""
    words = (source, " ".join(flags), " ".join(command), compiler_version(command), machine)
    return hashlib.sha256("\0".join(words).encode()).hexdigest(), [*command, *flags]


def _on_disk(name: str) -> ctypes.CDLL | None:
    """The library of a name, loaded; None where none of the folders has it, or not what was built under this name."""
    for folder in directories():
        with suppress(OSError):  # also from a directory without the right to execute
            if ours(folder) and (lib := _opened(folder / f"{name}.so", name)) is not None:
                return lib
    return None


def _find_or_build(source: str, variant: str, key: tuple[str, ...]) -> ctypes.CDLL:
    name, command = _sought(source, variant)
    if (lib := _on_disk(name)) is not None:
        kernel_step.set(kernel_step.get() or "loaded")
        return lib
    if _defers.get() and _begin(source, variant, key):
        raise PendingError
    return _build(source, name, command)


def _build(source: str, name: str, command: list[str]) -> ctypes.CDLL:
    """A library that is compiled, kept in the first folder that takes it, and loaded."""
    failed = []
    for folder in directories():
        if why := barred(folder):
            failed.append(why)
            continue
        path = folder / f"{name}.so"
        try:
            with _alone(folder / f"{name}.lock"):
                with suppress(OSError):  # another process that built it meanwhile has left it here
                    if (lib := _opened(path, name)) is not None:
                        return lib
                _compile(source, command, path)
                kernel_step.set("built")
                if "compiles" in Settings.read().show:
                    print(f"frisket: {command[0]} built {folder / name}.cpp", file=sys.stderr)
                lib = None
                try:
                    lib = _opened(path, name)
                finally:
                    if lib is None:  # the next process would not load it, either
                        path.unlink(missing_ok=True)
        except OSError as error:  # no space left, say
            failed.append(f"{folder}: {error.strerror or error}")
            continue
        if lib is not None:
            return lib
        failed.append(f"nothing can be loaded from {folder}")
    raise LaterError(f"nowhere to keep kernels ({'; '.join(failed)}): set FRISKET_CACHE_DIR to another directory")


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process builds this kernel meanwhile: the lock is the file's, and goes with the process that holds it.

    Where the file system has no locks, or a holder is stopped, several processes may build a kernel; the last is kept.
    """
    import fcntl  # there is none on Windows, where nothing is built

    with open(path, "ab") as file:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):  # there are no locks
                    break
                time.sleep(0.01)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # processes that wait for this file find the kernel; later ones, too


def _opened(path: Path, name: str) -> ctypes.CDLL | None:
    """The library at `path`; None where it is not the one that was built under this name."""
    content = path.read_bytes()
    if not ours(path) or content[-DIGEST:] != _digest(name, content[:-DIGEST]):
        return None
    with suppress(OSError):  # somebody else's, or on a disk that is read only
        os.utime(path)  # it was used now
    return ctypes.CDLL(str(path))


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()


def _compile(source: str, command: list[str], path: Path) -> None:
    """Compile to `path`: the source next to the library, and the checksum at the end of the library."""
    text, folder = path.with_suffix(".cpp"), path.parent
    put(text, source.encode())
    with tempfile.TemporaryDirectory(suffix=".tmp", dir=folder, ignore_cleanup_errors=True) as scratch:
        output = Path(scratch) / "library.so"
        try:  # temporary files of the compiler go with the folder, whichever process dies
            process = _run([*command, "-o", str(output), str(text)], TMPDIR=scratch)
        except OSError as error:  # no memory for a process
            raise LaterError(f"{command[0]} cannot be started: {error.strerror}") from None
        content = output.read_bytes() if output.exists() else b""  # a linker that fails deletes it
    words = "".join(f"\n  {x}" for x in process.stderr.splitlines()[:12])
    if process.returncode or (words and not content):  # without SIGCHLD there is no exit status
        raise _refusal(process, command[0], text, words)
    if lost := _lacks(content, source):
        raise BuildError(
            f"{command[0]} reports no error, and what it makes of {text} is no library: {lost}{words}\n"
            "  set CXX to another compiler"
        )
    put(path, content + _digest(path.stem, content))
    sweep(folder)


def _lacks(content: bytes, source: str) -> str:
    """Say what the content of a library lacks, "" if nothing: the loader may crash over a part of a file."""
    if not content:
        return "the file is empty"
    table, size, count = (int.from_bytes(content[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    if not content.startswith(b"\x7fELF") or table + size * count > len(content):  # section headers come last
        return "the file is no ELF file, or not all of one"
    with suppress(OSError), open("/proc/self/exe", "rb") as file:  # not to be read after a change of user
        head = file.read(20)
        if (content[4:6], content[18:20]) != (head[4:6], head[18:]):
            return "it is for another processor"
    lost = [x for x in DEFINED.findall(source) if x.encode() + b"\0" not in content]
    return f"there is no {lost[0]}() in it" if lost else ""


def _refusal(process: subprocess.CompletedProcess[str], compiler: str, text: Path, words: str) -> OSError | BuildError:
    """The error of a compiler that failed; a full disk is an OSError, so that another directory is tried."""
    for number in (errno.ENOSPC, errno.EDQUOT):
        if os.strerror(number) in process.stderr:
            return OSError(number, os.strerror(number), str(text.parent))
    if -process.returncode in STOPS:
        name = signal.Signals(-process.returncode).name
        return InterruptedCompilerError(f"{compiler} was stopped by {name} while it compiled {text}{words}")
    if process.returncode < 0:
        why = f"was killed by {signal.Signals(-process.returncode).name} while it compiled"
    elif KILLED.search(process.stderr):  # the process that the driver starts
        why = "was killed while it compiled"
    else:
        return BuildError(f"{compiler} does not compile {text}{words}")
    return LaterError(f"{compiler} {why} {text}; memory may have run out{words}")


def put(path: Path, content: bytes) -> None:
    """Write a file so that readers see all of it or none, even if others write it too."""
    handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sweep(folder: Path) -> None:
    """Delete the libraries used longest ago beyond `ENTRIES`, and the temporary files and locks that processes left
    when they died; others may be deleting at the same time."""
    times: dict[Path, float] = {}
    for path in (*folder.glob("*.so"), *folder.glob("*.tmp"), *folder.glob("*.lock")):
        with suppress(OSError):  # gone meanwhile
            times[path] = path.stat().st_mtime
    for path in sorted((x for x in times if x.suffix == ".so"), key=times.__getitem__)[:-ENTRIES]:
        path.with_suffix(".cpp").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    for path, used in times.items():
        if path.suffix != ".so" and used < time.time() - ORPHANED:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


# the first words of a `Call`: the number of workers; a function, 0 for one worker; the first argument of this function
Threads = tuple[int, int, int]
ONE_THREAD: Threads = (1, 0, 0)


def of_torch() -> Threads:
    """The very threads that torch uses: others would have to share the cores with them, because they spin for a while
    after every operation."""
    import torch

    count = torch.get_num_threads()
    return (count, *_of_torch()) if count > 1 else ONE_THREAD


@memo(1)
def _of_torch() -> tuple[int, int]:
    import torch

    pool = _library()
    try:  # what torch's own library calls, whichever OpenMP library that is and whatever else is loaded
        calls = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        table = (ctypes.c_void_p * 2)(_address(calls.GOMP_parallel), _address(calls.omp_get_thread_num))
    except (OSError, AttributeError):  # a torch built with other threads
        return _address(pool.frisket_own), 0
    _kept.append(table)
    return _address(pool.frisket_openmp), ctypes.addressof(table)


_kept: list[Any] = []  # pool arguments: functions keep them


def source() -> str:
    """The text of the pool, which every call of torch loads."""
    text = resources.files(__package__).joinpath("cpp_threads.cpp").read_text(encoding="utf-8")
    return f"#include <stdint.h>\ntypedef void Real;\n{cpp_call.text()}{text}"


@memo(group="once")
def _library() -> ctypes.CDLL:
    pool = library(source())
    if _forked:
        pool.frisket_set_forked()
    return pool


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _child() -> bool:
    """Whether this process was forked by multiprocessing, before this module was there to see it."""
    process, context = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.context")
    if process is None or context is None or process.parent_process() is None:
        return False
    return bool(context._default_context.get_start_method(allow_none=True) != "spawn")


_forked = _child()
