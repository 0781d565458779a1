"""How sharp a loss is: the largest eigenvalue of its Hessian, by Hessian-vector products through checkpointed layers.

    python examples/hessian_vector.py

A product of the Hessian and a vector is the gradient of (gradient . vector): two passes in reverse, and no matrix.
`torch.utils.checkpoint` keeps the input of a layer and computes the layer again in each pass. Optimizers of second
order (Sophia), sharpness and influence functions take such products. Differences of gradients, and dense attention,
give the same one.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import frisket as fk

TOKENS, WORDS, DIM, HEADS, LAYERS, ROUNDS = 48, 11, 16, 2, 2, 8
MASK = "causal & window(12)"
attend = fk.compile(MASK)
visible = torch.as_tensor(fk.mask(MASK).dense(TOKENS, TOKENS)[0, 0])


def dense(q, k, v):
    """Every pair written out; torch's scaled_dot_product_attention has no second derivatives on a CPU."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, attention):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, words, attention):
        x = self.embed(words)
        for layer in self.layers:
            x = checkpoint(layer, x, attention, use_reentrant=False)
        return self.head(x)


def gradient(model, words, attention, **options):
    """The gradient of the loss of the next word, one vector of all weights."""
    logits = model(words[:, :-1], attention)
    loss = cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()), **options)])


def product(model, words, vector, attention):
    """The Hessian times a vector."""
    slope = gradient(model, words, attention, create_graph=True) @ vector
    return torch.cat([x.flatten() for x in torch.autograd.grad(slope, list(model.parameters()))])


def difference(model, words, vector, step=1e-5):
    """The same, by gradients a step ahead and a step behind."""
    weights, found = nn.utils.parameters_to_vector(model.parameters()).detach(), []
    for sign in (1, -1):
        nn.utils.vector_to_parameters(weights + sign * step * vector, model.parameters())
        found.append(gradient(model, words, attend))
    nn.utils.vector_to_parameters(weights, model.parameters())
    return (found[0] - found[1]) / (2 * step)


def main():
    torch.manual_seed(0)
    model = Model().double()
    words = torch.cumsum(torch.randint(1, 3, (2, TOKENS + 1)), 1) % WORDS  # each word is one or two after the last
    vector = torch.randn(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for _ in range(ROUNDS):
        vector /= vector.norm()
        curved = product(model, words, vector, attend)
        sharpness, vector = (vector @ curved).item(), curved
    print(f"After {ROUNDS} products the Hessian of {len(vector):,} weights has an eigenvalue near {sharpness:.3f}.")

    vector /= vector.norm()
    ours = product(model, words, vector, attend)
    others = {"differences of gradients": difference(model, words, vector),
              "dense attention": product(model, words, vector, dense)}  # fmt: skip
    for name, theirs in others.items():
        error = ((ours - theirs).norm() / theirs.norm()).item()
        print(f"The product differs from that of {name} by {error:.0e}.")
        assert error < 1e-6


if __name__ == "__main__":
    main()
