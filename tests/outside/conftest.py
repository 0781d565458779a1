"""The tests of this folder are a tier of their own: `pytest -m outside`."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing is imported here for a run of another tier."""
    chosen = config.option.markexpr
    return True if chosen and "outside" not in chosen.replace("not outside", "") else None


@pytest.hookimpl(tryfirst=True)  # before pytest looks at markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.outside)
