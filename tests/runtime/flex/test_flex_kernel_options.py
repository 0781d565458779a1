"""kernel_options: every key of torch's is used, proved, without effect, or refused in words."""

from __future__ import annotations

import typing

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.flex_attention import FlexKernelOptions  # noqa: E402

from frisket.dsl.errors import ParameterError  # noqa: E402
from frisket.flex import create_block_mask, flex_attention  # noqa: E402
from frisket.grammar.memo import cached_on  # noqa: E402
from frisket.lowering.kernels.triton.target import TritonTarget as Target  # noqa: E402
from frisket.runtime.calls.options import LaunchOptions, Tuning  # noqa: E402
from frisket.runtime.flex import score_mod  # noqa: E402
from frisket.runtime.flex.checks import KNOWN, REFUSED, options_of, read  # noqa: E402
from frisket.runtime.torch.spec import attention_of, spec_of  # noqa: E402

UNDOCUMENTED = {
    "SPLIT_KV", "PARTITION_SIZE", "num_consumer_groups", "num_buffers_warp_spec", "FLOAT32_PRECISION",
    "SKIP_MASK_SCORE", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX",
    "TANH",  # frisket's own
}  # fmt: skip


def test_kernel_options_of_torch_are_known():
    documented = set(typing.get_type_hints(FlexKernelOptions))
    assert {*KNOWN, *REFUSED} == documented | UNDOCUMENTED


@pytest.mark.parametrize(
    ("options", "tuning"),
    [
        ({}, "None"),
        ({"BLOCK_M": 64, "BLOCK_N": 32}, "forward.block_q=64,forward.block_k=32"),
        ({"BLOCK_M1": 32, "bwd_BLOCK_N1": 64}, "dkv.block_q=32,dkv.block_k=64"),
        ({"BLOCK_M2": 128, "BLOCK_N2": 16}, "dq.block_q=128,dq.block_k=16"),
        ({"bwd_num_warps": 8, "num_warps": 4}, "forward.num_warps=4,dq.num_warps=8,dkv.num_warps=8"),
        ({"num_warps": 4, "bwd_num_warps": 8}, "forward.num_warps=4,dq.num_warps=8,dkv.num_warps=8"),
        ({"fwd_num_stages": 3, "fwd_BLOCK_M": 64}, "forward.block_q=64,forward.num_stages=3"),
        ({"FLOAT32_PRECISION": "'tf32'"}, "precision=tf32"),
        ({"TANH": "exact"}, "tanh=exact"),
        ({"SPLIT_KV": 8}, "splits=8"),
        ({"SPLIT_KV": 0}, "None"),
        ({"FORCE_USE_FLEX_ATTENTION": True}, "splits=1"),
        ({"USE_TMA": True}, "forward.descriptors=True"),
        ({"PRESCALE_QK": True, "WRITE_DQ": False, "kpack": 2, "waves_per_eu": 0}, "None"),
    ],
)
def test_options_tune_the_kernels(options, tuning):
    asked = read(options)
    assert asked.tuning.text == tuning
    assert Tuning.of(asked.tuning.choices) == asked.tuning
    assert asked.backend is None


def test_a_target_is_tuned():
    target = Target("triton", 128, 64, 8, 3, dq=Target("triton", 64, 64), dkv=Target("triton", 64, 128, 8))
    tuning = Tuning(
        LaunchOptions(block_q=64),
        dq=LaunchOptions(num_warps=2),
        dkv=LaunchOptions(block_k=32),
        precision="tf32",
        splits=4,
    )
    made = tuning.applied(target)
    assert made == Target(
        "triton", 64, 64, 8, 3, precision="tf32", splits=4, fixed=True,
        dq=Target("triton", 64, 64, 2, precision="tf32", fixed=True),
        dkv=Target("triton", 64, 32, 8, precision="tf32", fixed=True),
    )  # fmt: skip
    assert Tuning().applied(target) is target
    alone = Tuning(LaunchOptions(block_q=64)).applied(Target("triton", 128, 64))
    assert (alone.block_q, alone.dq.block_q, alone.dkv.block_q) == (64, 128, 128)


@pytest.mark.parametrize("backend", ["AUTO", "TRITON", "TRITON_DECODE"])
def test_a_backend_has_no_effect_on_a_cpu(backend):
    q = torch.randn(1, 1, 32, 16)
    options = {"BACKEND": backend}
    torch.testing.assert_close(flex_attention(q, q, q, kernel_options=options), flex_attention(q, q, q))
    exported = torch.export.export(Call(options), (q,)).module()
    torch.testing.assert_close(exported(q), flex_attention(q, q, q))
    assert options_of(None, False, read(options), "cuda").backend == (None if backend == "AUTO" else "triton")


