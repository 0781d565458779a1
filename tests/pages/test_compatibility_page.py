"""The page of model types says what the sweep found."""

from support.scripts import script


def test_the_page_is_what_the_script_writes():
    made = script("compatibility")
    assert made.page() == made.PAGE.read_text(encoding="utf-8"), "run `python docs/compatibility.py`"
