"""What two gloo processes do for tests/runtime/torch/test_spread_torch.py: DTensors, TP, FSDP2, DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import frisket as fk
from frisket.flex import create_block_mask, flex_attention

RANKS, B, S, D = 2, 2, 24, 8
DOC = torch.stack([torch.arange(S) // 7, torch.arange(S) // 10])
ATT = fk.compile("doc[b, q] == doc[b, k] & q - k < 5 + 4 * h & b < B", "score + slope[h] * (k - q)", dropout=0.25)
BLOCKS = create_block_mask(lambda b, h, q, k: (q >= k) & (DOC[b, q] == DOC[b, k]) & (q - k < 4 + 3 * h), B, 4, S, S,
                           "cpu", BLOCK_SIZE=8)  # fmt: skip
SPLITS = {"batch": (4, 2, 0), "heads": (4, 2, 1), "heads of one key head": (4, 1, 1), "uneven heads": (3, 1, 1),
          "fewer heads than ranks": (1, 1, 1), "nothing": (4, 2, None)}  # fmt: skip


def arrays(heads, keys):
    g = torch.Generator().manual_seed(heads)
    shapes = (B, heads, S, D), (B, keys, S, D), (B, keys, S, D), (heads,), (heads,)
    return [torch.randn(s, generator=g) for s in shapes]


def attention(q, k, v, slope, sinks):
    out, lse = ATT(q, k, v, doc=DOC, slope=slope, sinks=sinks, seed=5, return_lse=True)
    return out, lse


def flex(q, k, v, slope, sinks):
    return flex_attention(q, k, v, lambda s, b, h, q, k: s + DOC[b, k] / 9, BLOCKS, enable_gqa=True, return_lse=True)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def results(call, given):
    """out, lse and all gradients, as one process has them."""
    given = [x.detach().requires_grad_() for x in given]
    out, lse = call(*given)
    grads = torch.autograd.grad((out.square().mean() * 9 + lse.sin().mean()), given, allow_unused=True)
    return [whole(x) for x in (out, lse, *grads) if x is not None]


def worst(found, want):
    assert len(found) == len(want)
    return max((a - b).abs().max().item() for a, b in zip(found, want, strict=True))


def spread(given, mesh, dim, tables):
    where = [Replicate() if dim is None else Shard(dim)]
    arrays = [distribute_tensor(x, mesh, where) for x in given[:3]]
    if tables:  # DTensors too, and split
        return [*arrays, *(distribute_tensor(x, mesh, [Shard(0)]) for x in given[3:])]
    return [*arrays, *given[3:]]


def dtensors(report, mesh):
    for name, (heads, keys, dim) in SPLITS.items():
        given = arrays(heads, keys)
        want = results(attention, given)
        for tables in (False, True):
            report(f"{name}, {tables}", worst(results(attention, spread(given, mesh, dim, tables)), want))
    given = arrays(4, 2)
    for name, dim in (("batch", 0), ("heads", 1)):
        mine = spread(given, mesh, dim, False)
        report(f"flex {name}", worst(results(flex, mine), results(flex, given)))
    for name, dim in (("length", 2), ("head_dim", 3)):
        try:
            found = results(attention, spread(given, mesh, dim, False))
            report(name, worst(found, results(attention, given)))
        except fk.ShapeError as error:
            report(name, str(error))
    sharded = torch.nn.ParameterList([given[3].detach().clone()])
    fully_shard(sharded, mesh=mesh)  # outside of its module's forward a parameter is a DTensor
    try:
        fk.attention(*given[:3], "causal", "score + slope[h] * (q - k)", slope=sharded[0])
    except fk.ParameterError as error:
        report("table alone", str(error))
    try:
        ATT(*spread(given, mesh, 0, False)[:3], doc=DOC, slope=given[3])
    except fk.ParameterError as error:
        report("no seed", str(error))


class Block(torch.nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.ModuleList([torch.nn.Linear(16, heads * D, bias=False) for _ in range(3)])
        self.out = torch.nn.Linear(heads * D, 16, bias=False)
        self.slope = torch.nn.Parameter(torch.randn(heads))
        self.att = fk.compile("causal & window(9)", "param slope: float[_]\nscore = score + slope[h] * (k - q)")

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in self.qkv)
        slope = self.slope
        if q.shape[1] < len(slope):  # this rank's heads, under tensor parallelism
            return self.out(self.att(q, k, v, slope=slope, origin=(0, dist.get_rank() * q.shape[1], 0, 0))
                            .transpose(1, 2).flatten(2))  # fmt: skip
        return self.out(self.att(q, k, v, slope=slope).transpose(1, 2).flatten(2))


def trained(model, x):
    model(x).square().sum().backward()
    return {n.removeprefix("module."): whole(p.grad) for n, p in model.named_parameters() if "slope" not in n}


def models(rank, report, mesh):
    x = torch.randn(2, S, 16, generator=torch.Generator().manual_seed(1))
    want = trained(Block(), x)
    plan = {
        "qkv.0": ColwiseParallel(),
        "qkv.1": ColwiseParallel(),
        "qkv.2": ColwiseParallel(),
        "out": RowwiseParallel(),
    }
    found = trained(parallelize_module(Block(), mesh, plan), x)
    report("tp", worst(list(found.values()), list(want.values())))
    for n in range(3):  # DTensors reach the attention
        plan[f"qkv.{n}"] = ColwiseParallel(use_local_output=False)
    plan["out"] = RowwiseParallel(input_layouts=Shard(-1))
    found = trained(parallelize_module(Block(), mesh, plan), x)
    report("tp of DTensors", worst(list(found.values()), list(want.values())))
    mine = x[rank : rank + 1]
    model = Block()
    fully_shard(model, mesh=mesh)
    report("fsdp", worst([2 * g for g in trained(model, mine).values()], list(want.values())))
    found = trained(DistributedDataParallel(Block()), mine)
    report("ddp", worst([2 * g for g in found.values()], list(want.values())))


def compiled(rank, report):
    mesh, given = init_device_mesh("cpu", (RANKS,)), arrays(4, 2)
    want = results(attention, given)
    for backend in ("aot_eager", "inductor", "inductor again"):  # again: from torch's cache of compiled graphs
        torch._dynamo.reset()
        call = torch.compile(attention, backend=backend.removesuffix(" again"), fullgraph=True)
        for name, dim in (("batch", 0), ("heads", 1)):
            report(f"{backend} {name}", worst(results(call, spread(given, mesh, dim, False)), want))
        dist.barrier()


def work(rank, report):
    mesh = init_device_mesh("cpu", (RANKS,))
    dtensors(report, mesh)
    models(rank, report, mesh)
