"""The command line in a terminal and out of it: colours, width, progress, help, pipes, completion, what it imports."""

import io
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from frisket.runtime.cli.answer import AnswerRow
from frisket.runtime.cli.main import COMMANDS, main, parser

ROOT = Path(__file__).resolve().parents[3]
CODE = "import sys; from frisket.runtime.cli.main import main; sys.exit(main(sys.argv[1:]))"
SEVERAL = """
import json, os, sys
from frisket.runtime.cli.main import main
for argv, env in json.loads(sys.argv[1]):
    os.environ.update(env)
    assert main(argv) in (0, 2)
    print(end="\\f", flush=True)
"""
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def in_terminal(*calls):
    """What a terminal of 80 columns is sent, for each of several (arguments, variables) in one process."""
    mine, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    command = [sys.executable, "-c", SEVERAL, json.dumps(calls)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    out = b""
    while True:
        try:
            piece = os.read(mine, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not piece:
            break
        out += piece
    os.close(mine)
    assert process.wait() == 0
    return out.decode().replace("\r\n", "\n").split("\f")[:-1]


@pytest.fixture
def run(capsys, monkeypatch):
    """`run("show", "causal", FORCE_COLOR="1")` gives (status, stdout, stderr) of this process, which is no terminal."""

    def call(*argv, stdin=b"", **env):
        with monkeypatch.context() as m:
            for name, value in {"TERM": "xterm-256color", **env}.items():
                m.setenv(name, value)
            m.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
            status = main(list(argv))
        return status, *capsys.readouterr()

    return call


# -- colours and width ------------------------------------------------------------------------------------

WHY = ("explain", "causal & window(8)", "--q", "30", "--k", "2")
RED = "\x1b[1;4;31mwindow(8)\x1b[0m"  # the clause that hides the key: bold, underlined, red


def test_a_terminal_has_colours_unless_told_otherwise(run):
    shown, dumb = in_terminal((WHY, {}), (WHY, {"TERM": "dumb"}))
    assert RED in shown
    assert "^" not in shown
    assert "\x1b" not in dumb
    plain = run(*WHY, FORCE_COLOR="1", NO_COLOR="1")[1]
    assert "31m" not in plain
    assert "^^^^^^^^^" in plain


def test_a_pipe_has_none_unless_they_are_forced(run):
    assert "\x1b" not in run(*WHY)[1]
    assert RED in run(*WHY, FORCE_COLOR="1")[1]


def test_mistakes_are_marked_in_colour(run):
    status, out, err = run("show", "causal &", FORCE_COLOR="1")
    assert (status, out) == (2, "")
    assert err.startswith("\x1b[1;31mMaskSyntaxError\x1b[0m: ")
    assert "\x1b[1;31m            ^\x1b[0m\n" in err


@pytest.mark.parametrize(
    "argv",
    [
        WHY,
        ("show", "causal & window(300)"),
        ("explain", "causal & window(300)", "--tile", "3,1"),
        ("library", "window"),
        ("emit", "causal", "--backend", "cpp", "--q-len", "64"),
        ("emit", "causal", "--backend", "triton", "--q-len", "64"),
        ("doctor",),
    ],
)
def test_colours_can_be_read_on_white_and_on_black(argv, run):
    """Red, green, magenta and cyan on the terminal's own paper: no yellow, no blue, nothing bright."""
    shown = run(*argv, FORCE_COLOR="1")[1]
    codes = {int(n) for numbers in re.findall(r"\x1b\[([0-9;]*)m", shown) for n in numbers.split(";") if n}
    assert codes <= {0, 1, 2, 4, 31, 32, 35, 36, 49}
    assert codes & {1, 31, 32, 35, 36}


def test_a_terminal_of_any_width():
    argv = ("show", "causal & (window(w) | sinks(4))", "--set", "w=256")
    widths = (40, 100)
    for columns, shown in zip(widths, in_terminal(*((argv, {"COLUMNS": str(n)}) for n in widths)), strict=True):
        plain = ESCAPE.sub("", shown)
        lines = plain.splitlines()
        assert max(map(cell_len, lines)) <= columns
        joined = re.sub(r"\s+", " ", plain)
        assert "every pair is visible, read without the mask" in joined
        assert "one cell 128 × 128 tokens" in joined
        assert sum("▒▒" in line for line in lines) == 16


def test_a_pipe_has_no_width(run):
    wide = run("show", " & ".join(f"q != k + {n}" for n in range(20)), "--q-len", "64", COLUMNS="40")[1]
    assert max(map(len, wide.splitlines())) > 150


def test_emitted_code_is_coloured_for_people_alone(run):
    argv = ("emit", "causal", "--backend", "cpp", "--q-len", "64")
    shown, plain = run(*argv, FORCE_COLOR="1")[1], run(*argv)[1]
    assert shown.count("\x1b[") > 100
    assert "\x1b" not in plain
    assert ESCAPE.sub("", shown).split() == plain.split()


def test_characters_the_locale_has(tmp_path):
    strange = tmp_path / os.fsdecode(b"m\xff.svg")
    full = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    argv = [sys.executable, "-c", CODE, "plot", "causal", "-o", str(strange), "--q-len", "64"]
    found = subprocess.run(argv, capture_output=True, env=full)
    assert (found.returncode, found.stderr) == (0, b"")
    assert found.stdout.endswith(b"tiles     # 0 full: every pair is visible, read without the mask\n"
                                 b"          + 1 partial: read with the mask\n"
                                 b"          . 0 empty: never read\n")  # fmt: skip
    assert strange.exists()


def test_words_are_folded_below_their_beginning():
    def folded(columns, **how):
        return (
            AnswerRow(Text("name"), Text("a  words that need more\nb  than a line"), **how)
            .folded(Console(), columns)
            .plain
        )

    assert folded(34) == "name      a  words that need more\n          b  than a line"
    assert folded(35, width=6, hang=3) == "name  a  words that need more\n      b  than a line"
    assert folded(25) == "name\n    a  words that need\n    more\n    b  than a line"
    code = AnswerRow(Text("name"), Text("f(\n    words of code, more than a line has\n)")).folded(Console(), 38).plain
    assert code == "name      f(\n              words of code, more than\n              a line has\n          )"
    long = AnswerRow(Text("name"), Text("a  words that need more than a line has"), 6, 3).folded(Console(), 34).plain
    assert long == "name  a  words that need more than\n         a line has"


def test_an_error_is_folded_and_its_place_is_not():
    long = "natten2d(16, 16, 5, 3, 2, 4) & " * 4 + "causal"
    shown, other = in_terminal((("show", long), {}), (("show", "causal", "window"), {}))
    shown = ESCAPE.sub("", shown)
    lines = shown.splitlines()
    (code,) = {line for line, below in pairwise(lines) if re.fullmatch(r" *\^+", below)}
    assert len(code) > 100
    assert max(len(line) for line in lines if line != code and "^" not in line) <= 80
    assert "kernel_cols)` or" in re.sub(r"\s+", " ", shown)
    assert max(map(len, other.splitlines())) <= 80


# -- pipes ------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_early():
    command = f"{shlex.quote(sys.executable)} -m frisket.runtime.cli.main library"
    found = subprocess.run(
        ["bash", "-c", f"{command} | head -1; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert found.stderr == ""
    assert found.stdout.splitlines()[-1] == "0"


def test_a_mask_from_standard_input(run):
    text = b"def near = abs(q - k) < w\nmask = causal & near\n"
    shown = run("explain", "-", "--set", "w=4", "--q", "9", "--k", "1", stdin=text)[1]
    assert shown.endswith("mask      mask = causal & near\n                          ^^^^\n")
    shown = run("show", "-", "--score", "softcap(5)", "--q-len", "8", stdin=b"# a comment\ncausal\n")[1]
    assert shown.startswith("mask      causal\nmeans     q >= k\nscore     softcap(5)\n")
    assert run("show", "-", stdin="\ufeffcausal".encode())[1].startswith("mask      causal\n")
    status, out, err = run("show", "-", stdin=b"causal &")
    assert (status, out) == (2, "")
    assert "standard input 1:9" in err
    assert run("show", "-", stdin=b"\xff") == (2, "", "ParameterError: standard input is not UTF-8 text\n")


def test_a_bar_on_terminals_only(monkeypatch):
    from frisket.runtime.cli.answer import progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def seen(stream, **env):
        monkeypatch.setattr(sys, "stderr", stream)
        for name, value in {"TERM": "xterm", **env}.items():
            monkeypatch.setenv(name, value)
        with progress(3) as step:
            step("timing")
        return stream.getvalue()

    assert "timing" in seen(Terminal())
    assert seen(io.StringIO()) == ""
    assert seen(io.StringIO(), FORCE_COLOR="1") == ""
    assert seen(Terminal(), TERM="dumb") == ""


# -- help -------------------------------------------------------------------------------------------------


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name:11} {command.help}\n" in out
    assert main([]) == 2
    assert capsys.readouterr() == ("", out)
    assert main(["--version"]) == 0
    assert re.fullmatch(r"frisket \d+\.\d+\.\d+\n", capsys.readouterr().out)


def examples():
    for name, p in commands().items():
        lines = p.epilog.splitlines()
        assert lines[0] == "examples:", name
        assert len(lines) > 1, name
        assert max(map(len, lines)) <= 80, name
        yield from (line.strip() for line in lines[1:])


def commands():
    (sub,) = (a for a in parser(*COMMANDS)._actions if a.dest == "==SUPPRESS==" and a.choices)
    return sub.choices


SLOW = ("frisket bench", "frisket explore")  # their own tests run theirs


SECONDS = (
    "frisket check 'causal & same(doc)'",
    "frisket emit 'causal & window(256)' --build",
    "frisket emit causal --backend triton --report",  # as test_emit_reports_what_kernels_take, of float32
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=pytest.mark.exhaustive if line.startswith(SECONDS) else ())
     for line in examples() if not line.startswith(SLOW)],
)  # fmt: skip
def test_examples_of_the_help_run(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    said, pipe, command = line.rpartition(" | ")
    if pipe and said.startswith("echo "):
        monkeypatch.setattr(sys, "stdin", io.StringIO(shlex.split(said)[1]))
    else:
        command = line
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_command_options_are_explained():
    for name, p in commands().items():
        for action in p._actions:
            assert action.help, (name, action.option_strings or action.dest)


# -- completion -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_is_a_script(capsys, name, tmp_path):
    assert main(["completion", name]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "q-len", "window"):
        assert word in script
    if shutil.which(name):
        (tmp_path / "script").write_text(script)
        assert subprocess.run([name, "-n", str(tmp_path / "script")], capture_output=True).stderr == b""


def test_bash_completes_commands_and_library_names(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def complete(*words):
        line = " ".join(map(shlex.quote, words))
        code = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_frisket frisket {words[-1]!r}\n"
        code += 'printf "%s\\n" "${COMPREPLY[@]}"'
        found = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
        return set(found.stdout.split())

    assert complete("frisket", "sh") == {"show"}
    assert {"--q-len"} <= complete("frisket", "show", "causal", "--q")
    assert {"window", "window_gap"} & complete("frisket", "show", "win") == {"window"}
    assert complete("frisket", "library", "natten2") == {"natten2d"}


# -- what it costs ----------------------------------------------------------------------------------------


def test_show_imports_what_it_needs():
    code = (
        "import sys, io, contextlib\nfrom frisket.runtime.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    main(['show', 'causal & window(256)', '--q-len', '1048576'])\n"
        "print(*sorted(sys.modules))"
    )
    modules = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
    none = "torch jax triton matplotlib lark shtab pygments rich.progress rich.syntax importlib.metadata"
    assert not modules & set(none.split())
    none = "attention.entry plans.device bench.race machine.cpp_build cli.kernels cli.timing draw.pixels draw.figure"
    assert not modules & {f"frisket.runtime.{name}" for name in none.split()}
    ours = {name for name in modules if name.startswith("frisket")}
    assert len(ours) < 90, sorted(ours)


def test_help_imports_no_numbers():
    code = "import sys\nfrom frisket.runtime.cli.main import main\nmain(['--help'])\nprint('numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert out.endswith("False\n")
