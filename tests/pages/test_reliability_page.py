"""The figures of docs/reliability.md are those of the results."""

from support.scripts import script

endurance = script("endurance")


def test_the_page_is_as_written():
    text = endurance.PAGE.read_text(encoding="utf-8")
    assert endurance.page(text) == text, "run `python docs/endurance.py`"
