"""torchtitan with frisket.flex.install(): the debug models, and its Trainer in two processes.

Dense attention that autograd differentiates is the reference: torch's flex_attention has no backward on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

warnings.filterwarnings("error", "torch's flex_attention is still in")
L, VOCABULARY = 256, 2048


def dense(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
    """What FlexAttention.compiled_flex_attn computes, in plain torch."""
    from torch.nn.attention.flex_attention import AuxOutput

    at = (torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate((len(q), 1, L, L)))
    seen = block_mask.mask_mod(*at)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    score = (q @ k.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    score = score.masked_fill(~seen, -torch.inf)
    out = (score.softmax(-1) @ v.float()).to(q.dtype)
    return out, AuxOutput(score.logsumexp(-1) if return_aux.lse else None)


@pytest.fixture(scope="module")
def installed():
    """frisket, installed after torchtitan had imported torch's functions."""
    from torchtitan.models import gpt_oss, llama3  # noqa: F401
    from torchtitan.models.common import attention

    import frisket.flex

    assert attention.flex_attention.__module__ == "torch.nn.attention.flex_attention"
    with frisket.flex.install() as installed:
        print(installed)
        assert attention.flex_attention is frisket.flex.flex_attention
        assert attention.create_block_mask is frisket.flex.create_block_mask
        assert "torchtitan.models.common.attention.FlexAttention._compiled_flex_attn" in installed.changed
        assert "torchtitan.models.common.attention._compiled_create_block_mask" in installed.changed
        yield installed


@pytest.fixture
def attention(installed):
    """torchtitan's module with FlexAttention."""
    from torchtitan.models.common import attention

    return attention


@pytest.fixture
def reference(attention, monkeypatch):
    """Calls a function with dense attention in the place of flex_attention."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(attention.FlexAttention, "compiled_flex_attn", staticmethod(dense))
            return function()

    return call


def model(name, layers=2, dtype=torch.float32):
    """A debug model with random weights and its first layers."""
    from torchtitan.models import gpt_oss, llama3

    torch.manual_seed(0)
    config = {"llama3": llama3, "gpt_oss": gpt_oss}[name].model_registry("debugmodel", attn_backend="flex").model
    config.layers = config.layers[:layers]
    made = config.build()
    made.init_states()
    return made.to(dtype)


def batch():
    """Two rows of packed documents: tokens, and positions that start again with each document."""
    tokens = torch.randint(VOCABULARY, (2, L), generator=torch.Generator().manual_seed(1))
    lengths = [[100, 30, L - 130], [L - 60, 60]]
    return tokens, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def losses(net, steps=6):
    tokens, positions = batch()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        logits = net(tokens, positions, net.get_attention_masks(positions)).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def trained(installed):
    """Losses of the small llama3 under frisket."""
    return losses(model("llama3"))


def test_logits_equal_dense_attention(attention, reference):
    """All six layers of the debug model."""
    import frisket.flex

    net, (tokens, positions) = model("llama3", layers=6), batch()
    masks = net.get_attention_masks(positions)
    assert type(masks) is frisket.flex.BlockMask
    with torch.no_grad():
        logits = net(tokens, positions, masks)
        expected = reference(lambda: net(tokens, positions, masks))
    print("logits differ by", (logits - expected).abs().max().item(), "of", expected.abs().max().item())
    assert (logits - expected).abs().max() <= 2e-6


def test_losses_of_six_steps_equal_dense_attention(trained, reference):
    expected = reference(lambda: losses(model("llama3")))
    print("losses", trained, "dense", expected)
    assert trained[5] < trained[0] - 0.3
    assert max(abs(x - y) for x, y in zip(trained, expected, strict=True)) <= 2e-5


@pytest.mark.parametrize("policy", ["SelectiveAC", "FullAC"])
def test_losses_are_the_same_with_checkpointing(trained, policy):
    from torchtitan.distributed import activation_checkpoint

    net = model("llama3")
    getattr(activation_checkpoint, policy).Config().build(dump_folder="").apply(net)
    assert losses(net) == trained


def test_each_block_compiles_to_one_graph(trained):
    """With inductor, as torchtitan's `compile.enable` has it; `fullgraph` raises at a break."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = model("llama3")
    for block in net.layers.values():
        block.compile(fullgraph=True)
    found = losses(net)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert max(abs(x - y) for x, y in zip(found, trained, strict=True)) <= 2e-5