class Call(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, q):
        return flex_attention(q, q, q, kernel_options=self.options)


def test_options_travel_to_the_attention_and_its_text():
    q = torch.randn(1, 1, 32, 16)
    flex_attention(q, q, q, kernel_options={"BLOCK_M": 64, "SPLIT_KV": 2})
    att = next(reversed(cached_on(score_mod._PLAIN, "pairs", dict).values())).att
    assert att.options.tuning == Tuning(LaunchOptions(block_q=64), splits=2)
    assert "'tuning': {'forward': {'block_q': 64}, 'splits': 2}" in att.spec
    again = attention_of(spec_of(att.program, att.options, ()), ())
    assert again.options.tuning == att.options.tuning


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"BLOCKM": 64}, "no kernel option 'BLOCKM'; did you mean 'BLOCK_M'.\n  there are BLOCK_M, BLOCK_N, .*fwd_ or"),
        ({"bwd_num_wraps": 4}, "did you mean 'bwd_num_warps'"),
        ({"BLOCK_m": 64}, "did you mean 'BLOCK_M'"),
        ({"block_n1": 64}, "did you mean 'BLOCK_N1'"),
        ([1], r"kernel_options is \[1\]\n  it is a dict"),
        ({7: 4}, "no kernel option 7"),
        ({"BLOCK_M": 48}, "kernel option 'BLOCK_M' is 48; it is a power of 2, 16 at least"),
        ({"BLOCK_M": 8}, "power of 2, 16 at least"),
        ({"BLOCK_M": True}, "power of 2"),
        ({"BLOCK_M": [64]}, "its keys are names, its values numbers"),
        ({"num_warps": 3}, "'num_warps' is 3; it is a power of 2, 32 at most"),
        ({"num_stages": 0}, "it is a positive integer"),
        ({"SPLIT_KV": 2.5}, "'SPLIT_KV' is 2.5; it is a positive integer"),
        ({"PRESCALE_QK": 1}, "'PRESCALE_QK' is 1; it is True or False"),
        ({"fwd_BLOCK_M1": 64}, "the forward has BLOCK_M, BLOCK_N"),
        ({"bwd_BLOCK_M": 64}, "the backward has BLOCK_M1, BLOCK_N1, BLOCK_M2, BLOCK_N2"),
        ({"bwd_FLOAT32_PRECISION": "tf32"}, "is for the whole call; leave out 'bwd_'"),
        ({"FLOAT32_PRECISION": "bf16"}, "one of ieee, tf32, tf32x3"),
        ({"BACKEND": "CUDNN"}, "one of AUTO, TRITON, TRITON_DECODE, FLASH"),
        ({"BACKEND": "AUTO", "FORCE_USE_FLEX_ATTENTION": True}, "cannot be combined"),
        ({"SKIP_MASK_SCORE": True}, "a mask is applied wherever"),
        ({"OUTPUT_MAX": True}, r"AuxRequest\(max_scores=True\)"),
    ],
)
def test_bad_kernel_options_are_refused(options, text):
    q = torch.randn(1, 1, 16, 16)
    with pytest.raises(ParameterError, match="(?s)" + text):
        flex_attention(q, q, q, kernel_options=options)


def masks(fn, s=512):
    return create_block_mask(fn, None, None, s, s, device="cpu")


def test_promises_are_proved():
    q = torch.randn(1, 1, 512, 16)
    safe, contiguous = {"ROWS_GUARANTEED_SAFE": True}, {"BLOCKS_ARE_CONTIGUOUS": True}
    causal, late = masks(lambda b, h, q, k: q >= k), masks(lambda b, h, q, k: (q >= k) & (q != 77))
    ends = masks(lambda b, h, q, k: (k < 64) | (k >= 448))
    for block_mask, options in ((causal, safe | contiguous), (late, contiguous), (ends, safe), (None, safe)):
        flex_attention(q, q, q, None, block_mask, kernel_options=options)
    with pytest.raises(ParameterError, match="ROWS_GUARANTEED_SAFE is not so: query 77 of batch entry 0 and head 0"):
        flex_attention(q, q, q, None, late, kernel_options=safe)
    with pytest.raises(ParameterError, match="BLOCKS_ARE_CONTIGUOUS is not so: the blocks that row 0 of tiles"):
        flex_attention(q, q, q, None, ends, kernel_options=contiguous)
    with pytest.raises(ParameterError, match="'TRITON_DECODE', for fewer than 128 queries, and there are 512"):
        flex_attention(q, q, q, kernel_options={"BACKEND": "TRITON_DECODE"})
