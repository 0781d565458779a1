"""Every block of code on every page of docs/ is true, as support/pages.py says; those of a page share their names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.pages import DOCS, blocks

MIGRATING = "migrating.md"
ELSEWHERE = {MIGRATING, "recipes.md"}  # below, and test_recipes.py
PAGES = [str(p.relative_to(DOCS)) for p in sorted(DOCS.rglob("*.md")) if p.parent.name != "gallery"]  # test_gallery.py
EIGHT = "train-packed-jax.md"  # sets up eight devices, which a process does before JAX's first call
LONG = {"caches.md", "flax.md", "guide.md", "invariant.md", "operations.md", "weights.md", "train-packed.md", EIGHT}
NOT_RUN = {
    ("triton.md", "needs a GPU; tests/runtime/backends/test_tuned.py races tiles in Triton's interpreter"),
    ("triton.md", "compiles for a GPU; tests/runtime/backends/test_warm_gpu.py does"),
    ("index.md", "installs"),
    ("quickstart.md", "installs"),
    ("device.md", "tables on a GPU"),
    ("device.md", "a GPU"),
    ("device.md", "installs"),
    ("explorer.md", "serves until Ctrl-C"),
    ("parallel.md", "several processes, as in examples/context_parallel.py"),
    ("parallel.md", "several devices"),
    ("parallel.md", "what several processes say"),
    ("training.md", "several processes, as in examples/torchtitan_style.py"),
    ("training.md", "accelerate"),
    ("triton.md", "a GPU"),
    ("triton.md", "compiles for GPUs; tests/lowering/kernels/triton/test_triton_table.py does"),
    ("sdpa.md", "prints the time of day"),
    ("training.md", "torchtitan, as in tests/real/torchtitan/job.py"),
    ("training.md", "trl, as in tests/real/trl/job.py"),
    ("training.md", "MaxText is not installed here; tests/real/maxtext runs this program"),
    ("diffusers.md", "diffusers, as in tests/real/diffusers/job.py"),
    ("easydel.md", "EasyDeL"),
    ("vllm.md", "vLLM"),
    (MIGRATING, "flash_attn is for GPUs"),
    (MIGRATING, "Paddle"),
    (MIGRATING, "xformers"),
    ("reliability.md", "takes a minute, and needs a checkout"),
}


def test_blocks_that_pages_do_not_run_are_listed():
    assert {(page, block.why) for page in PAGES for block in blocks(page) if block.why} == NOT_RUN


@pytest.fixture
def own_registries(monkeypatch):
    """A page may register operators."""
    from frisket.operations import AttentionRegistry, OperationRegistry

    for registry in (AttentionRegistry, OperationRegistry):
        monkeypatch.setattr(registry, "_known", dict(registry._known))


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.exhaustive if p in LONG else ()) for p in PAGES if p not in ELSEWHERE]
)
def test_page_blocks_run_and_print_the_shown_output(page, tmp_path, monkeypatch, request):
    if page == "operations.md":
        request.getfixturevalue("own_registries")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    if page == EIGHT:
        run_in_a_new_process(page)
        return
    names: dict = {}
    for block in blocks(page):
        if not block.why:
            block.run(names)


def run_in_a_new_process(page):
    code = f"from support.pages import blocks\nnames = {{}}\nfor block in blocks({page!r}):\n    block.run(names)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


# What the left sides mean that do not run here.
BEFORE = {
    "flash_attn_varlen_func": (lambda q, k: (q >= k) & ((q < 100) == (k < 100)), None),
    "flash_attn_func": (lambda q, k: (q >= k) & (q - k <= 63), 50.0),
    "flashmask_attention": (lambda q, k: (q >= k) & (q // 100 == k // 100), None),
    "BlockDiagonalCausalMask": (lambda q, k: (q >= k) & (q // 100 == k // 100), None),
}


def meant(text, names):
    """Dense attention, as the left side has it."""
    ((seen, cap),) = (BEFORE[word] for word in BEFORE if re.search(rf"\b{word}\b", text))
    q, k, v = (names[x].numpy().astype(float) for x in "qkv")
    scores = q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5
    scores = cap * np.tanh(scores / cap) if cap else scores
    scores = np.where(seen(*np.ogrid[:256, :256]), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def test_moving_here_changes_nothing(recwarn):
    text = (DOCS / MIGRATING).read_text(encoding="utf-8")
    names: dict = {}
    first, *_ = blocks(MIGRATING)
    first.run(names)
    pairs = re.findall(r'<div class="grid" markdown>\n(.*?)\n</div>', text, re.S)
    assert 1 + 2 * len(pairs) == len(blocks(MIGRATING))
    assert len(pairs) == 9
    for pair in pairs:
        before, after = blocks(MIGRATING, pair)
        if before.why:
            want = meant(before.text, names)
        else:
            before.run(names)
            want = np.asarray(names["out"])
        names["out"] = None
        after.run(names)
        np.testing.assert_allclose(np.asarray(names["out"]), want, atol=2e-5, err_msg=after.text)
