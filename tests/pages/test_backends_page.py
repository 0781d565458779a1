"""The page of backends has what their records say."""

from support.pages import script


def test_backends_page_is_up_to_date():
    made = script("backends")
    assert made.page() == made.PAGE.read_text(encoding="utf-8"), "run `python docs/backends.py`"
