"""A training step of a tiny Llama on packed documents: `python benchmarks/transformers_training.py`.

Forward, backward and AdamW on one row of 4,096 tokens, the same model three times: under transformers' eager
attention, its sdpa, and frisket. Where documents begin is said by `position_ids`, as transformers' collators do.
"files": the files that the README's first command packs, their bytes for tokens, cut to fit. "four": four documents
of 1,024 tokens. "one": one document, causal. Before anything is timed the three models have to agree. Time is the
process' own, on one thread: what else runs on the machine is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from store import Row, run_parts

from frisket.integrations.transformers import register
from frisket.runtime.bench.race import processor_seconds, raced
from frisket.runtime.cli.timing import pack

ROOT = Path(__file__).parent.parent
LENGTH = 4096
MODEL = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip


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


def training(case: str, rounds: int) -> Iterator[tuple[str, Row]]:
    tokens, cases = documents()
    lengths = cases[case]
    steps = {who: step_of(who, tokens, lengths) for who in ("frisket", "eager", "sdpa")}
    losses = {who: [step() for _ in range(2)] for who, step in steps.items()}  # the second is after an update
    for who, found in losses.items():
        torch.testing.assert_close(found, losses["eager"], rtol=1e-4, atol=0, msg=f"{who}: {losses}")
    row: Row = raced(steps, rounds, clock=processor_seconds)
    row["notes"] = {"documents": len(lengths), "shortest": min(lengths), "longest": max(lengths)}
    if len(lengths) > 1:
        row["goals"] = {"at least": {"ratios": {"eager / frisket": 1.0, "sdpa / frisket": 1.0}}}
    yield "training step", row


def settings(part: str) -> dict[str, Any]:
    return {"tokens": LENGTH, "threads": 1, "dtype": "float32", "transformers": transformers.__version__, **MODEL}


def main() -> None:
    register()
    torch.set_num_threads(1)
    parts = {case: partial(training, case) for case in ("files", "four", "one")}
    run_parts(__doc__, parts, "transformers-training", settings)


if __name__ == "__main__":
    main()
