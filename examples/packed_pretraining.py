# %% [markdown]
# # Pre-training on packed documents
#
# Documents have all lengths, and a batch needs one. Sequence packing puts several documents into one long sequence, and
# a document mask keeps them apart: `causal & same(doc)`. Here a small model of bytes learns Python from packed
# functions of the standard library. Logits and gradients equal those of each document alone. The cost of attention
# grows with the lengths of the documents, not with the square of the sequence.
#
#     python examples/packed_pretraining.py            # about half a minute; --small for a few seconds

# %%
import statistics
import sys
import time
from itertools import islice

import torch
from byte_model import ByteModel, labels, pack, train
from python_text import documents
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import frisket as fk

SMALL = "--small" in sys.argv
LENGTH, STEPS = (512, 12) if SMALL else (2048, 40)

torch.manual_seed(0)
texts = documents()
batches = list(islice(pack(texts, LENGTH), STEPS + 1))
tokens, doc, place = held_out = batches.pop()
alone = torch.bincount(doc - doc[0]).tolist()  # the length of each document of that sequence
print(f"Each of {STEPS} sequences holds {LENGTH:,} bytes of Python, the last one {len(alone)} documents.")

# %% [markdown]
# ## The mask
#
# `doc` has the document of every token. It changes at every step, so the attention is compiled once without it, and
# every step makes one plan for all layers.

# %%
att = fk.compile("causal & same(doc)")
layout = fk.mask("causal & same(doc)", doc=doc.numpy()).layout(LENGTH, LENGTH, block=(LENGTH // 16, LENGTH // 16))
print(layout)
share = layout.visible_pairs / LENGTH**2
print(f"A query sees {share:.1%} of the keys on average; a dense mask looks at all of them.")


# %%
def packed(doc):
    plan = att.plan(LENGTH, LENGTH, heads=4, doc=doc)
    return lambda layer, q, k, v: att(q, k, v, plan=plan)


def dense(doc):
    n = torch.arange(len(doc))
    mask = (n[:, None] >= n) & (doc[:, None] == doc)
    return lambda layer, q, k, v: scaled_dot_product_attention(q, k, v, mask)


def loss_of(attend):
    return cross_entropy(model(tokens, place, attend), labels(tokens, doc))


# %% [markdown]
# ## Training

# %%
model = ByteModel()
before = loss_of(packed(doc)).item()
losses = []
for step, loss in enumerate(train(model, packed, batches)):
    losses.append(loss)
    if step % (STEPS // 4) == 0:
        print(f"Step {step}: {loss:.2f} nats a byte.")
after = loss_of(packed(doc)).item()
print(f"On a sequence it has not seen the loss went from {before:.2f} to {after:.2f} nats a byte.")

# %% [markdown]
# ## Packed is separate
#
# The same documents, one at a time: the logits agree, and so do the gradients of all weights.

# %%
causal = fk.compile("causal")


def gradients(loss):
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])


logits = model(tokens, place, packed(doc))
apart = torch.cat([
    model(t, p, lambda layer, q, k, v: causal(q, k, v)) for t, p in zip(tokens.split(alone), place.split(alone))
])  # fmt: skip
error = (logits - apart).abs().max().item()
wanted = gradients(cross_entropy(apart, labels(tokens, doc)))
found = gradients(cross_entropy(logits, labels(tokens, doc)))
off = ((found - wanted).norm() / wanted.norm()).item()
print(f"Logits of packed and of separate documents differ by at most {error:.0e}, gradients by {off:.0e} in norm.")


# %% [markdown]
# ## Beside a dense mask
#
# A whole step of training, forward and backward, and the same step with scaled_dot_product_attention, in turns.


# %%
def seconds(how):
    start = time.perf_counter()
    gradients(loss_of(how(doc)))
    return time.perf_counter() - start


times = [(seconds(packed), seconds(dense)) for _ in range(2 if SMALL else 4)][1:]
ours, theirs = (statistics.median(t) for t in zip(*times))
print(
    f"A step takes {ours * 1000:.0f} ms, with a dense mask {theirs * 1000:.0f} ms: {theirs / ours:.2f} times as long."
)
same = (gradients(loss_of(dense(doc))) - found).norm() / found.norm()

# %%
assert after < before - (1 if SMALL else 2), "the model learns"
assert losses[-1] < losses[0] - 1
assert error < 1e-4, "packed documents do not see one another"
assert off < 1e-4
assert same < 1e-4, "both masks mean the same"
assert share < 0.5
