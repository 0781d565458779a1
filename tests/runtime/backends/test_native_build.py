"""Generated C++ to libraries: the disk cache, its entries broken in every way, machines without a compiler."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import frisket as fk
from frisket.grammar.memo import Memo, clear
from frisket.runtime.machine import caller
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine.cpp_build import library, reason, writable

pytestmark = pytest.mark.skipif(bool(reason()), reason=reason())


def source(number: int) -> str:
    return f'extern "C" int answer() {{ return {number}; }}\n'


@pytest.fixture(autouse=True)
def _each_text_once(known_compiler, monkeypatch):
    monkeypatch.setenv("CXX", known_compiler)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no library found without looking at it. SIGINT ends a compiler, also where the tests run in
    the background: a shell has such a process, and all that it starts, ignore the signal."""
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native_build, "_loaded", Memo("tests", 9))
    monkeypatch.setattr(native_build.tempfile, "gettempdir", lambda: str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    known = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield tmp_path / "native"
    signal.signal(signal.SIGINT, known)


@pytest.fixture
def compilations(monkeypatch):
    """How often the compiler ran."""
    runs, build = [], native_build._compile
    monkeypatch.setattr(native_build, "_compile", lambda *args: (runs.append(args), build(*args))[1])
    return runs


def forget():
    native_build._loaded.clear()


def test_a_library_is_compiled_once_and_then_found(cache, compilations):
    assert library(source(1)).answer() == 1
    assert library(source(1)) is library(source(1))
    forget()
    assert library(source(1)).answer() == 1
    assert len(compilations) == 1
    (kept,) = cache.glob("*.so")
    assert kept.with_suffix(".cpp").read_text() == source(1)
    assert sorted(p.suffix for p in cache.iterdir()) == [".cpp", ".so"]
    assert cache.stat().st_mode & 0o777 == 0o700


BREAKS = {
    "truncated": lambda so: so[: len(so) // 2],
    "no checksum": lambda so: so[: -native_build.DIGEST],
    "one bit": lambda so: so[:5000] + bytes([so[5000] ^ 1]) + so[5001:],
    "empty": lambda so: b"",
    "text": lambda so: b"not a library",
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_entry_is_built_again(how, cache, compilations):
    library(source(2))
    (kept,) = cache.glob("*.so")
    whole = kept.read_bytes()
    kept.unlink()  # the loaded one is not touched
    kept.write_bytes(BREAKS[how](whole))
    forget()
    assert library(source(2)).answer() == 2
    assert len(compilations) == 2
    assert kept.read_bytes() == whole


def test_an_entry_of_another_name_is_not_trusted(cache, compilations):
    library(source(1))
    (one,) = cache.glob("*.so")
    library(source(2))
    (two,) = set(cache.glob("*.so")) - {one}
    held = one.read_bytes()
    two.unlink()
    two.write_bytes(held)
    forget()
    assert library(source(2)).answer() == 2
    assert len(compilations) == 3


def test_cache_key_has_cpu_variant_flags_and_compiler(cache, compilations, monkeypatch, tmp_path):
    library(source(1))
    forget()
    monkeypatch.setattr(native_build, "this_cpu", lambda: ("another CPU", frozenset()))
    library(source(1))
    assert len(compilations) == 2, "the CPU"
    library(source(1), best())
    assert len(compilations) == 3, "the variant"
    forget()
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-g"))
    library(source(1))
    assert len(compilations) == 4, "flags"
    forget()
    other = tmp_path / "g++-other"
    other.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo other && exit\nexec {native_build.compiler()[0]} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    library(source(1))
    assert len(compilations) == 5, "the compiler"
    other.write_text(other.read_text().replace("echo other", "echo newer"))
    forget()
    library(source(1))
    assert len(compilations) == 6, "its version"
    assert len(list(cache.glob("*.so"))) == 6


def best():
    return native_build.best_variant()


def test_a_variant_that_this_cpu_lacks(cache, monkeypatch):
    monkeypatch.setattr(native_build, "this_cpu", lambda: ("", frozenset()))
    with pytest.raises(fk.BackendError, match="variant 'avx2' does not run here: this CPU has no abm, avx, avx2, bmi1"):
        library(source(1), "avx2")
    assert not cache.exists()


def test_a_source_that_does_not_compile(cache):
    with pytest.raises(fk.LoweringError) as caught:
        library('extern "C" int answer() { return nonsense; }\n')
    first, *rest = str(caught.value).splitlines()
    (text,) = cache.glob("*.cpp")
    assert first == f"{native_build.compiler()[0]} does not compile {text}"
    assert any("nonsense" in line for line in rest)
    assert [p.suffix for p in cache.iterdir()] == [".cpp"]


def test_least_recently_used_kernels_are_deleted(cache, monkeypatch):
    monkeypatch.setattr(native_build, "ENTRIES", 2)
    library(source(1))
    (first,) = cache.glob("*.so")
    library(source(2))
    os.utime(first, (time.time() + 60,) * 2)  # used again
    library(source(2))
    assert len(list(cache.glob("*.so"))) == len(list(cache.glob("*.cpp"))) == 2
    assert first.exists()


def test_threads_compile_a_source_once(cache, compilations):
    found = []
    threads = [threading.Thread(target=lambda: found.append(library(source(1)))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(compilations) == 1
    assert len(found) == 8
    assert len({id(x) for x in found}) == 1


@pytest.mark.exhaustive
def test_processes_build_each_kernel_once(tmp_path):
    """The first one builds, the others wait for it: a compiler that counts its runs."""
    counting = tmp_path / "counting"
    counting.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/runs\nexec {native_build.compiler()[0]} "$@"\n')
    counting.chmod(0o755)
    code = ANSWER + f"for n in range(3): assert library({source(0)!r}.replace('0', str(n))).answer() == n\n"
    env = {**os.environ, "FRISKET_CACHE_DIR": str(tmp_path), "CXX": str(counting)}
    running = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(4)]
    assert [p.wait(timeout=120) for p in running] == [0] * 4
    runs = (tmp_path / "runs").read_text().splitlines()
    assert len([run for run in runs if run != "--version"]) == 3
    assert [p.suffix for p in sorted((tmp_path / "native").iterdir())] == [".cpp", ".so"] * 3


def test_a_dead_process_holds_no_lock(tmp_path):
    """A process that is killed while its compiler runs leaves files behind, and nobody waits for it."""
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\ntouch {tmp_path}/started\nexec sleep 60\n')
    slow.chmod(0o755)
    command = native_build.compiler()[0]
    code = ANSWER + f"library({source(1)!r})"
    given = {**os.environ, "FRISKET_CACHE_DIR": str(tmp_path), "CXX": str(slow)}
    owner = subprocess.Popen([sys.executable, "-c", code], env=given, start_new_session=True)
    while not (tmp_path / "started").exists():
        assert owner.poll() is None
        time.sleep(0.01)
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait(timeout=60)
    left = {p.suffix: p for p in (tmp_path / "native").iterdir()}
    assert left.keys() >= {".lock", ".tmp"}
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\nexec {command} "$@"\n')
    os.utime(left[".tmp"], (0, 0))
    python(ANSWER + f"assert library({source(1)!r}).answer() == 1", FRISKET_CACHE_DIR=str(tmp_path), CXX=str(slow))
    assert not [p for p in (tmp_path / "native").iterdir() if p.suffix in (".tmp", ".lock")]


def test_temporary_files_of_the_living_stay(cache):
    library(source(1))
    young, old, lock = (cache / name for name in ("young.tmp", "old.tmp", "old.lock"))
    for path in (young, old, lock):
        path.touch()
    for path in (old, lock):
        os.utime(path, (time.time() - native_build.ORPHANED - 60,) * 2)
    library(source(2))
    assert (young.exists(), old.exists(), lock.exists()) == (True, False, False)


SHELL = {  # what a compiler does with a kernel -> what is said of it
    "kill -9 $$": "was killed by SIGKILL while it compiled",
    "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1": "was killed while it compiled",
    "echo 'internal compiler error: in gimplify_expr' >&2; exit 1": "does not compile",
    "echo 'collect2: fatal error: ld terminated with signal 9 [Killed]' >&2; exit 1": "was killed while it compiled",
    "echo 'ld: final link failed: No space left on device' >&2; exit 1": "No space left on device",
    "echo 'as: cannot write: Disk quota exceeded' >&2; exit 1": "Disk quota exceeded",
    "kill -INT $$": "was stopped by SIGINT while it compiled",
    r"printf 'error: \\377\\n' >&2; exit 1": "does not compile",
    '[ "$LC_ALL" = C ] && echo in English >&2; exit 1': "(?s)does not compile .*in English",
}


@pytest.mark.parametrize("does", SHELL)
def test_a_compiler_that_fails_over_a_kernel(does, cache, monkeypatch, tmp_path):
    failing = tmp_path / "failing"
    failing.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\n{does}\n')
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(native_build.BuildError, match=SHELL[does]) as caught:
        library(source(2))
    assert isinstance(caught.value, fk.LoweringError)
    assert isinstance(caught.value, fk.BackendError)
    if "memory" in str(caught.value):
        assert any(word in str(caught.value) for word in ("SIGKILL", "cc1plus", "Killed"))
    assert not [p for p in cache.iterdir() if p.suffix != ".cpp"]
    with pytest.raises(native_build.BuildError) as again:
        library(source(2))
    assert str(again.value) == str(caught.value)
    assert again.value is not caught.value  # an error that is kept would hold the arrays of the call it ended


PASSING = {  # how the compiler fails -> seconds after which it is tried again; None: never
    "kill -INT $$": 0,
    "kill -9 $$": native_build.RETRY,
    "echo 'ld: final link failed: No space left on device' >&2; exit 1": native_build.RETRY,
    "echo 'internal compiler error: in gimplify_expr' >&2; exit 1": None,
}


@pytest.mark.parametrize("does", PASSING)
def test_temporary_build_failures_are_tried_again(does, cache, monkeypatch, tmp_path):
    """The same process gets its kernel once there is memory and space, or nobody interrupts its compiler."""
    now, wait = [1000.0], PASSING[does]
    monkeypatch.setattr(native_build.time, "monotonic", lambda: now[0])
    failing, head = tmp_path / "failing", '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\n'
    failing.write_text(head + does + "\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    text = source(40)
    with pytest.raises(native_build.BuildError) as first:
        library(text)
    failing.write_text(head + f'exec {native_build.shutil.which("g++")} "$@"\n')
    for later in (0, native_build.RETRY - 1, native_build.RETRY + 1):
        now[0] = 1000.0 + later
        if wait is not None and later >= wait:
            assert library(text).answer() == 40
        else:
            with pytest.raises(type(first.value), match="^" + re.escape(str(first.value)) + "$"):
                library(text)


def test_files_of_killed_compilers_are_swept(cache, monkeypatch, tmp_path):
    """Their temporary files are beside what they make, and swept with it."""
    leaving = tmp_path / "leaving"
    leaving.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\ntouch $TMPDIR/ccXyz.s\nkill -9 $PPID\n')
    leaving.chmod(0o755)
    given = {**os.environ, "FRISKET_CACHE_DIR": str(cache.parent), "CXX": str(leaving)}
    dead = subprocess.run([sys.executable, "-c", ANSWER + f"library({source(1)!r})"], env=given, timeout=120)
    assert dead.returncode == -9
    (left,) = cache.glob("*.tmp")
    assert [x.name for x in left.iterdir()] == ["ccXyz.s"]
    os.utime(left, (0, 0))
    library(source(1))
    assert not left.exists()


def test_without_exit_status(tmp_path):
    """A process that ignores SIGCHLD has none of its children: what the compiler says and makes tells."""
    code = (
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        + ANSWER
        + (
            f"print(library({source(2)!r}).answer())\n"
            "try: library('extern \"C\" int answer() { return nonsense; }')\n"
            "except Exception as error: print(error)\n"
        )
    )
    first, *words = python(code, FRISKET_CACHE_DIR=str(tmp_path)).splitlines()
    assert first == "2"
    assert f"does not compile {tmp_path}" in words[0]
    assert any("nonsense" in x for x in words)


def test_a_compiler_that_is_gone_or_cannot_be_started(cache, monkeypatch):
    native_build.compiler_version(native_build.compiler())
    run = subprocess.run

    def no_memory(command, **more):
        if "-o" in command:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return run(command, **more)

    monkeypatch.setattr(subprocess, "run", no_memory)
    with pytest.raises(native_build.LaterError, match=r"g\+\+ cannot be started: Cannot allocate memory$"):
        library(source(2))
    monkeypatch.setattr(native_build, "compiler", lambda: ("/nowhere/g++",))
    with pytest.raises(native_build.LaterError, match=r"the C\+\+ compiler /nowhere/g\+\+ does not run: .*No such"):
        library(source(1))
    assert not [p for p in cache.iterdir() if p.suffix != ".cpp"]


def test_a_passing_reason_is_asked_again(monkeypatch):
    """One bad moment does not take the native kernels from a process."""
    monkeypatch.setattr(caller, "SAID", set())
    said = [native_build.LaterError("was killed"), "works", "works"]
    monkeypatch.setenv("CXX", "one that nobody asked about")

    class Probe:
        frisket_probe = staticmethod(lambda: 1)

    def probed(text):
        if isinstance(found := said.pop(0), Exception):
            raise found
        return Probe

    monkeypatch.setattr(native_build, "library", probed)
    with pytest.warns(UserWarning, match="a native kernel could not be built(.|\n)*was killed"):
        assert [reason(), reason(), reason()] == ["was killed", "", ""]


LIES = {  # what a compiler leaves while it reports no error -> what is said of it
    "rm -f $out": "reports no error, and what it makes of .* is no library: the file is empty",
    ": > $out": "the file is empty",
    "head -c 5000 /dev/urandom > $out": "the file is no ELF file",
    "echo 'int other;' | CXX -x c++ -shared -fPIC -o $out -": r"there is no answer\(\) in it",
    "echo 'extern \"C\" int answer() { return 6; }' | ARM -x c++ -shared -fPIC -o $out -": "for another processor",
    'CXX "$@" && head -c 6000 $out > $out.half && mv $out.half $out': "not all of one",
    'CXX "$@" && head -c -1 $out > $out.half && mv $out.half $out': "not all of one",
}


@pytest.mark.parametrize("does", LIES)
def test_a_compiler_that_lies(does, cache, monkeypatch, tmp_path):
    """Nothing of it is kept, so the same compiler is believed once it works."""
    if "ARM" in does and not native_build.shutil.which("aarch64-linux-gnu-g++"):
        pytest.skip("left out: no aarch64-linux-gnu-g++ here")
    lying, right = tmp_path / "lying", native_build.compiler()[0]
    head = '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\nfor x; do [ "$last" = -o ] && out=$x; last=$x; done\n'
    lying.write_text(head + does.replace("CXX", right).replace("ARM", "aarch64-linux-gnu-g++") + "\n")
    lying.chmod(0o755)
    monkeypatch.setenv("CXX", str(lying))
    monkeypatch.setattr(native_build, "_failed", Memo("tests", 9))
    with pytest.raises(native_build.BuildError, match=LIES[does]):
        library(source(2))
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".so", ".tmp", ".lock", ".half")]
    lying.write_text(head + f'exec {right} "$@"\n')
    native_build._failed.clear()
    assert library(source(2)).answer() == 2


def test_a_path_of_a_compiler_may_have_blanks(monkeypatch, tmp_path):
    folder = tmp_path / "my tools"
    folder.mkdir()
    (folder / "g++").symlink_to(native_build.compiler()[0])
    monkeypatch.setenv("CXX", str(folder / "g++"))
    assert native_build.compiler() == (str(folder / "g++"),)
    monkeypatch.setenv("CXX", "g++ -DX")
    assert native_build.compiler()[1:] == ("-DX",)


def test_linker_errors_are_reported(cache, monkeypatch):
    """A linker that fails deletes the file that it was to write."""
    monkeypatch.setenv("CXX", f"{native_build.compiler()[0]} -lnowhere")
    with pytest.raises(native_build.BuildError, match="does not compile") as caught:
        library(source(1))
    assert "-lnowhere" in str(caught.value)
    assert "FRISKET_CACHE_DIR" not in str(caught.value)


# -- machines without ---------------------------------------------------------------------------------


def python(code: str, **environment: str) -> str:
    """What another process prints."""
    given = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ANSWER = "from frisket.runtime.machine.cpp_build import library\n"


NO_COMPILER = "no C++ compiler: none of g++, clang++, c++ is on PATH"


def test_missing_compiler_is_the_reason(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    assert reason() == NO_COMPILER
    monkeypatch.setenv("CXX", str(tmp_path / "cc"))
    assert reason() == f"no C++ compiler: CXX is {str(tmp_path / 'cc')!r}, which is not there"


def test_a_compiler_that_does_not_work(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(caller, "SAID", set())
    broken, dead = tmp_path / "broken", tmp_path / "dead"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\necho out of order >&2\nexit 1\n')
    dead.write_text("#!/bin/sh\nexit 1\n")
    for path in (broken, dead):
        path.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert reason().startswith(f"{broken} does not compile {cache}/")
    monkeypatch.setenv("CXX", str(dead))
    with pytest.warns(UserWarning, match="a native kernel could not be built"):
        assert reason().startswith(f"the C++ compiler {dead} does not run: ")


def test_unwritable_cache_is_the_reason(cache, monkeypatch, tmp_path):
    file, place = tmp_path / "file", tmp_path / "elsewhere" / f"frisket-{os.getuid()}"
    file.write_text("in the way")
    monkeypatch.setattr(caller, "SAID", set())
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(file))
    assert (reason(), writable()) == ("", place)
    # A temporary directory that anybody may write to is no place for code.
    place.chmod(0o777)
    forget()
    with pytest.warns(UserWarning, match="a native kernel could not be built"):
        why = reason()
    assert why == (
        f"nowhere to keep kernels ({file}/native cannot be made: File exists; {place} belongs to another user, or "
        "others may write to it): set FRISKET_CACHE_DIR to another directory"
    )
    assert writable() is None


def test_folders_are_made_for_this_user_alone(cache, monkeypatch, tmp_path):
    """Whoever may write to a folder may put another cache in its place."""
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path / "mine"))
    before = os.umask(0)
    try:
        library(source(1))
    finally:
        os.umask(before)
    assert [(tmp_path / x).stat().st_mode & 0o777 for x in ("mine", "mine/native")] == [0o700, 0o700]


OPENED = {
    "nothing": lambda so, other: None,
    "a group writes the folder": lambda so, other: so.parent.chmod(0o770),
    "anybody writes the folder": lambda so, other: so.parent.chmod(0o702),
    "a group writes the file": lambda so, other: so.chmod(0o660),
    "anybody writes the file": lambda so, other: so.chmod(0o606),
    "the folder is another user's": lambda so, other: other.append(so.parent),
    "the file is another user's": lambda so, other: other.append(so),
}


@pytest.mark.parametrize("how", OPENED)
def test_kernels_that_other_users_may_write_are_not_loaded(how, cache, monkeypatch):
    """There lies a whole library with its checksum, by somebody who knows how to make one."""
    library(source(2))
    (made,) = cache.glob("*.so")
    content, name = made.read_bytes()[: -native_build.DIGEST], native_build._sought(source(1), "native")[0]
    forged = cache / f"{name}.so"
    forged.write_bytes(content + native_build._digest(name, content))
    forged.chmod(0o600)
    others: list[Path] = []
    OPENED[how](forged, others)
    lstat = Path.lstat
    theirs = lambda path: os.stat_result([*lstat(path)[:4], 4321, *lstat(path)[5:]])  # noqa: E731
    monkeypatch.setattr(Path, "lstat", lambda path: theirs(path) if path in others else lstat(path))
    forget()
    if how == "the file is another user's":  # the one that is built in its place is ours
        build = native_build._compile
        monkeypatch.setattr(native_build, "_compile", lambda *args: (others.clear(), build(*args)))
    assert library(source(1)).answer() == (2 if how == "nothing" else 1)


def test_a_link_of_another_user_is_no_cache(tmp_path, monkeypatch):
    """It may lead elsewhere by the time that something is loaded; in a folder such as /tmp anybody makes one."""
    (tmp_path / "folder").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to("folder")
    assert native_build.ours(link)
    lstat = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result([*lstat(path)[:4], 4321, *lstat(path)[5:]]))
    assert not native_build.ours(link)


def test_triton_sources_are_kept_where_others_cannot_write(tmp_path, monkeypatch):
    from frisket.runtime.machine.modules import write_source

    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native_build.tempfile, "gettempdir", lambda: str(tmp_path / "elsewhere"))
    text = "x = 1\n"
    path = write_source(text)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o666)
    inode = path.stat().st_ino
    assert write_source(text).stat().st_ino != inode, "a file that others write is made anew"
    path.parent.chmod(0o777)
    assert write_source(text).parent == tmp_path / "elsewhere" / f"frisket-{os.getuid()}"
    write_source(text).parent.chmod(0o777)
    with pytest.raises(fk.BackendError, match="no folder for Triton kernels that others cannot write to"):
        write_source(text)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_cache_that_can_only_be_read(number, cache, compilations, monkeypatch):
    library(source(1))
    forget()
    monkeypatch.setattr(native_build, "barred", lambda folder: f"{folder} cannot be written to")
    monkeypatch.setattr(os, "utime", lambda path: (_ for _ in ()).throw(OSError(number, "to read only")))
    assert library(source(1)).answer() == 1
    assert len(compilations) == 1
    with pytest.raises(fk.BackendError, match=r"nowhere to keep kernels \(.* cannot be written to"):
        library(source(2))


