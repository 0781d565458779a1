"""What every rank of `test_parallel_torch` does; a module of its own, because processes import it by name."""

from __future__ import annotations

import os
import socket
import struct
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from support.native.shared import DIM as NATIVE_DIM
from support.processes import stop
from support.torch.dense import dense
from torch.nn.functional import pad

import frisket as fk
from frisket.runtime.machine import cpp_build as native_build

BACKENDS = ["aten", *([] if native_build.reason() else ["cpp"])]
RANKS, LENGTH, TILE, BATCH, HEADS, KV_HEADS, DIM, V_DIM = 4, 170, 8, 2, 4, 2, 8, 12
DOC = np.minimum(np.arange(LENGTH) // 23, 6).astype(np.int32)
BY_BATCH = np.stack([DOC, np.arange(LENGTH) // 40]).astype(np.int32)
draw = np.random.default_rng(5)
SLOPE = draw.standard_normal(HEADS).astype(np.float32)
BIAS = draw.standard_normal((HEADS, 2 * LENGTH)).astype(np.float32)
DECAY = draw.standard_normal(LENGTH).astype(np.float32)
# mask, score mod, tables of the mask, tables of the score mod, sinks, dropout
CASES = {
    "full": ("true", None, {}, {}, False, 0),
    "causal": ("causal", None, {}, {}, True, 0),
    "window": ("causal & window(20)", None, {}, {}, True, 0),
    "documents": ("causal & same(doc)", None, {"doc": DOC}, {}, False, 0),
    "documents-by-batch": ("causal & doc[b, q] == doc[b, k]", None, {"doc": BY_BATCH}, {}, False, 0),
    "prefix": ("prefix_lm(40)", "softcap(5)", {}, {}, True, 0),
    "block-diffusion": ("block_diffusion(85, 10)", None, {}, {}, False, 0),
    "dilated": ("causal & (q - k) % 7 == 0", None, {}, {}, False, 0),
    "by-head": ("causal & q - k < 9 * (h + 1)", "score + slope[h] * (k - q) / 100", {}, {"slope": SLOPE}, False, 0),
    "empty-rows": ("q >= k & q % 7 > 2 & k > 50", None, {}, {}, True, 0),
    "relative-bias": ("causal", "score + bias[h, q - k + KV_LEN]", {}, {"bias": BIAS}, True, 0),
    "dropout": ("causal & window(60)", "score * c + decay[k]", {}, {"decay": DECAY, "c": np.float32(0.7)}, True, 0.3),
}


GAMMA = (1 - 2.0 ** (-2.0 - np.arange(HEADS))).astype(np.float32)
# mask, weight, divisor, tables of the mask, learned tables, dropout
WEIGHTED = {
    "squared-relu": ("causal & window(60)", "relu(score) ** 2", "count + float(q) / float(Q_LEN)", {}, {}, 0),
    "retention": (
        "causal", "score * gamma[h] ** (q - k)", "max(abs(total), c[h] + decay[q])", {},
        {"gamma": GAMMA, "c": SLOPE, "decay": np.abs(DECAY)}, 0,
    ),
    "documents": ("causal & same(doc)", "sigmoid(score)", "total", {"doc": DOC}, {}, 0),
    "empty-rows": ("q >= k & q % 7 > 2 & k > 50", "score", None, {}, {}, 0.3),
}  # fmt: skip


def arrays(length=LENGTH, dtype=torch.float32):
    """q, k, v, cotangents of out and lse, sinks."""
    g = torch.Generator().manual_seed(11)
    shapes = [(BATCH, h, length, d) for h, d in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM), (HEADS, V_DIM))]
    made = [torch.randn(s, generator=g) for s in (*shapes, (BATCH, HEADS, length), (HEADS,))]
    return [x.to(dtype) for x in made]


def case(name):
    mask, score, tables, learned, sinks, rate = CASES[name]
    att = fk.compile(mask, score, dropout=rate)
    tables = {n: torch.as_tensor(x) for n, x in tables.items()}
    deal = fk.parallel.deal(mask, LENGTH, RANKS, tile=TILE, batch=BATCH, heads=HEADS, **tables)
    return att, deal, tables, learned, sinks, {"seed": 77} if rate else {}


def shard(deal, x, axis, rank):
    return deal.permute(x, axis).tensor_split(RANKS, axis)[rank]


def loss(out, lse, dout, dlse):
    return (out * dout).sum() + (torch.where(lse == -torch.inf, 0.0, lse) * dlse).sum()


def differences(name, rank):
    """By variant, the largest differences between this rank's part and the whole attention on one process: of lse and
    out from the interpreter in float64, of gradients from the same attention."""
    att, deal, tables, learned, sunk, seed = case(name)
    q, k, v, dout, dlse, sinks = arrays()
    learned = {n: torch.as_tensor(x).requires_grad_() for n, x in learned.items()}
    sinks = sinks.requires_grad_() if sunk else None
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    shared = [*learned.values(), *([sinks] if sunk else [])]
    out, lse = att(*whole, sinks=sinks, return_lse=True, **tables, **learned, **seed)
    wanted = torch.autograd.grad(loss(out, lse, dout, dlse), [*whole, *shared])
    wide = fk.compile(CASES[name][0], CASES[name][1], backend="dense", dropout=att.options.dropout)
    fixed = {n: x.detach() for n, x in learned.items()}
    how = {"sinks": sinks if sinks is None else sinks.detach(), "return_lse": True}
    exact, exact_lse = wide(q.double(), k.double(), v.double(), **how, **tables, **fixed, **seed)
    expected = [shard(deal, x, 2, rank) for x in (exact, *wanted[:3])] + list(wanted[3:])
    held = deal.held[rank]
    exact_lse = shard(deal, exact_lse, 2, rank)[:, :, :held]
    off = {}
    for variant in ("ring", "all-gather"):
        mine = [shard(deal, x.detach(), 2, rank).requires_grad_() for x in whole]
        split = {n: x.ndim - 1 for n, x in tables.items() if variant == "all-gather"}
        given = {n: shard(deal, x, split[n], rank) if n in split else x for n, x in tables.items()}
        here, right = dict(learned), list(expected)
        if variant == "all-gather" and "decay" in learned:  # this rank's part has this rank's part of the gradient
            at = 4 + list(learned).index("decay")
            split["decay"], right[at] = 0, shard(deal, right[at], 0, rank)
            here["decay"] = shard(deal, learned["decay"].detach(), 0, rank).requires_grad_()
        how = {"deal": deal, "variant": variant, "sinks": sinks, "return_lse": True, "split": split}
        out, lse = fk.parallel.attend(att, *mine, **how, **given, **here, **seed)
        part = loss(out, lse, shard(deal, dout, 2, rank), shard(deal, dlse, 2, rank))
        found = torch.autograd.grad(part, [*mine, *here.values(), *shared[len(learned) :]])
        assert (out[:, :, held:] == 0).all()
        assert (lse[:, :, held:] == -torch.inf).all()
        seen = lse[:, :, :held]
        assert ((seen == -torch.inf) == (exact_lse == -torch.inf)).all()
        off[variant] = [torch.where(seen == -torch.inf, 0.0, seen - exact_lse).abs().max().item()]
        for a, b in zip([out.detach(), *found], right, strict=True):
            off[variant].append((a - b).abs().max().item() / max(1, b.abs().max().item()))
    return off


def weighted(name, rank):
    """By variant and dtype, the largest errors of this rank's rows and gradients from one process in float64, and
    those of one process in the same dtype."""
    mask, weight, divide, tables, learned, rate = WEIGHTED[name]
    att = fk.compile(mask, weight=weight, divide=divide, dropout=rate)
    tables = {n: torch.as_tensor(x) for n, x in tables.items()}
    deal = fk.parallel.deal(mask, LENGTH, RANKS, tile=TILE, batch=BATCH, heads=HEADS, **tables)
    seed, off = {"seed": 77} if rate else {}, {}

    def run(dtype, attend, part):
        q, k, v, dout, *_ = (x.to(dtype) for x in arrays(dtype=torch.float16))
        leaves = [part(x).requires_grad_() for x in (q, k, v)]
        mine = {n: torch.as_tensor(x).to(dtype).requires_grad_() for n, x in learned.items()}
        out = attend(*leaves, **tables, **mine, **seed)
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *mine.values()], part(dout))]

    def here(x):
        return shard(deal, x, 2, rank)

    exact = run(torch.float64, att, lambda x: x.clone())
    for variant, dtype in (("ring", torch.float32), ("ring", torch.float16), ("all-gather", torch.bfloat16)):
        plain = run(dtype, att, lambda x: x.clone())
        got = run(dtype, partial(fk.parallel.attend, att, deal=deal, variant=variant), here)
        assert got[0].dtype == dtype
        off[variant, dtype] = []
        for i, (a, b, c) in enumerate(zip(got, plain, exact, strict=True)):
            b, c = (here(x) if i < 4 else x for x in (b, c))
            off[variant, dtype].append([(x.double() - c).abs().max().item() for x in (a, b)] + [c.abs().max().item()])
    return off


