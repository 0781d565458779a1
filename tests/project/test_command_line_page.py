"""The page of the command line says what the commands say."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from frisket.runtime.cli import COMMANDS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_what_the_script_writes(monkeypatch):
    spec = spec_from_file_location("command_line", DOCS / "command_line.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setenv("COLUMNS", "80")
    written = script.PAGE.read_text(encoding="utf-8")
    assert script.page() == written, "run `python docs/command_line.py`"
    for name in COMMANDS:
        assert f"#### frisket {name}\n" in written
