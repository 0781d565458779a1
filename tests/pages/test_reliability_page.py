"""The figures of docs/reliability.md are those of the results."""

from support.pages import script

endurance = script("endurance")


def test_reliability_page_is_up_to_date():
    text = endurance.PAGE.read_text(encoding="utf-8")
    assert endurance.page(text) == text, "run `python docs/endurance.py`"
