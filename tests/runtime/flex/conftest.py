"""Tests of lists of tiles compare them with torch's own: they need a torch that has all that ours have."""

import inspect
from pathlib import Path

import pytest
from torch.nn.attention import flex_attention

LISTS = {
    f"test_flex_{name}.py" for name in ("block_mask", "block_mask_values", "create", "lists", "signatures", "slicing")
}
NEWER = "separate_full_blocks" in inspect.signature(flex_attention.create_block_mask).parameters


def pytest_collection_modifyitems(items):
    for item in items if not NEWER else ():
        if item.path.name in LISTS and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason="torch has fewer lists than frisket's masks: 2.13 is needed"))
