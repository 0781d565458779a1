# %% [markdown]
# # Serving without end: a sliding window and attention sinks
#
# A model that sees only the last tokens and the first few (StreamingLLM, Xiao et al., 2023) runs without end in
# constant memory: a ring holds the window, and a small cache holds the sinks. The mask is one line of text, the same
# for training, for a prompt and for every step. A ring that is too small for the mask raises an error.
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
# ## A cache of constant size
#
# Sinks and window have no key in common. So attention to each is computed separately, and the two results are merged
# exactly, by their logsumexp.


# %%
class StreamingCache:
    """The first `SINKS` tokens and the last `WINDOW` of one sequence, of one layer."""

    in_window = fk.compile("causal & window(w) & k >= s", w=WINDOW, s=SINKS)
    in_sinks = fk.compile("causal & k < s", s=SINKS)

    def __init__(self):
        how = {"batch": 1, "kv_heads": model.heads, "head_dim": model.head_dim}
        self.ring, self.sinks = RingKVCache.create(window=WINDOW, **how), KVCache.create(capacity=SINKS, **how)

    def attention(self, q, k, v):
        start, free = self.ring.lengths.item(), SINKS - self.sinks.lengths.item()
        if free:
            self.sinks.append(k[:, :, :free], v[:, :, :free])
        window = self.ring.attention(self.in_window, q, k, v, return_lse=True)
        sinks = self.in_sinks(q, self.sinks.k, self.sinks.v, origin=(0, 0, start, 0), return_lse=True)
        return fk.merge(window, sinks)[0]


def held_by(cache):
    """Bytes of a cache's keys and values."""
    if isinstance(cache, StreamingCache):
        return held_by(cache.ring) + held_by(cache.sinks)
    return sum(x.numel() * x.element_size() for x in (cache.k, cache.v))


# %% [markdown]
# ## A prompt, then token by token
#
# The model has not seen this text. Its predictions, byte by byte, are compared with one pass over the whole text under
# the same mask. A cache that keeps all keys, for the full causal mask, runs beside it.


# %%
def serve(make, attend):
    """Logits of the whole text, served as a prompt and steps; milliseconds of a step, bytes held at each."""
    caches = [make() for _ in model.blocks]

    def said(start, stop):
        part = slice(start, stop)
        return model(text[part], place[part], lambda layer, q, k, v: attend(caches[layer], q, k, v))

    with torch.no_grad():
        found = [said(0, PROMPT), said(PROMPT, PROMPT + 1)]
        start, sizes = time.perf_counter(), []
        for i in range(PROMPT + 1, LENGTH):
            found.append(said(i, i + 1))
            sizes.append(sum(map(held_by, caches)))
    return torch.cat(found), (time.perf_counter() - start) / (LENGTH - PROMPT - 1) * 1000, sizes


place = torch.arange(LENGTH)
kept = {"batch": 1, "capacity": LENGTH, "kv_heads": model.heads, "head_dim": model.head_dim}
served, step_ms, sizes = serve(StreamingCache, StreamingCache.attention)
causal = fk.compile("causal")
everything, all_ms, full = serve(
    lambda: KVCache.create(**kept), lambda cache, q, k, v: cache.attention(causal, q, k, v)
)
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
# The sinks are not in the ring. A mask that sees them there gets an error with a witness, not a wrong answer.

# %%
try:
    StreamingCache().ring.attention(att, *torch.zeros(3, 1, model.heads, 1, model.head_dim))
    refused = ""
except fk.ShapeError as error_:
    refused = str(error_).splitlines()[0]
print("A ring under the whole mask is refused, because")
print(indent(fill(refused, 80), "    "))

# %%
assert losses[-1] < losses[0] - 1, "the model learns"
assert error < 1e-4, "steps are all at once"
assert set(sizes) == {sizes[0]}, "memory is constant"
assert sizes[0] < full[-1] / 2
assert (served - everything).abs().max() > 1e-2, "the window hides something"
assert "keeps" in refused
