# %% [markdown]
# # Serving without end: a sliding window and attention sinks
#
# A model that sees only the last tokens and the first few (StreamingLLM, Xiao et al., 2023) runs in
# constant memory: a ring holds the window and the sinks. The mask is one line of text, the same for training, for a
# prompt and for every step. A ring that does not hold what the mask shows raises an error.
#
#     python examples/streaming_serving.py             # about half a minute; --small for a few seconds

# %%
import sys
import time
from itertools import islice
from textwrap import fill, indent

import torch
from byte_model import ByteModel, pack, train
from python_text import documents
from torch.nn.functional import cross_entropy

import frisket as fk
from frisket.caches.torch import KVCache, RingKVCache

SMALL = "--small" in sys.argv
STEPS, LENGTH, PROMPT, WINDOW, SINKS = (10, 256, 64, 32, 4) if SMALL else (50, 1024, 256, 128, 4)

torch.manual_seed(0)
batches = list(islice(pack(documents(), LENGTH), STEPS + 1))
text, _, place = batches.pop()

# %% [markdown]
# ## The mask, and a model trained under it

# %%
streaming = fk.mask("causal & (window(w) | sinks(s))", w=WINDOW, s=SINKS)
print(streaming.layout(LENGTH, LENGTH, block=(LENGTH // 16, LENGTH // 16)))
att = fk.compile(streaming)
model = ByteModel()
losses = list(train(model, lambda doc: lambda layer, q, k, v: att(q, k, v), batches))
print(f"{STEPS} steps of training take the loss from {losses[0]:.2f} to {losses[-1]:.2f} nats a byte.")

# %% [markdown]
# ## A prompt, then token by token
#
# The model has not seen this text. A ring holds the last `WINDOW` tokens and the first `SINKS`. Its predictions, byte
# by byte, are compared with one pass over the whole text under the same mask. A cache that keeps all keys, for the
# full causal mask, runs next to it.


# %%
def held_by(cache):
    """Bytes of a cache's keys and values."""
    return sum(x.numel() * x.element_size() for x in (cache.k, cache.v))


def serve(make, att):
    """Logits of the whole text, served as a prompt and steps; milliseconds of a step, bytes held at each."""
    caches = [make() for _ in model.blocks]

    def said(start, stop):
        part = slice(start, stop)
        return model(text[part], place[part], lambda layer, q, k, v: caches[layer].attention(att, q, k, v))

    with torch.no_grad():
        found = [said(0, PROMPT), said(PROMPT, PROMPT + 1)]
        start, sizes = time.perf_counter(), []
        for i in range(PROMPT + 1, LENGTH):
            found.append(said(i, i + 1))
            sizes.append(sum(map(held_by, caches)))
    return torch.cat(found), (time.perf_counter() - start) / (LENGTH - PROMPT - 1) * 1000, sizes


place = torch.arange(LENGTH)
layer = {"batch": 1, "kv_heads": model.heads, "head_dim": model.head_dim}
served, step_ms, sizes = serve(lambda: RingKVCache.create(window=WINDOW, sinks=SINKS, **layer), att)
everything, all_ms, full = serve(lambda: KVCache.create(capacity=LENGTH, **layer), fk.compile("causal"))
with torch.no_grad():
    at_once = model(text, place, lambda layer, q, k, v: att(q, k, v))
error = (served - at_once).abs().max().item()
print(f"A prompt of {PROMPT} bytes and {LENGTH - PROMPT} steps differ from all at once by at most {error:.0e}.")

# %%
nats = {n: cross_entropy(x[:-1], text[1:]).item() for n, x in (("streaming", served), ("everything", everything))}
print(f"The caches hold {sizes[0]:,} bytes at the first step and {sizes[-1]:,} at the last, one of all {full[-1]:,}.")
print(f"The text costs {nats['streaming']:.3f} nats a byte so, and {nats['everything']:.3f} where everything is seen.")
print(f"A step takes {step_ms:.1f} ms, with all keys kept {all_ms:.1f} ms.")

# %% [markdown]
# ## What does not fit is refused
#
# A ring without sinks drops the first tokens, which the mask shows. So it is an error with a witness, not a wrong
# answer.

# %%
try:
    RingKVCache.create(window=WINDOW, **layer).attention(att, *torch.zeros(3, 1, model.heads, 1, model.head_dim))
    refused = ""
except fk.ShapeError as error_:
    refused = "\n".join(fill(line.strip(), 80) for line in str(error_).splitlines())
print("A ring without sinks is refused, because")
print(indent(refused, "    "))

# %%
assert losses[-1] < losses[0] - 1, "the model learns"
assert error < 1e-4, "steps are all at once"
assert set(sizes) == {sizes[0]}, "memory is constant"
assert sizes[0] < full[-1] / 2
assert (served - everything).abs().max() > 1e-2, "the window hides something"
assert f"with sinks={SINKS}" in refused
