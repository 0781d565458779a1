"""The pages of engines and of backends have the tables that their scripts write, with entries enough by flags."""

import importlib.util
import sys
from pathlib import Path

import pytest
from support.pages import script

HERE = Path(__file__).parents[2] / "docs" / "engines.py"


@pytest.fixture(scope="module")
def engines():
    spec = importlib.util.spec_from_file_location("engines_page", HERE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_engines_page_is_up_to_date(engines):
    assert engines.PAGE.read_text(encoding="utf-8") == engines.page(), "python docs/engines.py"


def test_backends_page_is_up_to_date():
    made = script("backends")
    assert made.page() == made.PAGE.read_text(encoding="utf-8"), "run `python docs/backends.py`"


def test_how_many_entries_engines_take(engines):
    found = engines.rows()
    assert sum(r.flash == "flags" for r in found) >= 12
    assert sum(r.flash != "–" for r in found) >= 60
    assert all(r.proof != "–" for r in found if "flags" in (r.flash, r.square, r.splash))
