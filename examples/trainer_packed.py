"""transformers' Trainer on packed sequences, without padding: a batch is one row, and no document sees another.

    python examples/trainer_packed.py

`DataCollatorWithFlattening` puts the documents of a batch one behind another (sequence packing) and lets their
`position_ids` begin anew. frisket reads the documents from those: `attn_implementation` is all that
changes.
The same training under eager attention gives the same losses. The Trainer needs `accelerate` beside transformers.
"""

import random

import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from frisket.integrations.transformers import register

VOCABULARY, DOCUMENTS, BATCH = 64, 24, 6


def documents():
    """Sequences of 5 to 60 tokens, each counting on in steps of its own."""
    draw, found = random.Random(0), []
    for _ in range(DOCUMENTS):
        start, step, length = draw.randrange(VOCABULARY), draw.randrange(1, 5), draw.randrange(5, 60)
        found.append({"input_ids": [(start + step * i) % VOCABULARY for i in range(length)]})
    return found


def tiny(attention):
    """A small Llama, the same whatever its attention."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, use_cache=False, **sizes)
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)


def losses(attention, folder):
    """The loss of every step of training."""
    told = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH, num_train_epochs=3, learning_rate=1e-2, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(tiny(attention), told, DataCollatorWithFlattening(), train_dataset=documents())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder="build/trainer_packed"):
    register()
    ours, eager = (losses(name, folder) for name in ("frisket", "eager"))
    for step, pair in enumerate(zip(ours, eager, strict=True)):
        print(f"step {step}: {pair[0]:.4f} under frisket, {pair[1]:.4f} under eager attention")
    assert max(abs(a - b) for a, b in zip(ours, eager, strict=True)) < 1e-3
    assert ours[-1] < ours[0] - 0.5, "the model learns"
    return ours


if __name__ == "__main__":
    main()