def test_library_calls_replace_native_kernels_without_compiler(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    q = torch.ones(1, 1, 8, 16)
    assert fk.backends()["cpp"] == NO_COMPILER
    assert fk.compile("causal")(q, q, q).sum() == 128
    with pytest.raises(fk.BackendError) as error:
        fk.compile("causal", backend="cpp")(q, q, q)
    assert str(error.value).splitlines()[0] == f"backend 'cpp' does not run here: {NO_COMPILER}"


def planned_on_device(doc, score, **options):
    att = fk.compile("causal & same(doc)", score, t=np.float32([1, 2]), **options)
    return att, att.plan(40, 40, 1, 2, doc=doc, flat=True)


def by_torch(q, doc, score, **options):
    """The result and its gradient."""
    torch = pytest.importorskip("torch")
    att, plan = planned_on_device(torch.from_numpy(doc), score, **options)
    x = torch.from_numpy(q).requires_grad_()
    out = att(x, x, x, plan=plan)
    out.sum().backward()
    return out.detach().numpy(), x.grad.numpy()


def by_jax(q, doc, score, **options):
    jax = pytest.importorskip("jax")
    att, plan = planned_on_device(jax.numpy.asarray(doc), score, **options)
    x = jax.numpy.asarray(q.swapaxes(1, 2))

    def run(x):
        return att(x, x, x, plan=plan)

    return np.asarray(run(x)), np.asarray(jax.grad(lambda x: run(x).sum())(x))


@pytest.mark.parametrize(
    ("framework", "broken"),
    [
        ("torch", "backward"),
        pytest.param("jax", "backward", marks=pytest.mark.exhaustive),
        *(pytest.param(x, "forward", marks=pytest.mark.exhaustive) for x in ("torch", "jax")),
        *(pytest.param(x, "planner", marks=pytest.mark.exhaustive) for x in ("torch", "jax")),
    ],
)
def test_library_calls_serve_where_a_kernel_cannot_be_built(framework, broken, cache, monkeypatch, tmp_path):
    """The compiler builds everything but one kind of kernel: results are right, one warning says why, and who names
    the backend is told."""
    mark, score = {  # a process of JAX has each kernel for good, so another kernel for each
        "forward": ("frisket_forward(", "score * t[h]"),
        "backward": ("frisket_backward(", "score + t[h]"),
        "planner": ("frisket_plan(", "score - t[h]"),
    }[broken]
    failing = tmp_path / "failing"
    failing.write_text(
        "#!/bin/sh\nfor last; do :; done\n"
        f'if [ -f "$last" ] && grep -q "{mark}" "$last"; then echo "internal compiler error" >&2; exit 1; fi\n'
        f'exec {native_build.compiler()[0]} "$@"\n'
    )
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    monkeypatch.setattr(caller, "SAID", set())
    clear()
    q, doc = np.random.default_rng(0).random((1, 2, 40, 16), "f"), np.repeat([0, 1], 20).astype("i")
    run = partial({"torch": by_torch, "jax": by_jax}[framework], q, doc, score)
    assert fk.backends()["cpp"] == ""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        results, _ = run(), run()
    (warning,) = shown
    assert str(warning.message).startswith("a native kernel could not be built, so library calls run in its place")
    for x, library_x in zip(results, run(backend="library"), strict=True):
        np.testing.assert_allclose(x, library_x, atol=1e-5)
    if broken == "planner":
        run(backend="native")
    else:
        with pytest.raises(fk.LoweringError) as error:
            run(backend="native")
        assert str(error.value).splitlines()[-1] == "  internal compiler error"
    clear()


def test_a_new_process_compiles_nothing_that_is_in_the_cache(tmp_path):
    code = ANSWER + (
        "import sys\nstarted = []\n"
        "sys.addaudithook(lambda event, args: started.append(args[1][1]) if event == 'subprocess.Popen' else None)\n"
        f"assert library({source(1)!r}).answer() == 1\nprint(*started)"
    )
    first, again = (python(code, FRISKET_CACHE_DIR=str(tmp_path)).split() for _ in "12")
    assert len(first) > 1
    assert again == ["--version"]


def test_build_stops_waiting_for_a_stopped_process(cache, monkeypatch, tmp_path):
    """Such as one that a terminal stopped while its compiler ran."""
    cache.mkdir(mode=0o700)
    lock = cache / f"{native_build._sought(source(1), 'native')[0]}.lock"
    code = (
        f"import fcntl, os; f = open({str(lock)!r}, 'ab'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    try:
        monkeypatch.setattr(native_build, "PATIENCE", 0.3)
        start = time.monotonic()
        assert library(source(1)).answer() == 1
        assert time.monotonic() - start > 0.3
    finally:
        holder.kill()
        holder.communicate()


def test_a_compiler_that_is_gone_does_not_end_calls(cache, monkeypatch):
    """Library calls replace a kernel for a `BuildError`; it was asked for once the machine was known to have one."""
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(
        native_build.BuildError, match=r"no C\+\+ compiler: CXX is '/nowhere/g\+\+', which is not there"
    ):
        library(source(1))


@pytest.mark.exhaustive
def test_first_jax_call_at_exit_builds_its_kernel(tmp_path):
    """When no further threads start: kernel and bridge are built one after the other."""
    pytest.importorskip("jax")
    code = """
import atexit, jax, frisket as fk
x = jax.numpy.ones((1, 150, 2, 16))
att = fk.compile("causal & window(60)", backend="cpp")
atexit.register(lambda: print(abs(att(x, x, x) - 1).max() < 1e-5))
"""
    given = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": "", "FRISKET_CACHE_DIR": str(tmp_path)}
    assert python(code, **given) == "True"
