"""frisket.flex.install(): torch's names, and modules that imported them before."""

from __future__ import annotations

import functools
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from support.flex_masks import causal, same
from torch.utils._pytree import tree_flatten

import frisket as fk
import frisket.flex as ours
import frisket.runtime.flex.attention as written
from frisket.runtime.bench.contestants import torchs
from frisket.runtime.bench.race import NoWordsError

# as libraries write it: torchtitan has the class variable and the compiled function, transformers the object
LIBRARY = """
import functools
import torch
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention as attend

class Layer:
    compiled = torch.compile(attend, backend="eager")
    make = staticmethod(create_block_mask)
    class Config:
        attend = attend

class Once:
    pass

once = Once()
once.compiled = torch.compile(attend, backend="eager")
create = torch.compile(create_block_mask, backend="eager")
on_cpu = functools.partial(create_block_mask, device="cpu")
with_attend = functools.partial(print, attend=attend)
disabled = torch.compiler.disable(attend)
KINDS, LIST = {"flex": attend}, [attend, on_cpu]

def decorated(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return functools.wraps(function)(inner)

wrapped = decorated(decorated(attend))

def call(q, mask, *, attend=attend):
    return attend(q, q, q, block_mask=mask)

def global_call(q, mask):
    return attend(q, q, q, block_mask=mask)

graph = torch.compile(global_call, backend="eager")
"""


def executed(name, text):
    module = types.ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), vars(module))
    return module


@pytest.fixture
def modules(monkeypatch):
    """What install() sees of sys.modules. It does not look for other holders: there are those of all tests."""
    found = {theirs.__name__: theirs}
    monkeypatch.setattr(written, "sys", types.SimpleNamespace(modules=found))
    monkeypatch.setattr(written, "_left", list)
    return found


@pytest.fixture
def library(modules, monkeypatch):
    """A module that imported torch's functions."""
    module = modules["flex_library"] = executed("flex_library", LIBRARY)
    monkeypatch.setitem(sys.modules, "flex_library", module)  # where torch 2.11 looks for the globals of a function
    return module


def holders(module):
    """The functions of a module that lead to flex_attention or create_block_mask, and what they hold."""
    found = {}
    for name, one in {
        **vars(module), "Layer.compiled": module.Layer.compiled, "Layer.make": module.Layer.make,
        "Layer.Config.attend": module.Layer.Config.attend, "once.compiled": module.once.compiled,
        "KINDS": module.KINDS["flex"], "LIST": module.LIST[0],
    }.items():  # fmt: skip
        while isinstance(one, functools.partial) or hasattr(one, "__wrapped__"):
            one = one.func if isinstance(one, functools.partial) else one.__wrapped__
        if one in (*vars(theirs).values(), *vars(ours).values()) and callable(one):
            found[name] = one
    return {**found, "with_attend": module.with_attend.keywords["attend"], "call": module.call.__kwdefaults__["attend"]}


def test_flex_install_replaces_what_modules_hold(library):
    before = holders(library)
    assert len(before) == 15
    assert all(x in vars(theirs).values() for x in before.values())
    with ours.install() as installed:
        during = holders(library)
        assert during == {name: getattr(ours, x.__name__) for name, x in before.items()}
    assert holders(library) == before
    places = {x: name for x, name in installed.changed.items() if x.startswith("flex_library.")}
    assert places["flex_library.Layer.compiled"] == places["flex_library.once['compiled']"] == "flex_attention"
    assert places["flex_library.on_cpu"] == places["flex_library.Layer.make"] == "create_block_mask"
    assert {"flex_library.LIST[0]", "flex_library.KINDS['flex']", "flex_library.call"} <= set(places)


def test_flex_install_assigns_each_name_of_torch(modules):
    names = [*theirs.__all__, "_MaskModWrapper", "_vmap_for_bhqkv", "_create_sparse_block_from_block_mask",
             "_convert_mask_to_block_mask", "_create_empty_block_mask", "_identity", "_mask_mod_signature",
             "_score_mod_signature", "_DEFAULT_SPARSE_BLOCK_SIZE"]  # fmt: skip
    before = {n: getattr(theirs, n) for n in names}
    with ours.install() as installed:
        assert {n: getattr(theirs, n) for n in names} == {n: getattr(ours, n) for n in names}
        with ours.install() as again:
            assert not again.changed
    assert {n: getattr(theirs, n) for n in names} == before
    installed.undo()
    assert str(installed).startswith("frisket.flex is in ")
    assert "\n  torch.nn.attention.flex_attention.create_block_mask\n" in str(installed)


LEFT = written._left
REST = """
import functools
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

cached = functools.lru_cache(create_block_mask)
pair = (1, flex_attention)

def default(attend=flex_attention):
    pass

class Derived(BlockMask):
    pass

class Holder:
    pass

objects = [[Holder()]]
objects[0][0].attend = flex_attention
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
"""


def test_flex_install_names_what_it_cannot_change(modules, monkeypatch):
    monkeypatch.setattr(written, "_left", LEFT)
    module = modules["flex_rest"] = executed("flex_rest", REST)
    monkeypatch.setitem(sys.modules, "flex_rest", module)
    with pytest.warns(UserWarning, match=r"(?s)flex_rest\.cached.*call frisket.flex.install\(\) before"):
        installed = ours.install()
    installed.undo()
    assert {f"flex_rest.{x}" for x in ("cached", "pair", "default", "Derived", "Holder")} <= set(installed.left)
    assert int(installed.left[-1].removesuffix(" masks of torch's class")) >= 1
    assert "torch's is still in flex_rest.cached\n" in str(installed)


