"""Training steps of MeanFlow (Geng et al., 2025, arXiv 2505.13447): a tangent through attention, and its gradient.

    python examples/meanflow.py

The model is asked for the mean velocity u of a flow between two times r < t, with which one step draws a sample. Its
target needs the derivative of u along the flow: a jvp through every layer, attention among them. `loss.backward()`
then differentiates what the jvp returned. The same step with dense attention has the same loss and gradients.
"""

import torch
from torch import nn

import frisket as fk

TOKENS, DIM, HEADS, BATCH, STEPS = 32, 32, 2, 16, 16
MASK = "sliding(6, 6)"  # a point of a curve sees six points on either side
attend = fk.compile(MASK)
visible = torch.as_tensor(fk.mask(MASK).dense(TOKENS, TOKENS)[0, 0])


def dense(q, k, v):
    """Every pair written out; torch's scaled_dot_product_attention has no forward mode on a CPU."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, attention):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class MeanVelocity(nn.Module):
    """u(z, r, t) of points z [batch, tokens, 2] and times [batch, 1, 1]."""

    def __init__(self):
        super().__init__()
        self.read, self.write = nn.Linear(2, DIM), nn.Linear(DIM, 2)
        self.times = nn.Sequential(nn.Linear(2, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.place = nn.Parameter(torch.randn(TOKENS, DIM) / 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, z, r, t, attention):
        x = self.read(z) + self.place + self.times(torch.cat([r, t], -1))
        for block in self.blocks:
            x = block(x, attention)
        return self.write(x)


def loss_of(model, x, noise, r, t, attention):
    """The loss of the paper's algorithm 1."""
    z, velocity = (1 - t) * x + t * noise, noise - x
    along = velocity, torch.zeros_like(r), torch.ones_like(t)
    u, du_dt = torch.func.jvp(lambda z, r, t: model(z, r, t, attention), (z, r, t), along)
    target = velocity - (t - r) * du_dt
    return (u - target.detach()).square().mean()


def curves():
    """Circles of any radius, begun anywhere: [batch, tokens, 2]."""
    angle = torch.rand(BATCH, 1) * 2 * torch.pi + torch.arange(TOKENS) * 2 * torch.pi / TOKENS
    return (0.5 + torch.rand(BATCH, 1, 1)) * torch.stack([angle.cos(), angle.sin()], -1)


def drawn():
    """Curves, noise and two times, which are equal in half of the batch."""
    r, t = torch.rand(2, BATCH, 1, 1).sort(0).values
    return curves(), torch.randn(BATCH, TOKENS, 2), torch.where(torch.rand(BATCH, 1, 1) < 0.5, t, r), t


def gradients(model, batch, attention):
    """(the loss, its gradients by all weights) of one step."""
    model.zero_grad()
    loss = loss_of(model, *batch, attention)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def main():
    torch.manual_seed(0)
    model, losses = MeanVelocity(), []
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(STEPS):
        losses.append(gradients(model, drawn(), attend)[0])
        optimizer.step()
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"The loss went from {first:.2f} to {last:.2f} in {STEPS} steps.")

    batch = drawn()
    (loss, ours), (same, theirs) = (gradients(model, batch, attention) for attention in (attend, dense))
    error = ((ours - theirs).norm() / theirs.norm()).item()
    print(f"A step with dense attention has the loss {same:.5f}, and {loss:.5f} here; gradients differ by {error:.0e}.")
    assert last < 0.9 * first
    assert abs(loss - same) < 1e-5 * same
    assert error < 1e-5

    with torch.no_grad():  # one step from noise to a sample
        noise, one = torch.randn(BATCH, TOKENS, 2), torch.ones(BATCH, 1, 1)
        sample = noise - model(noise, 0 * one, one, attend)
    print(f"Neighbours of a sample are {sample.diff(dim=1).norm(dim=-1).mean():.2f} apart, those of noise "
          f"{noise.diff(dim=1).norm(dim=-1).mean():.2f}.")  # fmt: skip


if __name__ == "__main__":
    main()
