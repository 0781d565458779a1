"""A small language model of bytes, and its training on packed documents: what several of these examples share."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # the layer, and q, k, v [batch, heads, length, head_dim]


def pack(texts: Iterable[np.ndarray], length: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Documents one behind another, cut into sequences: tokens, the document of each, and its place in that, all int
    [length]."""
    texts = list(texts)
    tokens = torch.as_tensor(np.concatenate(texts)).long()
    lengths = torch.tensor([len(text) for text in texts])
    doc = torch.repeat_interleave(torch.arange(len(texts)), lengths)
    place = torch.arange(len(tokens)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    for start in range(0, len(tokens) - length, length):
        part = slice(start, start + length)
        yield tokens[part], doc[part].int(), place[part]


def labels(tokens: Tensor, doc: Tensor) -> Tensor:
    """The next byte of the same document, or -100, which the loss leaves out."""
    same = torch.cat([doc[1:] == doc[:-1], torch.tensor([False])])
    return torch.where(same, tokens.roll(-1), -100)


def rotary(x: Tensor, place: Tensor) -> Tensor:
    """x [batch, heads, length, dim], turned by the places [length] of its tokens (RoPE)."""
    half = x.shape[-1] // 2
    angle = place[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class ByteModel(nn.Module):
    """A transformer over bytes, which leaves attention to whoever calls it."""

    def __init__(self, layers: int = 2, heads: int = 4, dim: int = 128) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.embed, self.read = nn.Embedding(256, dim), nn.Linear(dim, 256)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.RMSNorm(dim), "qkv": nn.Linear(dim, 3 * dim), "out": nn.Linear(dim, dim),
                "norm2": nn.RMSNorm(dim), "up": nn.Linear(dim, 4 * dim), "down": nn.Linear(4 * dim, dim),
            })
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, tokens: Tensor, place: Tensor, attend: Attend) -> Tensor:
        """Logits [length, 256] of the byte behind each of tokens [length]."""
        x = self.embed(tokens)[None]
        for i, block in enumerate(self.blocks):
            qkv = block["qkv"](block["norm"](x)).unflatten(-1, (3, self.heads, self.head_dim))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            out = attend(i, rotary(q, place), rotary(k, place), v)
            x = x + block["out"](out.transpose(1, 2).flatten(2))
            x = x + block["down"](gelu(block["up"](block["norm2"](x))))
        return self.read(x)[0]


def train(model: ByteModel, attend_under: Callable[[Tensor], Attend], batches: Iterable) -> Iterator[float]:
    """A step for every packed sequence, its loss in nats a byte; `attend_under` makes attention for its documents."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for tokens, doc, place in batches:
        loss = cross_entropy(model(tokens, place, attend_under(doc)), labels(tokens, doc))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
