"""The page of the command line says what the commands say."""

from support.pages import script

from frisket.runtime.cli.main import COMMANDS


def test_command_line_page_is_up_to_date(monkeypatch):
    made = script("command_line")
    monkeypatch.setenv("COLUMNS", "80")
    written = made.PAGE.read_text(encoding="utf-8")
    assert made.page() == written, "run `python docs/command_line.py`"
    for name in COMMANDS:
        assert f"\n### frisket {name}\n" in written
