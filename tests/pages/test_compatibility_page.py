"""The page of model types says what the sweep found."""

from support.pages import script


def test_compatibility_page_is_up_to_date():
    made = script("compatibility")
    assert made.page() == made.PAGE.read_text(encoding="utf-8"), "run `python docs/compatibility.py`"
