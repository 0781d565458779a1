"""The programs of examples/ hold their own assertions, and docs/examples.md says what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import script

ROOT = Path(__file__).resolve().parents[2]
examples = script("examples")
PAGE = examples.PAGE.read_text(encoding="utf-8")


def printed(program):
    """What a program printed, as the page has it."""
    shown = re.search(rf"\[The program\]\(\.\./examples/{program}\.py\) prints\n\n((?:    .*\n|\n)+)", PAGE)
    return re.sub(r"^    ", "", shown[1], flags=re.M).rstrip("\n") + "\n"


def sentences(output):
    """The lines that are prose, numbers left out: those of other sizes and machines are others."""
    lines = [line for line in output.splitlines() if re.match(r"[A-Z]", line)]
    return [re.sub(r"(#[\s,]*)+", "#", re.sub(r"\d[\d.,]*(?:e[-+]\d+)?", "#", line)) for line in lines]


def test_examples_page_is_up_to_date():
    assert examples.page({program: printed(program) for program in examples.PROGRAMS}) == PAGE


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", examples.PROGRAMS)
def test_example_programs_run_and_print_the_page(program):
    """With its assertions: exit status 0; and it prints the sentences that the page shows."""
    if program == "natten_image":
        pytest.importorskip("matplotlib")
    kept = os.environ.copy()
    if program == "long_context_ring":  # by library calls XLA compiles it for half a minute
        kept.pop("FRISKET_BACKEND", None)
    command = [sys.executable, f"examples/{program}.py", "--small"]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sentences(done.stdout) == sentences(printed(program))
