"""What `att.source("triton")` shows: the kernels that run, as one module."""

import ast
import re

import numpy as np
import pytest

import frisket as fk
from frisket.lowering.kernels.triton import backward as triton_backward
from frisket.lowering.kernels.triton import forward as triton_forward
from frisket.lowering.kernels.triton.captured import QKV
from frisket.lowering.kernels.triton.module import Dims

SHAPE = {"q_len": 4096, "heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}


def names(text):
    return re.findall(r"^def (attention_\w+)", text, re.M)


def kernel(text, name):
    """From its decorator to the next."""
    start = text.rindex("@triton.jit", 0, text.index(f"def {name}("))
    end = text.find("\n\n\n@triton.jit", start)
    return text[start : end if end > 0 else None].rstrip()


@pytest.mark.parametrize("score", [None, "softcap(50)"])
@pytest.mark.parametrize("mask", ["causal & window(256)", "causal & same(doc)"])
def test_triton_source_has_the_forward_and_backward_kernels(mask, score):
    doc = {"doc": np.arange(4096) // 300} if "doc" in mask else {}
    stages = fk.compile(mask, score, **doc).stages(backend="triton", arch="sm_90", **SHAPE | {"kv_heads": 1})
    dims = Dims(128, 128, "bfloat16", 8)
    forward = triton_forward.emit(stages.plan, stages.target, dims)
    listed = {"attention_dkv"}  # one head has fewer columns than there are processors, in the tiles of any Triton
    backward = triton_backward.emit(stages.plan, stages.target, dims, QKV, dlse=False, listed=listed)
    steps = ["attention_delta", "attention_dq", "attention_dkv", "attention_dkv_sums"]
    assert names(stages.source) == ["attention_forward", *steps]
    for name in names(stages.source):
        assert kernel(stages.source, name) == kernel(forward if name == "attention_forward" else backward, name)
    ast.parse(stages.source)
    assert stages.source.count("import triton\n") == 1
    head = stages.source[: stages.source.index('"""\n\nimport')]
    assert [line.split(":")[0] for line in head.splitlines() if line.startswith("attention_")] == names(stages.source)


def test_of_few_queries_it_has_their_kernels():
    stages = fk.compile("causal & window(w)", w=1024).stages(
        backend="triton", arch="sm_90", **SHAPE | {"q_len": 1, "kv_len": 4096}, origin=(0, 0, 4095, 0)
    )
    assert names(stages.source) == ["attention_decode", "attention_combine"]
    assert stages.target.splits > 1
    assert stages.target.block_q == 16
    assert f"tiles of 16 packed queries by {stages.target.block_k} keys" in stages.source


def test_triton_source_has_learned_tables_sinks_and_dropout():
    torch = pytest.importorskip("torch")
    bias, sinks = torch.nn.Parameter(torch.zeros(8)), torch.zeros(8)
    shown = [
        fk.compile("causal", lambda score, b, h, q, k, t=t: score + t[h] * (k - q), sinks=s, dropout=rate)
        .source("triton", arch="sm_90", **SHAPE)
        for t, s, rate in ((bias, sinks, 0.1), (bias.detach(), None, 0.0))
    ]  # fmt: skip
    for word in ("summed over keys", "Sinks", "kept ="):
        assert [word in text for text in shown] == [True, False], word


def test_triton_stages_show_the_target_of_each_kernel():
    text = fk.compile("causal").stages(backend="triton", arch="sm_90", **SHAPE).text("target")
    assert [line.split(":")[0].strip() for line in text.splitlines()] == ["triton", "dq", "dkv"]


def test_bounds_are_clamped_once():
    """The closed form holds the ends of the call's keys already: no kernel takes the larger of a number and itself."""
    source = fk.compile("causal").source("triton", arch="sm_90", **SHAPE)
    assert source.count("first = 0\n    full_first = 0\n") == 2
    assert source.count("last = tl.minimum(q_last, k_last) - k_first") == 2