def test_sinks_of_gpt_oss_get_gradients_of_dense_attention(attention, reference):
    """The attention of gpt_oss with sinks, in layers with and without a window. The experts need bfloat16."""
    net, (_, positions) = model("gpt_oss"), batch()
    masks = net.get_attention_masks(positions)
    assert sorted(masks) == ["basic_mask", "sliding_window_mask"]
    keys = set()
    for block in net.layers.values():
        keys.add(block.attn_mask_key)
        x = torch.randn(2, L, 256, generator=torch.Generator().manual_seed(2))
        torch.nn.init.normal_(block.attention.sinks, std=1.0)

        def step(block=block, x=x):
            block.zero_grad()
            out = block.attention(x, masks[block.attn_mask_key], positions)
            out.square().sum().backward()
            return out.detach(), *(p.grad.clone() for p in block.attention.parameters())

        for name, mine, other in zip(["out", *dict(block.attention.named_parameters())], step(), reference(step)):
            scale = other.abs().max()
            print(block.attn_mask_key, name, ((mine - other).abs().max() / scale).item())
            assert (mine - other).abs().max() <= 4e-6 * scale, name
    assert keys == set(masks)


def test_gpt_oss_trains_in_bfloat16(attention, reference):
    """The whole model. Sums of 16 bits are in another order, so later steps drift apart."""
    found = losses(model("gpt_oss", 1, torch.bfloat16), 2)
    expected = reference(lambda: losses(model("gpt_oss", 1, torch.bfloat16), 1))
    print("losses", found, "dense", expected)
    assert found[1] < found[0] - 1
    assert abs(found[0] - expected[0]) <= 4e-3


def test_undo_gives_torchs_functions_back(attention, installed):
    """After the tests above: torch's own flex_attention has the same logits, and refuses to train on a CPU."""
    net, (tokens, positions) = model("llama3"), batch()

    def logits():
        return net(tokens, positions, net.get_attention_masks(positions))

    with torch.no_grad():
        ours = logits()
    installed.undo()
    assert attention.flex_attention.__module__ == "torch.nn.attention.flex_attention"
    with torch.no_grad():
        assert (ours - logits()).abs().max() <= 2e-6
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        logits()


def test_trainer_with_fsdp_and_context_parallelism(tmp_path):
    """Two processes of gloo, which shard parameters and the sequence by balanced rows of tiles, give the losses of one
    process."""
    results = []
    for processes, balance in ((1, "none"), (2, "ptrr")):
        arguments = ["--nproc-per-node", str(processes), "--master-port", str(29500 + os.getpid() % 400), __file__]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *arguments, balance],
            cwd=tmp_path, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
        results.append(json.loads((tmp_path / "losses.json").read_text()))
    print(results)
    alone, parallel = results
    assert alone[2] < alone[0] - 0.3
    assert max(abs(x - y) for x, y in zip(parallel, alone, strict=True)) <= 2e-5


def train(balance: str) -> None:
    """torchtitan's Trainer in this process. It is made for accelerators: three of its calls know no CPU."""
    import torchtitan.tools.utils

    torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", torch.cpu
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torchtitan import trainer
    from torchtitan.components import metrics
    from torchtitan.distributed import fsdp
    from torchtitan.models.llama3 import config_registry

    import frisket.flex

    frisket.flex.install()
    memory = types.SimpleNamespace(
        device_name="cpu", device_capacity=1, get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6),
        reset_peak_stats=lambda: None,
    )  # fmt: skip
    metrics.build_device_memory_monitor = lambda: memory  # there is no memory_stats of a CPU
    trainer.dist_utils.set_pg_timeouts = lambda *_, **__: None  # its barrier takes the number of a device
    undivided = fsdp.disable_fsdp_gradient_division

    def summed(model: torch.nn.Module) -> None:
        undivided(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM

    fsdp.disable_fsdp_gradient_division = summed
    config = config_registry.llama3_debugmodel()
    config.hf_assets_path = "tokenizer"
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 512, 3
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.checkpoint.enable = config.validator.enable = False
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.context_parallel_degree = int(os.environ["WORLD_SIZE"])
    config.parallelism.context_parallel_load_balancer = None if balance == "none" else balance
    torch.distributed.init_process_group("gloo")
    if not torch.distributed.get_rank():
        write_inputs()
    torch.distributed.barrier()
    made = trainer.Trainer(config)
    weights = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.model_parts[0].parameters():  # the same, however they are sharded
            whole = torch.randn(parameter.shape, generator=weights) * 0.02 + (parameter.dim() == 1)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)
    found: list[float] = []
    made.metrics_processor.log = lambda step, loss, *_, **__: found.append(loss)
    made.train()
    made.close()
    if not torch.distributed.get_rank():
        Path("losses.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def write_inputs() -> None:
    """A tokenizer and the text that torchtitan calls c4_test, which its wheel lacks."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    Path("tokenizer").mkdir(exist_ok=True)
    Path("tests/assets/c4_test").mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learn = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["a mask says which keys a query sees"], learn)
    tokenizer.save("tokenizer/tokenizer.json")
    Path("tokenizer/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    rows = [json.dumps({"text": f"document {i} " * (i % 17 + 3)}) for i in range(200)]
    Path("tests/assets/c4_test/data.json").write_text("\n".join(rows))


if __name__ == "__main__":
    train(sys.argv[1])
