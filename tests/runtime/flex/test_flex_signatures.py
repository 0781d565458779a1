"""frisket.flex has torch's signatures; docs/flex.md lists every argument of them."""

from __future__ import annotations

import inspect
import re
from typing import get_type_hints

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from support.flex_masks import LACKING
from support.pages import DOCS

import frisket as fk
import frisket.flex as ours

BESIDE = (
    "_mask_mod_signature", "_score_mod_signature", "_DEFAULT_SPARSE_BLOCK_SIZE", "_identity", "_vmap_for_bhqkv",
    "_MaskModWrapper", "_convert_mask_to_block_mask",
)  # fmt: skip
MADE = ("_create_sparse_block_from_block_mask", "_create_empty_block_mask")
METHODS = ("as_tuple", "numel", "sparsity", "to_dense", "to_string", "to", "_adjust")
FUNCTIONS = {
    "flex_attention": (theirs.flex_attention,),
    "create_block_mask": (theirs.create_block_mask,),
    "create_mask": (theirs.create_mask,),
    "and_masks, or_masks and noop_mask": (theirs.and_masks, theirs.or_masks, theirs.noop_mask),
    "BlockMask and BlockMask.from_kv_blocks": (theirs.BlockMask, theirs.BlockMask.from_kv_blocks),
}
PAIRS = [
    *((getattr(theirs, n), getattr(ours, n)) for n in theirs.__all__ if n not in ("FlexKernelOptions", "BlockMask")),
    *((getattr(theirs, n), getattr(ours, n)) for n in MADE),
    *((getattr(theirs.BlockMask, n), getattr(ours.BlockMask, n)) for n in ("__init__", "from_kv_blocks", *METHODS)),
]


def rows(page: str, heading: str) -> dict[str, str]:
    """The first cell of each row under a heading, as written in code, and the second."""
    (section,) = re.findall(rf"^### {re.escape(heading)}\n(.*?)(?=^#|\Z)", page, re.S | re.M)
    return dict(re.findall(r"^\| `([^`]+)` \| (\w+) \|", section, re.M))


def lacking(page: str) -> list[str]:
    """The rows that the tables lack, and those that torch has nothing for."""
    wanted = {
        f"Arguments of {title}": {n for one in functions for n in inspect.signature(one).parameters}
        for title, functions in FUNCTIONS.items()
    }
    wanted["Methods of BlockMask"] = {
        *(f"{n}({', '.join(list(inspect.signature(getattr(theirs.BlockMask, n)).parameters)[1:])})" for n in METHODS),
        "shape",
    }
    wanted["AuxRequest, AuxOutput and names that PyTorch does not document"] = {
        *(f"{n}({', '.join(inspect.signature(getattr(theirs, n)).parameters)})" for n in ("AuxRequest", "AuxOutput")),
        "FlexKernelOptions", *BESIDE, *MADE,
    }  # fmt: skip
    found = []
    for heading, names in wanted.items():
        have = rows(page, heading)
        found += [f"{heading}: no row for {n}" for n in sorted(names - set(have))]
        found += [f"{heading}: torch has no {n}" for n in sorted(set(have) - names - LACKING)]
        found += [f"{heading}: {n} {word}" for n, word in have.items() if word not in ("accepts", "differs", "refuses")]
    return found


def test_flex_page_lists_each_argument_of_torch():
    page = (DOCS / "flex.md").read_text(encoding="utf-8")
    assert lacking(page) == []
    assert lacking(page.replace("| `scale` | accepts", "| `skale` | does")) == [
        "Arguments of flex_attention: no row for scale",
        "Arguments of flex_attention: torch has no skale",
        "Arguments of flex_attention: skale does",
    ]


def test_flex_tables_have_each_public_name_of_torch():
    named = {one.__name__ for functions in FUNCTIONS.values() for one in functions if inspect.isfunction(one)}
    assert set(theirs.__all__) - named == {"BlockMask", "AuxOutput", "AuxRequest", "FlexKernelOptions"}
    public = {n for n in vars(theirs.BlockMask) if not n.startswith("_")} - {"from_kv_blocks", "shape"}
    fields = set(inspect.signature(theirs.BlockMask).parameters)
    assert public - fields == {n for n in METHODS if not n.startswith("_")}


def test_flex_page_lists_each_kernel_option_of_torch():
    page = (DOCS / "flex.md").read_text(encoding="utf-8")
    section = page[page.index("### kernel_options") : page.index("## Accepts, differs, refuses")]
    listed = {n for cell in re.findall(r"^\| (`.*?) \|", section, re.M) for n in re.findall(r"`(\w+)`", cell)}
    assert {re.sub("^(fwd|bwd)_", "", n) for n in get_type_hints(theirs.FlexKernelOptions)} - listed == set()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_arguments_are_those_of_torch(pair):
    torchs, own = (list(inspect.signature(x).parameters.values()) for x in pair)
    assert {p.name for p in own[len(torchs) :]} <= LACKING
    own = own[: len(torchs)]
    if LACKING:  # an older torch asks for more
        own = [p.replace(default=t.default) if t.default is t.empty else p for p, t in zip(own, torchs, strict=True)]
    expected, found = ([(p.name, p.kind, p.default) for p in x] for x in (torchs, own))
    assert found == expected


@pytest.mark.parametrize("name", BESIDE)
def test_names_that_torch_does_not_document(name):
    assert getattr(ours, name) is getattr(theirs, name)


def test_identity_is_no_score_mod():
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.flex_attention(q, k, v, ours._identity), ours.flex_attention(q, k, v))


def test_values_that_the_tables_refuse():
    with pytest.raises(fk.ShapeError, match="B is 0"):
        ours.create_block_mask("causal", 0, 1, 256, 256, "cpu")
    with pytest.raises(fk.ShapeError, match="H is 0"):
        ours.create_mask("causal", 1, 0, 25, 25, "cpu")
    for lengths in ((0, 256), (256, 0)):
        found, expected = (m.create_block_mask(theirs.noop_mask, 1, 1, *lengths, "cpu") for m in (ours, theirs))
        assert torch.equal(found.kv_num_blocks, expected.kv_num_blocks)