ORDER = """
import sys, types
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
compiled = torch.compile(create_block_mask, backend="eager")
import frisket.flex
print(frisket.flex.install())
assert compiled("causal", None, None, 128, 128, "cpu") == create_block_mask("causal", None, None, 128, 128, "cpu")
assert flex_attention is frisket.flex.flex_attention
assert BlockMask is frisket.flex.BlockMask is torch.nn.attention.flex_attention.BlockMask
"""


def test_flex_install_warns_of_nothing_in_a_plain_program():
    run = subprocess.run([sys.executable, "-W", "error", "-c", ORDER], capture_output=True, text=True)
    assert not run.stderr
    assert "\n  __main__.compiled\n" in run.stdout
    assert "still" not in run.stdout


def test_flex_install_keeps_the_rest_of_frisket_working(modules):
    q = torch.randn(1, 2, 128, 16)
    layout = fk.mask("causal").layout(128, 128)
    with ours.install():
        mask = layout.to_block_mask("cpu")
        assert type(mask) is ours.BlockMask
        same(mask, ours.create_block_mask("causal", None, None, 128, 128, "cpu"))
        out = theirs.flex_attention(q, q, q, block_mask=theirs.create_block_mask(causal, 1, 1, 128, 128, "cpu"))
        torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
        assert ours.create_mask(theirs.and_masks(causal, "k < 4"), None, None, 8, 8, "cpu").sum() == 26


def test_flex_install_makes_a_mask_one_leaf(modules):
    """torch's context parallelism flattens lists of masks and asks for one leaf each."""
    mask = ours.create_block_mask(causal, None, None, 128, 128, "cpu")
    with ours.install():
        with ours.install():
            assert tree_flatten([mask])[0] == [mask]
        assert tree_flatten([mask])[0] == [mask]
    assert len(tree_flatten([mask])[0]) == 8


@pytest.mark.parametrize("apart", [False, True])
def test_flex_sparse_block_function_equals_torchs(apart):
    dense = ours.create_mask("causal & window(100) | k < 4", 1, 2, 300, 300, "cpu")
    grids = ours._convert_mask_to_block_mask(dense, 128, 64, separate_full_blocks=apart)
    own, torchs = (m._create_sparse_block_from_block_mask(grids, causal, (300, 300), 128, 64) for m in (ours, theirs))
    same(own, torchs)
    assert type(own) is ours.BlockMask
    assert own.shape == torchs.shape
    assert own.mask_mod is causal


def test_flex_empty_block_mask_fits_each_length():
    q, k = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 70, 16)
    own, torchs = (m._create_empty_block_mask(q, k) for m in (ours, theirs))
    same(own, torchs)
    assert own.BLOCK_SIZE == torchs.BLOCK_SIZE
    for mask in (own, torchs):
        assert torch.equal(ours.flex_attention(q, k, k, block_mask=mask), ours.flex_attention(q, k, k))
        compiled = torch.compile(ours.flex_attention, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, k, k, block_mask=mask), ours.flex_attention(q, k, k))


def test_flex_mask_wrappers_are_torchs():
    assert ours._MaskModWrapper(causal) == theirs._MaskModWrapper(causal)
    at = [torch.arange(n) for n in (1, 1, 5, 7)]
    assert torch.equal(ours._vmap_for_bhqkv(causal, ())(*at)[0, 0], torch.ones(5, 7).tril().bool())


@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask"])
def test_bench_refuses_to_time_frisket_as_torch(modules, name):
    with ours.install(), pytest.raises(NoWordsError, match="has replaced it: call undo"):
        torchs(getattr(theirs, name))
    assert torchs(getattr(theirs, name)) is getattr(theirs, name)


def test_flex_install_changes_calls_of_compiled_functions(library):
    """A graph that was compiled with torch's function is not used again."""
    q = torch.randn(1, 2, 128, 16, generator=torch.Generator().manual_seed(0))
    calls = [library.graph, lambda q, mask: library.Layer.compiled(q, q, q, block_mask=mask)]
    mask = library.create(causal, None, None, 128, 128, device="cpu")
    assert type(mask) is theirs.BlockMask
    expected = calls[0](q, mask)
    calls[1](q, mask)
    with ours.install():
        mask = library.create(causal, None, None, 128, 128, device="cpu")
        assert type(mask) is type(library.on_cpu(causal, None, None, 128, 128)) is ours.BlockMask
        x = q.clone().requires_grad_()
        for call in calls:
            out = call(x, mask)
            torch.testing.assert_close(out, expected)
            (grad,) = torch.autograd.grad(out.sum(), x)  # torch's has no backward on a CPU
            assert grad.abs().sum() > 0
    mask = library.create(causal, None, None, 128, 128, device="cpu")
    assert type(mask) is theirs.BlockMask
    assert torch.equal(calls[0](q, mask), expected)


def test_flex_install_runs_models_of_transformers(monkeypatch):
    """transformers binds flex's names at import, and trains on a CPU with frisket's."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(written, "_left", list)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids, padding = torch.randint(0, 32, (2, 140)), torch.ones(2, 140, dtype=torch.int64)
    padding[1, :20] = 0

    def run(kind):
        model.set_attn_implementation(kind)
        model.zero_grad()
        logits = model(ids, attention_mask=padding).logits[padding.bool()]
        logits.square().mean().backward()
        return logits.detach(), *(p.grad.clone() for p in model.parameters())

    expected = run("eager")
    with ours.install() as installed, torch.compiler.set_stance("force_eager"):
        assert "transformers.integrations.flex_attention.flex_attention" in installed.changed
        for mine, other in zip(run("flex_attention"), expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
