"""A tiny random Llama that trl trains under frisket, compared with the same training under sdpa and eager attention."""

from __future__ import annotations

import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import selective_log_softmax

from frisket.integrations.transformers import register

register()
torch.set_num_threads(1)
STEPS = 20
WORDS = [f"w{i}" for i in range(61)]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip
PACKED = {"packing": True, "max_length": 128}
SFT = {
    "packed": PACKED,  # best fit decreasing
    "packed, documents split": {**PACKED, "packing_strategy": "bfd_split"},
    "packed, wrapped": {**PACKED, "packing_strategy": "wrapped"},
    "packed, wrapped, padding-free": {**PACKED, "packing_strategy": "wrapped", "padding_free": True},
    "padding-free": {"padding_free": True, "max_length": None},
    "padded": {"max_length": 64},
    "padded to 32": {"max_length": 64, "pad_to_multiple_of": 32},
    "without checkpointing": {**PACKED, "gradient_checkpointing": False},
    "reentrant checkpointing": {**PACKED, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "NEFTune": {**PACKED, "neftune_noise_alpha": 5.0},
    "dynamic fine-tuning": {**PACKED, "loss_type": "dft"},
    "LoRA": {**PACKED, "learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the model: DPO and GRPO load it again, for the reference."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def sentences(count, low, high):
    """Texts of `low` to `high` words, each of them a fixed number of words after the one before it."""
    draw, texts = random.Random(0), []
    for _ in range(count):
        start, step, length = draw.randrange(61), draw.randrange(1, 5), draw.randrange(low, high)
        texts.append(" ".join(WORDS[(start + step * i) % 61] for i in range(length)))
    return texts


def train(kind, config, attention, saved, folder, tokenizer, rows, options, **more):
    """The trainer after its steps; one kind and the same options train the same model on the same rows."""
    model = LlamaForCausalLM.from_pretrained(saved, attn_implementation=attention)
    # AdamW's default epsilon moves a weight whose gradient is 0 by the sign of that gradient's rounding error
    common = {
        "output_dir": str(folder / attention), "max_steps": STEPS, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "bf16": False, "per_device_train_batch_size": 4,
        "learning_rate": 1e-3, "adam_epsilon": 1e-6, "seed": 0,
    }  # fmt: skip
    trainer = kind(
        model, args=config(**{**common, **options}), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, **more,
    )  # fmt: skip
    trainer.train()
    assert trainer.model.config._attn_implementation == attention
    return trainer


def same(kind, config, saved, folder, tokenizer, rows, options, names=("loss", "grad_norm"), **more):
    """Trains under each attention; what is logged at every step has to agree. Gives frisket's trainer."""
    trainers = {
        attention: train(kind, config, attention, saved, folder, tokenizer, rows, options, **more)
        for attention in ("frisket", "sdpa", "eager")
    }
    logged = {
        attention: torch.tensor([[x[n] for n in names] for x in trainer.state.log_history if "loss" in x])
        for attention, trainer in trainers.items()
    }
    for attention in ("sdpa", "eager"):
        print(attention, "differs by", (logged["frisket"] - logged[attention]).abs().max(0).values)
        assert len(logged[attention]) == options.get("max_steps", STEPS)
        torch.testing.assert_close(logged["frisket"], logged[attention], rtol=1e-5, atol=1e-5, msg=attention)
    return trainers["frisket"]


@pytest.mark.parametrize("name", SFT)
def test_sft_equals_sdpa_and_eager_attention(name, saved, tmp_path, tokenizer):
    rows = [{"text": text} for text in sentences(160, 8, 60)]
    more = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if name == "LoRA" else {}
    same(SFTTrainer, SFTConfig, saved, tmp_path, tokenizer, rows, SFT[name], **more)


@pytest.mark.parametrize("name", ["packed", "packed, documents split", "padding-free"])
def test_documents_of_a_row_are_apart(name, saved, tmp_path, tokenizer):
    """The loss of a row is that of its documents one by one, and another one where they see each other."""
    rows = [{"text": text} for text in sentences(24, 8, 60)]
    trainer = train(SFTTrainer, SFTConfig, "frisket", saved, tmp_path, tokenizer, rows, {**SFT[name], "max_steps": 1})
    model, batch = trainer.model.eval(), next(iter(trainer.get_train_dataloader()))
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    assert len(lengths) >= 4
    alone = LlamaForCausalLM.from_pretrained(saved, attn_implementation="eager").eval()
    alone.load_state_dict(model.state_dict())
    losses = [alone(ids, labels=ids).loss * (ids.shape[1] - 1) for ids in batch["input_ids"].split(lengths, 1)]
    expected = sum(losses) / sum(n - 1 for n in lengths)
    torch.testing.assert_close(model(**batch, use_cache=False).loss, expected, rtol=1e-5, atol=0)
    apart = {n: x for n, x in batch.items() if n in ("input_ids", "labels")}
    assert abs(model(**apart, use_cache=False).loss - expected) > 1e-3


def test_dpo_equals_sdpa_and_eager_attention(saved, tmp_path, tokenizer):
    prompts, chosen, rejected = sentences(120, 3, 30), sentences(240, 3, 20)[120:], sentences(360, 3, 20)[240:]
    rows = [{"prompt": p, "chosen": " " + c, "rejected": " " + r} for p, c, r in zip(prompts, chosen, rejected)]
    names = "loss", "grad_norm", "rewards/margins", "logps/chosen"
    same(DPOTrainer, DPOConfig, saved, tmp_path, tokenizer, rows, {}, names)
    lora = LoraConfig(r=4, target_modules="all-linear")
    same(DPOTrainer, DPOConfig, saved, tmp_path, tokenizer, rows, {"learning_rate": 1e-2}, names, peft_config=lora)


@pytest.mark.parametrize("batching", [False, True])
def test_grpo_equals_sdpa_and_eager_attention(batching, saved, tmp_path, tokenizer):
    def variety(completion_ids, **_):
        return [len(set(tokens)) / 8 for tokens in completion_ids]

    rows = [{"prompt": text} for text in sentences(120, 3, 30)]
    options = {"max_completion_length": 12, "num_generations": 4, "beta": 0.1}
    if batching:
        pages = {"num_blocks": 64, "block_size": 32, "max_batch_tokens": 256}
        options |= {"max_steps": 5}  # a step of generation takes several times as long
        options |= {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": pages}
    names = "loss", "grad_norm", "reward", "kl", "completions/mean_length"
    same(GRPOTrainer, GRPOConfig, saved, tmp_path, tokenizer, rows, options, names, reward_funcs=variety)


class RowLinear(torch.nn.Linear):
    """Each entry of the result is one sum, whatever the batch is."""

    def forward(self, x):
        return (x[..., None, :] * self.weight).sum(-1)


def test_grpo_samples_with_the_bits_of_its_training(saved, tmp_path, tokenizer):
    """`config.frisket_invariant`: the logits of tokens that a policy samples, step by step from a cache, are those of
    whole rows. Linear layers sum row by row, because torch's depend on the batch; so does the head that trl fuses with
    the loss, whose log-probabilities are close."""
    rows = [{"prompt": text} for text in sentences(24, 3, 30)]
    options = {"max_completion_length": 12, "num_generations": 4, "max_steps": 1, "output_dir": str(tmp_path)}
    options |= {"report_to": [], "use_cpu": True, "save_strategy": "no", "bf16": False, "seed": 0}
    options |= {"per_device_train_batch_size": 4, "disable_tqdm": True}
    differences = {}
    for invariant in (True, False):
        model = LlamaForCausalLM.from_pretrained(saved, attn_implementation="frisket")
        model.config.frisket_invariant = invariant
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.__class__ = RowLinear
        trainer = GRPOTrainer(
            model, args=GRPOConfig(**options), train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            reward_funcs=lambda completion_ids, **_: [float(len(set(tokens))) for tokens in completion_ids],
        )  # fmt: skip
        trainer.train()
        policy = trainer.model.eval()
        # of one length: `generate` counts positions from the first token, trl from the padding before it
        prompts = [" ".join(row["prompt"].split()[:3]) for row in rows[:4]]
        asked = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)
        torch.manual_seed(0)
        how = {"do_sample": True, "max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
        with torch.no_grad():
            sampled = policy.generate(**asked, **how, eos_token_id=None, pad_token_id=0)
            new = sampled.sequences[:, asked["input_ids"].shape[1] :]
            mask = torch.ones_like(sampled.sequences)
            logps, *_ = trainer._get_per_token_logps_and_entropies(policy, sampled.sequences, mask, new.shape[1])
            logits = policy(sampled.sequences).logits[:, -new.shape[1] - 1 : -1]
        of_steps = torch.stack(sampled.logits, 1)
        differences[invariant] = (of_steps - logits).abs().max().item()
        torch.testing.assert_close(selective_log_softmax(of_steps, new), logps, rtol=1e-5, atol=1e-5)
    assert differences[True] == 0
    assert 0 < differences[False] < 1e-4
