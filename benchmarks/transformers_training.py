"""A training step of a tiny Llama on packed documents: `python benchmarks/transformers_training.py`.

Forward, backward and AdamW on one row of 4,096 tokens, the same model three times: under transformers' eager
attention, its sdpa, and frisket. Where documents begin is said by `position_ids`, as transformers' collators do.
"files": the files that the README's first command packs, their bytes for tokens, cut to fit. "four": four documents
of 1,024 tokens. "one": one document, causal. Before anything is timed the three models have to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from store import Row, run_parts

from frisket.integrations.transformers import register
from frisket.runtime.bench.machine import raced
from frisket.runtime.packed import pack

ROOT = Path(__file__).parent.parent
LENGTH, THREADS = 4096, 2
MODEL = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
GOALS = {"eager / frisket": 1.0, "sdpa / frisket": 1.0}


def documents() -> tuple[torch.Tensor, dict[str, tuple[int, ...]]]:
    """Tokens [1, LENGTH], and the lengths of the documents in every case."""
    files = pack([ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CHANGELOG.md"], LENGTH)
    tokens = torch.from_numpy(files.tokens).long()[None]
    return tokens, {"files": files.lengths, "four": (LENGTH // 4,) * 4, "one": (LENGTH,)}


def step_of(implementation: str, tokens: torch.Tensor, lengths: tuple[int, ...]) -> Callable[[], float]:
    """A training step of a model of its own; gives the loss."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**MODEL)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]

    def step() -> float:
        optimizer.zero_grad()
        loss = model(tokens, position_ids=positions, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def training(rounds: int) -> Iterator[tuple[str, Row]]:
    tokens, cases = documents()
    for name, lengths in cases.items():
        steps = {who: step_of(who, tokens, lengths) for who in ("frisket", "eager", "sdpa")}
        losses = {who: [step() for _ in range(2)] for who, step in steps.items()}  # the second is after an update
        for who, found in losses.items():
            torch.testing.assert_close(found, losses["eager"], rtol=1e-4, atol=0, msg=f"{who}: {losses}")
        row: Row = raced(steps, rounds)
        if name != "one":
            row["goals"] = {"at least": {"ratios": GOALS}}
        row["notes"] = {"documents": len(lengths), "shortest": min(lengths), "longest": max(lengths)}
        yield name, row


def settings(part: str) -> dict[str, Any]:
    return {"tokens": LENGTH, "threads": THREADS, "dtype": "float32", "transformers": transformers.__version__, **MODEL}


def main() -> None:
    register()
    torch.set_num_threads(THREADS)
    run_parts(__doc__, {"step": training}, "transformers-training", settings)


if __name__ == "__main__":
    main()
