"""A training step in the style of torchtitan over two processes, its flex_attention replaced by frisket's.

    torchrun --nproc-per-node 2 examples/torchtitan_style.py

Blocks are compiled, then sharded by FSDP2 (`fully_shard`), and get a block mask for packed documents. The swap is the
import: `frisket.flex` in place of `torch.nn.attention.flex_attention`. Then the same model runs context parallel: each
process has its tokens of one sequence, dealt under the mask, and attention alone sees the other. Loss and gradients of
both are compared with one process that has all tokens: the loss with torch's flex_attention, gradients with dense
attention, since torch's flex_attention has none on a CPU.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import flex_attention as original
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import frisket as fk
from frisket import flex

LENGTH, VOCABULARY, HEADS, DIM, LAYERS = 256, 64, 4, 16, 2
COMPILER = sys.argv[1] if len(sys.argv) > 1 else "inductor"  # of torch.compile


class Block(nn.Module):
    """Attention and a feed-forward network; `attend` is called as `flex_attention` is."""

    def __init__(self, attend):
        super().__init__()
        width = HEADS * DIM
        self.attend = attend
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x, positions, block_mask):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        q, k, v = rotary(qkv[0], positions), rotary(qkv[1], positions), qkv[2]
        x = x + self.out(self.attend(q, k, v, block_mask=block_mask).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * DIM)
        self.layers = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.head = nn.Linear(HEADS * DIM, VOCABULARY, bias=False)

    def forward(self, tokens, positions, block_mask=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, block_mask)
        return self.head(x)


def rotary(x, positions):
    """x [batch, heads, tokens, dim], turned by positions [tokens]."""
    angle = positions[:, None] * 10000 ** (-torch.arange(0, DIM, 2) / DIM)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).flatten(-2)


def made(attend, mesh=None, compiled=False):
    """The model, equal in every process; sharded over `mesh`."""
    torch.manual_seed(0)
    model = Model(attend)
    if mesh is not None:
        for i, layer in enumerate(model.layers):
            block = torch.compile(layer, backend=COMPILER, fullgraph=True) if compiled else layer
            model.layers[i] = fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def gradients(model):
    """The whole gradient of every parameter, by its name."""
    found = {n.replace("_orig_mod.", ""): p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def summed(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))

    # A row of packed documents for every process; the label of a token is the next one.
    doc = torch.arange(LENGTH) // 50
    tokens = (torch.arange(LENGTH) * 7 + doc * 3 + 11 * torch.arange(ranks)[:, None]) % VOCABULARY
    labels = torch.cat([tokens[:, 1:], torch.full((ranks, 1), -100)], 1)
    positions, real = torch.arange(LENGTH), ranks * (LENGTH - 1)

    def documents(b, h, q, k):
        return (q >= k) & (doc[q] == doc[k])

    mask = original.create_block_mask(documents, None, None, LENGTH, LENGTH, device="cpu")
    with torch.no_grad():
        wanted_loss = summed(made(original.flex_attention)(tokens, positions, mask), labels) / real
    seen = documents(0, 0, torch.arange(LENGTH)[:, None], torch.arange(LENGTH))
    reference = made(lambda q, k, v, block_mask: scaled_dot_product_attention(q, k, v, block_mask))
    (summed(reference(tokens, positions, seen), labels) / real).backward()
    wanted = gradients(reference)

    def compare(name, model, loss):
        dist.all_reduce(loss)
        off = max(float((g - wanted[n]).norm() / wanted[n].norm()) for n, g in gradients(model).items())
        if not rank:
            print(f"{name}: loss {loss.item():.6f}, torch's flex_attention {wanted_loss.item():.6f};", end=" ")
            print("gradients agree" if off < 1e-4 else f"gradients differ by {off:.0e}")
        assert off < 1e-4
        assert abs(loss.item() - wanted_loss.item()) < 1e-5

    # Data parallel: each process trains on its row. FSDP2 averages gradients, so a loss is that of `ranks` processes.
    model = made(flex.flex_attention, mesh, compiled=True)
    mask = flex.create_block_mask(documents, None, None, LENGTH, LENGTH, device="cpu")
    row = slice(rank, rank + 1)
    loss = summed(model(tokens[row], positions, mask), labels[row]) / real
    (loss * ranks).backward()
    compare("FSDP2, compiled", model, loss.detach())

    # Context parallel: each process has its tokens of all rows, and the loss of those.
    deal = fk.parallel.deal("causal & same(doc)", LENGTH, ranks, tile=16, doc=doc.numpy())
    att = fk.compile(fk.mask("causal & same(doc)", doc=doc))
    part = slice(rank * deal.shard, (rank + 1) * deal.shard)

    def shared(q, k, v, block_mask):
        return fk.parallel.attend(att, q, k, v, deal=deal)

    model = made(shared, mesh)
    mine, next_ones = deal.permute(tokens, 1)[:, part], deal.labels(tokens, 1)[:, part]
    loss = summed(model(mine, torch.as_tensor(deal.positions(rank))), next_ones) / real
    (loss * ranks).backward()
    compare("FSDP2 and context parallel", model, loss.detach())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
