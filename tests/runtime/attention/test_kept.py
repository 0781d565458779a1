"""Copies and pickles: what calls have left behind is no part of an object, before a call or after it."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from functools import partial
from pathlib import Path

import cloudpickle
import jax
import jax.numpy as jnp
import joblib
import numpy as np
import pytest
import torch
from support.native.compiler import needs_compiler
from support.tiers import default_only
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import frisket as fk
from frisket.caches.torch import KVCache, RingKVCache
from frisket.flex import create_block_mask, flex_attention
from frisket.operations import AttentionMetadata, OperationRegistry

S = 24
DOC = np.arange(S) // 9


def saved(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def dumped(x, path):
    joblib.dump(x, path)
    return joblib.load(path)


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
    "torch": saved,
}


@pytest.fixture(params=default_only([*WAYS, "joblib"], "copy", "deepcopy", "pickle"))
def kept(request, tmp_path):
    return WAYS.get(request.param, partial(dumped, path=tmp_path / "kept"))


class Model(torch.nn.Module):
    """A bias that a score mod captured, sinks, documents of numpy, a cache."""

    def __init__(self):
        super().__init__()
        self.bias, self.sinks = (torch.nn.Parameter(torch.randn(2)) for _ in range(2))
        self.first = fk.compile("same(doc)", lambda score, h, q, k: score + self.bias[h] * (k - q), doc=DOC,
                                sinks=self.sinks)  # fmt: skip
        self.then = fk.compile("causal & window(5)").at(q="q + 1")

    def forward(self, q, k, v):
        return self.first(q, k, v) + self.then(q, k, v)


def arrays():
    return torch.randn(3, 1, 2, S, 16, generator=torch.Generator().manual_seed(0)).unbind()


def of(model):
    """The output, and the gradients of what the model learns."""
    out = model(*arrays())
    return out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))


@pytest.mark.parametrize("called", [False, True])
def test_models_of_torch(kept, called):
    model = Model()
    if called:
        of(model)
        model.first.check(*arrays())
    other = kept(model)
    torch.testing.assert_close(of(other), of(model))
    if kept is not copy.copy:
        with torch.no_grad():
            other.bias.add_(1)  # the score mod reads the copy's own
        assert not torch.allclose(of(other)[0], of(model)[0])


def test_averaged_model_gives_its_own_results():
    model = Model()
    of(model)
    average = AveragedModel(model)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(1)
    average.update_parameters(model)
    torch.testing.assert_close(of(average.module), of(model))


@pytest.mark.parametrize("flat", [False, True])
def test_copied_plans_give_the_same_results(kept, flat):
    att = fk.compile("same(doc)", "score + slope[h]", slope=np.ones(2, np.float32))
    plan = att.plan(S, S, 1, 2, doc=torch.tensor(DOC), flat=flat)
    want = att(*arrays(), plan=plan)
    torch.testing.assert_close(att(*arrays(), plan=kept(plan)), want)
    torch.testing.assert_close(kept(att)(*arrays(), plan=plan), want)


@needs_compiler
@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", [KVCache, RingKVCache])
def test_copied_caches_continue_independently(kept, make):
    att, cache = fk.compile("causal & window(24)", backend="native"), make.create(1, 24, 2, 16)
    steps = [[x[:, :, i : i + 1] for x in arrays()] for i in range(4)]
    for step in steps[:3]:
        cache.attention(att, *step)
    other = kept(cache) if kept is not copy.copy else copy.deepcopy(cache)  # a shallow copy is one more name
    assert torch.equal(other.attention(kept(att), *steps[3]), cache.attention(att, *steps[3]))
    assert other.k.data_ptr() != cache.k.data_ptr()


def _seen(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_pickles_do_not_grow_with_earlier_calls(kept):
    """A pickle is no longer after questions than before."""
    mask = fk.mask("causal & doc[q] == doc[k]", doc=DOC)
    score = fk.score("slope[h] * (k - q) + score", slope=np.ones(2, np.float32))
    layout = mask.layout(S, S, block=(8, 8))
    blocks = create_block_mask(_seen, None, None, S, S, "cpu", BLOCK_SIZE=8)
    att = fk.compile(mask, score)
    made = mask, score, layout, blocks, att, fk.parallel.deal(mask, S, ranks=2, tile=4)
    before = [len(pickle.dumps(x)) for x in made]
    att(*arrays())
    flex_attention(*arrays(), block_mask=blocks)
    asked = str(layout), layout.counts, layout.spans, layout.transposed, layout.facts, layout.explain(q=3, k=2)
    assert asked, mask.implies("causal", S, S)
    assert [len(pickle.dumps(x)) for x in made] == before
    others = [kept(x) for x in made]
    assert others[:2] == [mask, score]
    assert (others[2].kinds() == layout.kinds()).all()
    assert torch.equal(flex_attention(*arrays(), block_mask=others[3]), flex_attention(*arrays(), block_mask=blocks))


@pytest.mark.sampled(3)
def test_copied_attention_of_jax_gives_the_same_results(kept):
    q, k, v = (jnp.asarray(x.numpy().swapaxes(1, 2)) for x in arrays())
    bias, doc, sinks = (jnp.asarray(x) for x in (np.linspace(0, 1, S, dtype=np.float32), DOC, np.ones(2, np.float32)))
    att = fk.compile(lambda q, k: doc[q] == doc[k], lambda score, q, k: score + bias[k], sinks=sinks)
    plan, operation = att.plan(S, S, 1, 2), OperationRegistry.create("frisket", AttentionMetadata())
    want = att(q, k, v)
    jax.jit(jax.grad(lambda q: jax.jit(att)(q, k, v).sum()))(q)
    operation(q, k, v)
    other = kept(att)
    assert np.array_equal(other(q, k, v), want)
    assert np.array_equal(other(q, k, v, plan=kept(plan)), want)
    assert np.array_equal(jax.jit(other)(q, k, v), jax.jit(att)(q, k, v))
    assert np.array_equal(kept(operation)(q, k, v).attention_outputs, operation(q, k, v).attention_outputs)


class Rows(torch.utils.data.Dataset):
    """What a worker does: a mask, and an attention that has been called."""

    def __init__(self, att):
        self.att = att

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return self.att(*arrays()).detach() + i


def _output(model):
    return model(*arrays()).detach()


@pytest.mark.exhaustive
def test_processes_that_are_spawned(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # they import this module, also where `pytest` was called
    model = Model()
    want = model(*arrays()).detach()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        torch.testing.assert_close(pool.apply(_output, [model]), want)
    loader = DataLoader(Rows(model), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    for i, found in enumerate(loader):
        torch.testing.assert_close(found, want + i)
