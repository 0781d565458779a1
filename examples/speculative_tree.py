# %% [markdown]
# # Speculative decoding with a tree of drafts
#
# A cheap draft model guesses several continuations of the text: a tree. The model reads the tree in one pass, in which
# each draft sees only its ancestors. The longest path that the model itself would have written is kept. The text is
# that of decoding token by token, in fewer passes (SpecInfer, Miao et al., 2023).
#
#     python examples/speculative_tree.py              # about half a minute; --small for a few seconds

# %%
import heapq
import sys
import time
from collections import Counter, defaultdict
from itertools import islice
from textwrap import indent

import numpy as np
import torch
from byte_model import ByteModel, pack, train
from python_text import documents

import frisket as fk
from frisket.caches.torch import KVCache

SMALL = "--small" in sys.argv
STEPS, LENGTH, NEW, NODES = (10, 256, 32, 8) if SMALL else (120, 1024, 192, 16)

# %% [markdown]
# ## The model, and its draft
#
# The model is trained for a few seconds on the standard library. The draft model counts, in the same text, which byte
# follows each four bytes.

# %%
torch.manual_seed(0)
texts = documents()
att = fk.compile("causal & window(w)", w=LENGTH // 2)
model = ByteModel()
batches = islice(pack(texts, LENGTH), STEPS)
losses = list(train(model, lambda doc: lambda layer, q, k, v: att(q, k, v), batches))
print(f"{STEPS} steps of training take the loss from {losses[0]:.2f} to {losses[-1]:.2f} nats a byte.")

ORDER = 4
follows = defaultdict(Counter)
for data in (bytes(text) for text in texts):
    for i in range(len(data) - ORDER):
        follows[data[i : i + ORDER]][data[i + ORDER]] += 1


def draft(written: bytes) -> tuple[list[int], list[int]]:
    """Tokens and parents of the `NODES` likeliest continuations; node 0 is the last byte that is written."""
    tokens, parents, heap = [written[-1]], [-1], []

    def grow(node, end, chance):
        found = follows[end[-ORDER:]]
        for token, count in found.most_common(3):
            heapq.heappush(heap, (-chance * count / found.total(), node, token, end + bytes([token])))

    grow(0, written[-ORDER:], 1.0)
    while heap and len(tokens) < NODES:
        chance, parent, token, end = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        grow(len(tokens) - 1, end, -chance)
    return tokens, parents


# %% [markdown]
# ## Token by token
#
# One pass of the model for every byte. Bytes are sampled with noise that depends on their place alone (the Gumbel
# trick). So there is one right text, which drafts must not change.


# %%
TEMPERATURE = 0.6
NOISE = -torch.empty(LENGTH, 256).exponential_(generator=torch.Generator().manual_seed(0)).log()


def fresh():
    how = {"batch": 1, "capacity": LENGTH, "kv_heads": model.heads, "head_dim": model.head_dim}
    return [KVCache.create(**how) for _ in model.blocks]


def run(caches, tokens, place, **tree):
    """The byte behind each of the tokens."""
    with torch.no_grad():
        logits = model(
            torch.tensor(tokens), torch.as_tensor(place),
            lambda layer, q, k, v: caches[layer].attention(att, q, k, v, **tree),
        )  # fmt: skip
    return (logits / TEMPERATURE + NOISE[place]).argmax(-1).tolist()


prompt = bytes(texts[-1])[: LENGTH // 4]


def step_by_step():
    caches, written = fresh(), bytearray(prompt)
    run(caches, list(written[:-1]), np.arange(len(written) - 1))
    for _ in range(NEW):
        written += bytes(run(caches, [written[-1]], [len(written) - 1])[-1:])
    return bytes(written[len(prompt) :]), NEW


# %% [markdown]
# ## A tree in one pass
#
# `tree=` is the parent of every node. The cache gives each draft the position of its depth and hides all drafts that
# are not its ancestors. `keep` leaves the accepted drafts in the cache.


# %%
def by_trees():
    caches, written, passes, accepted, drafted = fresh(), bytearray(prompt), 0, 0, 0
    run(caches, list(written[:-1]), np.arange(len(written) - 1))
    while len(written) < len(prompt) + NEW:
        tokens, parents = draft(bytes(written))
        depth = [0]
        for parent in parents[1:]:
            depth.append(depth[parent] + 1)
        best = run(caches, tokens, np.array(depth) + len(written) - 1, tree=torch.tensor(parents))
        path = [0]  # from node to the child that holds what the model says
        while right := [i for i, p in enumerate(parents) if p == path[-1] and tokens[i] == best[p]]:
            path.append(right[0])
        for cache in caches:
            cache.keep(torch.tensor([path]), len(tokens))
        written += bytes(best[node] for node in path)
        passes, accepted, drafted = passes + 1, accepted + len(path) - 1, drafted + len(tokens) - 1
    return bytes(written[len(prompt) :][:NEW]), passes, accepted, drafted


# %%
start = time.perf_counter()
wanted, steps = step_by_step()
middle = time.perf_counter()
found, passes, accepted, drafted = by_trees()
end = time.perf_counter()
print(f"Behind {len(prompt)} bytes of a function the model writes {NEW} more:")
print(indent(wanted.decode("ascii", "backslashreplace").strip(), "    "))
print(
    f"Token by token that is {steps} passes; with trees of {NODES} nodes {passes}, the same bytes: {found == wanted}."
)
print(f"Of {drafted:,} drafts {accepted} were right, {NEW / passes:.2f} tokens a pass.")
print(f"That took {end - middle:.2f} s instead of {middle - start:.2f} s, drafting included.")

# %% [markdown]
# ## What a draft sees
#
# A small tree, printed: two answers to node 0, and one answer to the first of them.

# %%
parents = torch.tensor([-1, 0, 0, 1])
cache = KVCache.create(batch=1, capacity=16, kv_heads=1, head_dim=4)
cache.append(*torch.zeros(2, 1, 1, 3, 4))  # three tokens before the tree
v = torch.eye(4)[None, None]  # the value of each node is its own axis
seen = cache.attention(att, torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4), v, tree=parents)[0, 0] > 0
for node, row in enumerate(seen.tolist()):
    print(f"Node {node} sees the three tokens before the tree and nodes {[i for i, x in enumerate(row) if x]}.")

# %%
assert losses[-1] < losses[0] - 1, "the model learns"
assert found == wanted, "trees write what single steps write"
assert passes < steps, "in fewer passes"
assert NEW <= passes + accepted < NEW + NODES
assert [[i for i, x in enumerate(row) if x] for row in seen.tolist()] == [[0], [0, 1], [0, 2], [0, 1, 3]]