def large(rank, report):
    """Errors of gradients at large scores, with sinks that are the largest scores of rows: (ours, those of one softmax
    in the same dtype) beside float64."""
    deal = fk.parallel.deal("causal", LENGTH, RANKS, tile=TILE)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def plain(q, k, v, sinks):
        return dense(q, k, v, causal, sinks=sinks)[0]

    def by_rows(q, k, v, sinks, dout):
        """As flash attention has them: what is taken off dP is the row's sum of dout * out."""
        group = HEADS // KV_HEADS
        p = plain(q, k, torch.eye(LENGTH).expand(BATCH, KV_HEADS, -1, -1), sinks)
        keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
        ds = p * (dout @ values.mT - (dout * (p @ values)).sum(-1, keepdim=True)) * NATIVE_DIM**-0.5
        return ds @ keys, *((x.mT @ y).unflatten(1, (-1, group)).sum(2) for x, y in ((ds, q), (p, dout)))

    def gradients(attend, *given):
        leaves = [x.detach().clone().requires_grad_() for x in given[:4]]
        return torch.autograd.grad(attend(*leaves), leaves, given[4])

    for size in (1e3, 1e5, 1e9):
        # zeros behind the entries: native kernels of this head size are built for other tests, too
        q, k, v, dout = (pad(x, (0, NATIVE_DIM - x.shape[-1])) for x in arrays()[:4])
        q, k = q * (2 * size) ** 0.5, k * size**0.5
        keys = k.double().repeat_interleave(HEADS // KV_HEADS, 1)
        sinks = (q.double() @ keys.mT * NATIVE_DIM**-0.5).tril().amax(-1).median(-1).values[0].float()
        right = gradients(plain, *(x.double() for x in (q, k, v, sinks, dout)))
        theirs = gradients(plain, q, k, v, sinks, dout)
        rows = by_rows(q, k, v, sinks, dout)
        for backend in BACKENDS:
            att = fk.compile("causal", backend=backend)
            for variant in ("ring", "all-gather"):
                mine = [shard(deal, x, 2, rank) for x in (q, k, v)]
                how = {"deal": deal, "variant": variant}
                found = gradients(
                    lambda q, k, v, sinks, att=att, how=how: fk.parallel.attend(att, q, k, v, sinks=sinks, **how),
                    *mine, sinks, shard(deal, dout, 2, rank),
                )  # fmt: skip
                errors = []
                for i, (a, b, c) in enumerate(zip(found, theirs, right, strict=True)):
                    b = b if i == 3 or (b - c).norm() > (rows[i] - c).norm() else rows[i]
                    here = c if i == 3 else shard(deal, c, 2, rank)
                    ours, other = ((x - y).norm(dim=-1).flatten().quantile(0.9).item() for x, y in ((a, here), (b, c)))
                    errors.append((ours, other, c.norm(dim=-1).max().item()))
                report(("large", backend, variant, size), errors)


def agreement(rank, report, names):
    for name in names:
        report(("differences", name), differences(name, rank))


class Sent:
    """Bytes given to torch to send, by receiver."""

    def __init__(self):
        self.bytes, self._start = Counter(), dist.batch_isend_irecv

    def __enter__(self):
        def start(ops):
            for op in ops:
                if op.op is dist.isend:
                    self.bytes[op.group_peer] += op.tensor.numel() * op.tensor.element_size()
            return self._start(ops)

        dist.batch_isend_irecv = start
        return self

    def __exit__(self, *error):
        dist.batch_isend_irecv = self._start


def acknowledged():
    """Payload bytes that peers have acknowledged on the sockets of this process, as the kernel counts them."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as s:
                if s.type == socket.SOCK_STREAM and s.family in (socket.AF_INET, socket.AF_INET6):
                    total += struct.unpack_from("Q", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232), 120)[0]
        except OSError:
            continue
    return total


def traffic(rank, report):
    """Bytes of a forward and of a backward, by receiver and on the wire."""
    for name in ("causal", "window", "documents"):
        att, deal, tables, *_ = case(name)
        mine = [shard(deal, x, 2, rank).requires_grad_() for x in arrays()[:3]]
        fk.parallel.attend(att, *mine, deal=deal, **tables)  # ranks have agreed
        with Sent() as forward:
            out = fk.parallel.attend(att, *mine, deal=deal, **tables)
        with Sent() as backward:
            out.sum().backward()
        report(("bytes", name), [[x.bytes[r] for r in range(RANKS)] for x in (forward, backward)])
    length = 8192
    deal = fk.parallel.deal("window(900)", length, RANKS)
    mine = [shard(deal, x, 2, rank) for x in arrays(length)[:3]]
    att = fk.compile("window(900)")
    fk.parallel.attend(att, *mine, deal=deal)
    dist.barrier()
    before = acknowledged()
    fk.parallel.attend(att, *mine, deal=deal)
    dist.barrier()
    report("on the wire", acknowledged() - before)


def refusal(rank, report):
    """Calls that all ranks get wrong, in which keys may be underway already, leave nothing behind: what comes next
    works."""
    deal = fk.parallel.deal("causal", LENGTH, RANKS, tile=TILE)
    mine = [shard(deal, x, 2, rank) for x in arrays()[:3]]
    att = fk.compile("causal", "score + bias[q, k]")
    for name, given in (("axes", {"bias": torch.ones(5)}), ("name", {"bias": torch.ones(9, 9), "bais": 1}), ("no", {})):
        try:
            fk.parallel.attend(att, *mine, deal=deal, **given)
        except fk.ParameterError as error:
            report(("wrong", name), str(error))


def disagreement(rank, report):
    """Every rank learns who asks for what; the group works on."""
    q, k, v, *_ = arrays()
    odd = rank == 2
    calls = {
        "mask": lambda: ("causal & window(9)" if odd else "causal", LENGTH, {}, torch.float32),
        "lengths": lambda: ("causal", LENGTH - TILE * RANKS if odd else LENGTH, {}, torch.float32),
        "dtype": lambda: ("causal", LENGTH, {}, torch.float64 if odd else torch.float32),
        "dropout": lambda: ("causal", LENGTH, {"dropout": 0.5 if odd else 0.0}, torch.float32),
    }
    score = fk.compile("causal", "score + bias[h]")
    bias, deal = torch.zeros(HEADS, requires_grad=odd), fk.parallel.deal("causal", LENGTH, RANKS, tile=TILE)
    try:
        fk.parallel.attend(score, *(shard(deal, x, 2, rank) for x in (q, k, v)), deal=deal, bias=bias)
    except fk.PeerError as error:
        report(("refused", "learned"), str(error))
    for name, call in calls.items():
        mask, length, options, dtype = call()
        deal = fk.parallel.deal(mask, length, RANKS, tile=TILE)
        mine = [shard(deal, x[:, :, :length].to(dtype), 2, rank) for x in (q, k, v)]
        try:
            fk.parallel.attend(fk.compile(mask, **options), *mine, deal=deal)
        except fk.PeerError as error:
            report(("refused", name), str(error))


def all_checks(rank, report, names):
    for part in (partial(agreement, names=names), large, refusal, traffic, disagreement):
        try:
            part(rank, report)
        except Exception:
            report("failed", traceback.format_exc())
            raise


def weighted_checks(rank, report, names):
    for name in names:
        report(("weighted", name), weighted(name, rank))
    att = fk.compile("causal", weight="sigmoid(score)", divide="total")
    deal = fk.parallel.deal("causal", LENGTH, RANKS, tile=TILE)
    q, k, v, *_ = arrays()
    out, lse = att(q, k, v, return_lse=True)
    mine = [shard(deal, x, 2, rank) for x in (q, k, v)]
    found = fk.parallel.attend(att, *mine, deal=deal, return_lse=True)
    report(
        "lse",
        [
            (x - shard(deal, y, 2, rank))[:, :, : deal.held[rank]].abs().max().item()
            for x, y in zip(found, (out, lse), strict=True)
        ],
    )


def lost(rank, report, how):
    att = fk.compile("causal")
    deal = fk.parallel.deal("causal", LENGTH, RANKS, tile=TILE)
    mine = [shard(deal, x, 2, rank).requires_grad_() for x in arrays()[:3]]
    out = fk.parallel.attend(att, *mine, deal=deal)
    dist.barrier()
    if rank == 2:
        how()
    try:
        if rank == 0:
            fk.parallel.attend(att, *mine, deal=deal)
        else:
            out.sum().backward()
    except fk.PeerError as error:
        report("lost", str(error))


def dies(rank, report):
    lost(rank, report, lambda: os._exit(9))


def stops(rank, report):
    lost(rank, report, stop)


def neighbours(rank, report):
    """Rank 3 stops; rank 2 alone reads from it, gives up and ends; rank 1 misses rank 2."""
    deal = fk.parallel.deal("q - k < 9 & q - k > -9", LENGTH, RANKS, tile=TILE)
    att = fk.compile(deal.mask)
    mine = [shard(deal, x, 2, rank) for x in arrays()[:3]]
    fk.parallel.attend(att, *mine, deal=deal)
    dist.barrier()
    if rank == 3:
        stop()
    if rank < 2:
        time.sleep(1)  # rank 2 is the first to wait
    try:
        for _ in range(3):  # layers
            fk.parallel.attend(att, *mine, deal=deal)
    except fk.PeerError as error:
        report("lost", str(error))
