"""A language model of one layer, its sequence over the processes of a group:

    torchrun --nproc-per-node 4 examples/context_parallel.py

Every process holds its tokens of the packed sequence, their positions and labels; attention alone sees other
processes. The loss is that of one process: with 1 instead of 4 the same numbers are printed.
"""

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, as optimizers do, its defaults keep the group, and the group its threads
from torch.nn.functional import cross_entropy

import frisket as fk

LENGTH, VOCABULARY, HEADS, DIM = 1000, 64, 4, 16


def rotary(x, positions):
    """x [batch, heads, tokens, dim], turned by the positions of its tokens in the sequence."""
    angle = positions[:, None] * 10000 ** (-torch.arange(0, DIM, 2) / DIM)
    sin, cos = angle.sin(), angle.cos()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    # The sequence and its documents: the same in every process.
    rng = np.random.default_rng(0)
    doc = np.sort(rng.integers(0, 12, LENGTH)).astype(np.int32)
    tokens = torch.as_tensor((np.arange(LENGTH) * 7 + doc * 3) % VOCABULARY)[None]

    deal = fk.parallel.deal("causal & same(doc)", LENGTH, ranks, tile=16, doc=doc)
    part = slice(rank * deal.shard, (rank + 1) * deal.shard)
    mine, labels = deal.permute(tokens, 1)[:, part], deal.labels(tokens, 1)[:, part]
    positions = torch.as_tensor(deal.positions(rank))

    att = fk.compile(fk.mask("causal & same(doc)", doc=doc))
    torch.manual_seed(0)
    embed = torch.nn.Embedding(VOCABULARY, HEADS * DIM)
    qkv, head = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM), torch.nn.Linear(HEADS * DIM, VOCABULARY)
    parameters = [*embed.parameters(), *qkv.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, 1e-2)

    for step in range(5):
        x = embed(mine)
        q, k, v = qkv(x).view(1, deal.shard, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        out = fk.parallel.attend(att, rotary(q, positions), rotary(k, positions), v, deal=deal)
        logits = head(x + out.transpose(1, 2).flatten(2))
        loss = cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="sum") / (LENGTH - 1)
        optimizer.zero_grad()
        loss.backward()
        for p in parameters:  # every process has the part of its tokens
            dist.all_reduce(p.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total:.4f}", flush=True)
    if rank == 0:
        print(f"{ranks} ranks, {deal.shard} tokens each, {deal.imbalance:.3f} of the mean on the busiest")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
