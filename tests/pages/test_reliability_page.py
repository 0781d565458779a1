"""The figures of docs/reliability.md and of the reports behind it are those of the results."""

import pytest
from support.pages import script

endurance = script("endurance")


@pytest.mark.parametrize("page", endurance.SECTIONS)
def test_reliability_pages_are_up_to_date(page):
    assert endurance.page(page) == (endurance.ROOT / page).read_text(encoding="utf-8"), "run `python docs/endurance.py`"


def test_totals_of_campaigns_name_each_target():
    page = (endurance.ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    first, second = page.split("| target |")[1:3]
    names = [set(endurance.re.findall(r"^\| `(\w+)` \|", part, endurance.re.M)) for part in (first, second)]
    assert names[0] == names[1]
    assert len(names[0]) == 26
