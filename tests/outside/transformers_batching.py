"""Continuous batching of every model type of transformers that generates: `generate_batch` under frisket beside eager
attention, a prompt at a time.

    python tests/outside/transformers_batching.py [TYPE ...]

Types are those whose `generate` the sweep has found equal (tests/outside/transformers_sweep.py, which makes the tiny
models). The results are written to tests/outside/transformers_batching.json: an empty text where the tokens are equal,
else what happened. `python docs/compatibility.py` makes the page from it.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import transformers_sweep as sweep

RESULTS = sweep.HERE / "transformers_batching.json"
PROMPTS, NEW = (3, 17, 9), 6  # tokens; the second is read in chunks
AS_THEIRS = "the tokens of transformers' own continuous batching, which are not those of a prompt alone"
THEIRS = "transformers cannot: "  # its own attention for continuous batching fails, too


def one(kind: str) -> dict[str, Any]:
    """Whether every request gets the tokens that it gets alone."""
    import frisket.integrations.transformers as plugin

    plugin.register()
    eager, make, _ = sweep.pair(kind)
    ours = make("frisket")
    ours.load_state_dict(eager.state_dict())
    try:
        found = served(ours)
    except Exception as e:
        why = sweep.said(sweep.shown(e))
        try:
            eager.set_attn_implementation("paged|eager")
            served(eager)
        except Exception as theirs:
            why = THEIRS + sweep.said(theirs)
        return {"why": why}
    wrong = [n for n, got in zip(PROMPTS, found, strict=True) if got != alone(eager, n)]
    if not wrong:
        return {"why": ""}
    eager.set_attn_implementation("paged|eager")
    return {"why": AS_THEIRS if served(eager) == found else f"other tokens for prompts of {wrong} tokens"}


def prompt(length: int) -> list[int]:
    return [(7 * i + length) % (sweep.VOCABULARY - 5) + 3 for i in range(length)]


def served(model: Any) -> list[list[int]]:
    """New tokens of all prompts, in batches of at most 12 tokens."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    how = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=12)
    asked = [prompt(n) for n in PROMPTS]
    found = model.generate_batch(asked, generation_config=how, continuous_batching_config=sizes)
    for answer in found.values():
        if answer.error:
            raise RuntimeError(answer.error)
    by_prompt = {tuple(x.prompt_ids): x.generated_tokens for x in found.values()}
    return [by_prompt[tuple(p)] for p in asked]


def alone(model: Any, length: int) -> list[int]:
    """New tokens of one prompt, without a cache."""
    import torch

    row = torch.tensor([prompt(length)])
    with torch.no_grad():
        for _ in range(NEW):
            row = torch.cat([row, model(row, use_cache=False).logits[:, -1].argmax(-1)[None]], 1)
    found: list[int] = row[0, length:].tolist()
    return found


def main(chosen: list[str]) -> None:
    sweep.prepare(os.environ.__setitem__)
    sweep.one = one
    swept = sweep.read()["types"]
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    every = [k for k, x in swept.items() if x["verdict"] == "equal" and "generate, dynamic cache" in x["parts"]]
    rest = chosen or [k for k in every if k not in found]
    with ThreadPoolExecutor(2) as pool:
        for kind, answer in zip(rest, pool.map(sweep.limited, rest)):
            found[kind] = answer["why"]
            print(f"{kind:32} {answer['why'][:150]}", flush=True)
            lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found.items()))
            RESULTS.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
