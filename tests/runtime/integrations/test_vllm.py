"""frisket's attention backend for vLLM, beside a stand-in of vLLM and dense attention of every request alone."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from outside.choices import chosen, keep
from runtime.integrations.kernels_built import built
from support.torch.dense import dense

import frisket as fk
from frisket.dsl.errors import MissingPackageError, ParameterError, ShapeError
from frisket.integrations import vllm_pages
from frisket.runtime.machine.cpp_build import reason
from runtime.integrations import vllm_standin

PAGE, KEY_HEADS, HEADS, DIM = 16, 2, 4, 16


@pytest.fixture(scope="module")
def vllm():
    with vllm_standin.installed() as module:
        yield module


@pytest.fixture(autouse=True)
def config():
    """vLLM's configuration, as the model is made."""
    vars(vllm_standin.config).update(vars(vllm_standin.fresh_config()))
    return vllm_standin.config


class Engine:
    """What vLLM does around a backend: it keeps tokens of requests in blocks that it hands out in no order, and tells a
    step's new tokens, those that decode first."""

    def __init__(self, vllm, requests, *, width=8, seed=0, dtype=torch.float32, **layer):
        self.random, self.width = np.random.default_rng(seed), width
        backend = vllm.VllmBackend
        self.layer = backend.get_impl_cls()(
            **{"num_heads": HEADS, "head_size": DIM, "scale": DIM**-0.5, "num_kv_heads": KEY_HEADS, **layer}
        )
        spec = SimpleNamespace(block_size=PAGE)
        self.builder = backend.get_builder_cls()(spec, ["layer.0"], vllm_standin.config, torch.device("cpu"))
        blocks = requests * width + 3
        shape = blocks, self.layer.num_kv_heads, PAGE, 2 * DIM
        self.pool = torch.full(shape, torch.nan, dtype=dtype)  # what no query sees may hold anything
        self.free = self.random.permutation(blocks).tolist()
        self.table = torch.from_numpy(self.random.integers(0, blocks, (requests, width)).astype(np.int32))  # stale
        self.keys = [torch.zeros(2, 0, self.layer.num_kv_heads, DIM, dtype=dtype) for _ in range(requests)]
        self.dtype, self.used = dtype, [0] * requests

    def give_back(self, r):
        """Request r ends, or is preempted: others get its blocks, with what they hold."""
        self.free += self.table[r, : self.used[r]].tolist()
        self.used[r], self.keys[r] = 0, self.keys[r][:, :0]

    def share(self, r, other, blocks):
        """Request r begins with the first full blocks of another, as prefix caching finds them."""
        self.table[r, :blocks], self.used[r] = self.table[other, :blocks], blocks
        self.keys[r] = self.keys[other][:, : blocks * PAGE]

    def step(self, new, padding=0):
        """(out, queries of every request, lengths) of `new` {request: tokens}, one at a time first."""
        order = sorted(new, key=lambda r: new[r] != 1)
        total, slots, lengths = sum(new.values()), [], []
        q, k, v = (
            torch.from_numpy(self.random.normal(size=(total + padding, n, DIM))).to(self.dtype)
            for n in (HEADS, self.layer.num_kv_heads, self.layer.num_kv_heads)
        )
        starts, at = [0], 0
        for r in order:
            have = self.keys[r].shape[1]
            end = have + new[r]
            while self.used[r] * PAGE < end:
                self.table[r, self.used[r]] = self.free.pop()
                self.used[r] += 1
            slots += [int(self.table[r, i // PAGE]) * PAGE + i % PAGE for i in range(have, end)]
            self.keys[r] = torch.cat([self.keys[r], torch.stack([k[at : at + new[r]], v[at : at + new[r]]])], 1)
            at += new[r]
            starts.append(at)
            lengths.append(end)
        where = torch.tensor(starts, dtype=torch.int32)
        told = vllm_standin.CommonAttentionMetadata(
            query_start_loc=where, query_start_loc_cpu=where.clone(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32), num_reqs=len(order), num_actual_tokens=total,
            max_query_len=max(new.values()), max_seq_len=max(lengths), block_table_tensor=self.table[order],
            slot_mapping=torch.tensor(slots + [-1] * padding),
        )  # fmt: skip
        out = torch.full((total + padding, HEADS, DIM), torch.nan, dtype=self.dtype)
        found = self.layer.forward(None, q, k, v, self.pool, self.builder.build(0, told), out)
        assert found.data_ptr() == out.data_ptr()
        rows = zip(order, starts, starts[1:])
        return {r: (q[a:b], found[a:b]) for r, a, b in rows}


def compare(engine, found, visible, change=lambda s, d: s, sinks=None, tolerance=2e-6):
    """The outputs of the last queries of every request, with float64."""
    for r, (last, out) in found.items():
        q, k, v = (x.double().transpose(0, 1)[None] for x in (last, *engine.keys[r]))
        places = torch.arange(k.shape[2])
        distance = places[-len(last) :, None] - places
        seen, sinks64 = visible(distance, places), sinks if sinks is None else sinks.double()
        want, *_ = dense(q, k, v, seen, lambda s, d=distance: change(s, d), sinks64)
        torch.testing.assert_close(out.double(), want[0].transpose(0, 1), rtol=tolerance, atol=tolerance)


def causal(distance, k):
    return distance >= 0


def window(distance, k):
    return (distance >= 0) & (distance < 20)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
LAYERS = {
    "causal": ({}, causal, {}),
    "window": ({"sliding_window": 20}, window, {}),
    "soft cap": ({"logits_soft_cap": 2.0}, causal, {"change": lambda s, d: 2 * torch.tanh(s / 2)}),
    "alibi": ({"alibi_slopes": SLOPES.tolist()}, causal, {"change": lambda s, d: s - SLOPES[:, None, None] * d}),
    "sinks": ({"sinks": SINKS, "sliding_window": 20}, window, {"sinks": SINKS}),
    "one key head": ({"num_kv_heads": 1}, causal, {}),
}
# requests of a step and their new tokens: prompts alone, prompts beside steps, chunks beside steps, steps alone
STORY = [{0: 37, 1: 5}, {0: 1, 1: 1, 2: 50}, {0: 1, 2: 33, 3: 1}, {0: 1, 1: 30, 2: 1, 3: 7}, dict.fromkeys(range(4), 1)]


@pytest.mark.parametrize("name", LAYERS)
def test_a_story_of_steps(vllm, name):
    """Mixed batches, chunks behind chunks, blocks in no order, stale entries of the table, keys that are NaN."""
    layer, visible, more = LAYERS[name]
    engine = Engine(vllm, 4, **layer)
    for i, new in enumerate(STORY):
        compare(engine, engine.step(new, padding=3 * (i % 2)), visible, **more)


def test_vllm_backend_in_bfloat16_is_near_dense(vllm):
    engine = Engine(vllm, 4, dtype=torch.bfloat16)
    for new in STORY:
        compare(engine, engine.step(new), causal, tolerance=2e-2)


def test_vllm_config_sets_mask_and_score(vllm, config):
    """As the transformers plug-in reads them, and of vLLM's additional_config, which comes first."""

    def sinks_and_steps(distance, k):
        return (distance >= 0) & ((distance < 9) | (k < 4)) & (k % 5 != 3)

    def biased(score, distance):
        return score - 0.25 * torch.arange(HEADS)[:, None, None] * distance

    text = "causal & (q - k < reach | k < 4) & k % 5 != 3"
    config.model_config.hf_text_config.frisket_mask = text
    config.model_config.hf_text_config.frisket_score = "score - rate[h] * (q - k)"
    config.additional_config = {"frisket_params": {"reach": 9, "rate": [0.0, 0.25, 0.5, 0.75]}}
    engine = Engine(vllm, 4)
    for new in STORY:
        compare(engine, engine.step(new), sinks_and_steps, change=biased)
    masks = {"sliding_attention": "causal & q - k < reach"}
    config.additional_config = {"frisket_mask": masks, "frisket_params": {"reach": 20}}
    config.model_config.hf_text_config = config.model_config.hf_config = SimpleNamespace()
    for layer, visible in (({}, causal), ({"sliding_window": 20}, window)):
        engine = Engine(vllm, 4, **layer)
        for new in STORY:
            compare(engine, engine.step(new), visible)


def test_vllm_config_sets_weight_and_divisor(vllm, config):
    config.additional_config = {"frisket_weight": "exp(score)", "frisket_divide": "total * two"}
    config.additional_config["frisket_params"] = {"two": 2.0}
    engine = Engine(vllm, 4)
    for new in STORY:
        compare(engine, {r: (last, 2 * out) for r, (last, out) in engine.step(new).items()}, causal)


@pytest.mark.skipif(bool(reason()), reason="no C++ compiler")
def test_vllm_serving_steps_do_not_recompile(vllm, monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "cpp")
    engine = Engine(vllm, 5, sliding_window=20, width=12)
    with built() as kernels:
        for new in [*STORY, {0: 1, 4: 2}]:
            engine.step(new)
    assert 0 < len(kernels) <= 6  # prompts and steps
    with built() as kernels:
        for i in range(50):
            new = dict.fromkeys(range(4), 1)
            compare(engine, engine.step(new | ({4: 1 + i % 4} if i % 2 else {})), window)
    assert kernels == []


def test_layers_that_are_alike_plan_once(vllm, monkeypatch):
    engine, made = Engine(vllm, 4), []
    plan = fk.Attention.plan
    monkeypatch.setattr(fk.Attention, "plan", lambda *a, **b: made.append(a[1:]) or plan(*a, **b))
    engine.step(STORY[0])
    assert len(made) == 1
    batch = engine.builder.build(0, told(engine))
    for _ in range(3):
        engine.layer.served.attend(torch.zeros(6, HEADS, DIM), engine.pool.nan_to_num(), batch)
    assert len(made) == 3  # of the request that decodes, and of the others


def told(engine):
    where = torch.tensor([0, 1, 6], dtype=torch.int32)
    return vllm_standin.CommonAttentionMetadata(
        where, where, torch.tensor([37, 5], dtype=torch.int32), 2, 6, 5, 37, engine.table[:2], torch.zeros(6).long()
    )


# -- selection -------------------------------------------------------------------------------------------------------


def seen_by_quest(q, k, count, visible, always=None):
    """Quest's definition: the tokens that a query [heads, dim] sees of keys [tokens, kv_heads, dim], by the largest
    product that the entries of a page allow. `visible` and `always` [tokens] are of the query."""
    pages = range(0, len(k), PAGE)
    bounds = torch.zeros(1, HEADS, 1, len(pages), dtype=torch.float64)
    for h in range(HEADS):
        for i, first in enumerate(pages):
            page = q[h] * k[first : first + PAGE, h * k.shape[1] // HEADS].double()
            bounds[0, h, 0, i] = page.amax(0).sum() * DIM**-0.5
    of_pages = lambda x: torch.tensor([bool(x[i : i + PAGE].any()) for i in pages]).numpy()  # noqa: E731
    forced = of_pages(visible if always is None else visible & always) & (always is not None)
    table = chosen(bounds.numpy(), of_pages(visible), forced, keep(count), k.shape[1])[0]
    return torch.from_numpy(table).repeat_interleave(PAGE, 2)[..., : len(k)] & visible


def compare_selected(engine, found, select, visible, always=None, change=lambda s, d: s, sinks=None, tolerance=2e-6):
    """Steps of one token read the chosen blocks, other requests all that they see."""
    hidden = 0
    for r, (last, out) in found.items():
        tokens = torch.arange(engine.keys[r].shape[1])
        seen = visible(len(tokens) - 1 - tokens, tokens)
        forced = None if always is None else always(len(tokens) - 1 - tokens, tokens)
        table = seen_by_quest(last[0].double(), engine.keys[r][0], select, seen, forced)
        hidden += int((seen & ~table).sum())
        rows = (lambda d, k, t=table: t) if len(last) == 1 else visible
        compare(engine, {r: (last, out)}, rows, change, sinks, tolerance)
    return hidden


def near_or_first(distance, k):
    return (distance < 9) | (k < 4)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("always", [None, near_or_first])
def test_vllm_steps_read_the_blocks_of_quest(vllm, config, name, always):
    """With prompts in the batch, in reused blocks, behind shared prefixes, and computed again after preemption."""
    layer, visible, more = LAYERS[name]
    config.additional_config = {"frisket_select": {"keep": 3, "always": always and "window(9) | sinks(4)"}}
    engine, hidden = Engine(vllm, 4, **layer), 0
    steps = [dict.fromkeys(range(4), 1)] * 3

    def serve(story):
        for i, new in enumerate(story):
            found = engine.step(new, padding=3 * (i % 2))
            for r in (r for r, n in new.items() if n > 1):
                compare(engine, {r: found.pop(r)}, visible, **more)
            nonlocal hidden
            hidden += compare_selected(engine, found, 3, visible, always, **more)

    serve(STORY + steps)
    for r in (0, 2):
        engine.give_back(r)
    engine.share(0, 1, 2)
    serve([{2: 90, 1: 1}, {0: 1, 1: 1, 3: 1}, {0: 40}, *steps])
    assert bool(hidden) == (name not in ("window", "sinks"))  # whose windows of 20 tokens are in 3 blocks


def test_vllm_selection_follows_masks_and_halves(vllm, config):
    """A mask with holes, a score mod of heads, scales, keys in bfloat16."""

    def holes(distance, k):
        return (distance >= 0) & (k // 16 % 3 != 1)

    rate = torch.tensor([0.0, 0.25, 0.5, 0.75])
    config.additional_config = {
        "frisket_mask": "causal & k // n % 3 != 1", "frisket_score": "score - rate[h] * (q - k)",
        "frisket_params": {"n": 16, "rate": rate.tolist()}, "frisket_select": {"keep": 2},
    }  # fmt: skip
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        engine, hidden = Engine(vllm, 2, dtype=dtype), 0
        engine.step({0: 100, 1: 83})
        for _ in range(4):
            change = {"change": lambda s, d: s - rate[:, None, None] * d, "tolerance": tolerance}
            hidden += compare_selected(engine, engine.step({0: 1, 1: 1}), 2, holes, **change)
        assert hidden


def test_selection_of_all_blocks_changes_nothing(vllm, config):
    """With as many blocks as the longest request has nothing is chosen; with 3, the other steps have no more."""
    outs = {}
    for count in (None, 3, 4, 99):
        config.additional_config = {"frisket_select": count and {"keep": count}}
        engine = Engine(vllm, 3)
        outs[count] = torch.cat([out for new in STORY[:2] for _, out in engine.step(new).values()])
    assert torch.equal(outs[4], outs[None])
    assert torch.equal(outs[99], outs[None])
    torch.testing.assert_close(outs[3], outs[None], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("layout", ["heads", "tokens", "padded", "layers"])
def test_vllm_selection_reads_pools_of_any_strides(layout):
    pool, blocks = stored(layout, 8), torch.tensor([[2, 0, 1]])
    served = vllm_pages.ServedLayer(select={"keep": 2})
    keys = torch.cat([pool[i, ..., :DIM].transpose(0, 1) for i in (2, 0, 1)])
    values = torch.cat([pool[i, ..., DIM:].transpose(0, 1) for i in (2, 0, 1)])
    served.add_bounds(pool, keys[:45], torch.cat([torch.arange(16) + 16 * i for i in (2, 0, 1)])[:45])
    batch = vllm_pages.PagedBatch.of(1, torch.tensor([0, 1]), torch.tensor([45]), blocks, torch.zeros(1), tokens=1)
    q = torch.randn(1, HEADS, DIM)
    table = seen_by_quest(q[0].double(), keys[:45], 2, torch.ones(45, dtype=torch.bool))
    assert not table.all()
    k, v = (x[:45].double().transpose(0, 1)[None] for x in (keys, values))
    want, *_ = dense(q.double()[:, :, None], k, v, table, lambda s: s, None)
    torch.testing.assert_close(served.attend(q, pool, batch).double(), want[:, :, 0], rtol=2e-6, atol=2e-6)


def test_bounds_of_blocks_are_those_of_written_tokens():
    """Padding is skipped, the first slot of a block begins it anew, other slots widen it."""
    served, pool = vllm_pages.ServedLayer(select={"keep": 1}), torch.zeros(3, KEY_HEADS, PAGE, 2 * DIM)
    held = {}
    for slots in ([0, 1, -1, 40, 32], [2, -1, -1], [-1], [], [32, 33, 16], [17]):
        k = torch.randn(len(slots), KEY_HEADS, DIM)
        for slot in slots:
            if slot % PAGE == 0:
                held = {n: x for n, x in held.items() if n // PAGE != slot // PAGE}
        held |= {slot: key for slot, key in zip(slots, k, strict=True) if slot >= 0}
        served.add_bounds(pool, k, torch.tensor(slots, dtype=torch.int64))
        for block in {n // PAGE for n in held}:
            keys = torch.stack([x for n, x in held.items() if n // PAGE == block])
            assert torch.equal(served.bounds[:, block], torch.stack([keys.amin(0), keys.amax(0)]))


REFUSED = {
    "no keep": ({"always": "sinks(4)"}, {}, r'frisket_select is \{.*\}; it is \{"keep": 8\}, or'),
    "a number": (8, {}, r'frisket_select is 8; it is \{"keep": 8\}'),
    "misspelt": ({"keep": 8, "allways": "k < 4"}, {}, r'frisket_select is .*allways.*; it is \{"keep": 8\}, or'),
    "share": ({"keep": 0.1}, {}, r"keep of frisket_select is 0\.1; it is a number of blocks, 1 or more"),
    "truth": ({"keep": True}, {}, "keep of frisket_select is True; it is a number of blocks"),
    "none": ({"keep": 0}, {}, "keep of frisket_select is 0; it is a number of blocks"),
    "no value": ({"keep": 8, "always": "window(w)"}, {}, "`w` in always of frisket_select has no value: write"),
    "heads": ({"keep": 8, "always": "k < h"}, {}, "always of frisket_select reads h; heads that share a key head"),
    "lengths": ({"keep": 8, "always": "k > KV_LEN - 9"}, {}, "always of frisket_select: the mask reads KV_LEN"),
    "no room": (
        {"keep": 4, "always": "sinks(4) | window(64)"}, {},
        r"keep of frisket_select is 4, and `.*` is up to 6 blocks of 16 tokens\n  keep 6 or more",
    ),
    "weight": ({"keep": 8}, {"frisket_weight": "exp(score)"}, "softmax, which frisket_weight replaces\n  leave one of"),
    "drafts": ({"keep": 8}, {"speculative_config": object()}, "frisket_select does not go with speculative decoding"),
    "connector": ({"keep": 8}, {"kv_transfer_config": object()}, "frisket_select does not go with a KV connector"),
    "mamba": ({"keep": 8}, {"is_hybrid": True}, "frisket_select does not go with Mamba layers"),
    "shared keys": ({"keep": 8}, {"kv_sharing_target_layer_name": "x"}, "does not go with keys that layers share"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_vllm_refuses_selections_without_meaning(vllm, config, name):
    select, more, why = REFUSED[name]
    config.additional_config = {"frisket_select": select}
    config.additional_config |= {n: x for n, x in more.items() if n.startswith("frisket_")}
    vars(config).update({n: x for n, x in more.items() if n.endswith("_config")})
    config.model_config.is_hybrid = "is_hybrid" in more
    with pytest.raises(ParameterError, match=why):
        Engine(vllm, 1, **{n: x for n, x in more.items() if n.startswith("kv_sharing")})


def test_vllm_selection_is_never_dropped_silently(vllm, config):
    config.additional_config, config.attention_config.backend = {"frisket_select": {"keep": 8}}, None
    with pytest.raises(ParameterError, match=r"frisket_select is set, and vLLM would serve this model without frisket"):
        vllm.check_served(config)


# -- writing ----------------------------------------------------------------------------------------------------------


def stored(layout, value_dim=DIM):
    """A pool of three blocks as vLLM views it: `heads` is contiguous, `tokens` has the tokens of a block outside of its
    heads, `padded` ends pages with other bytes, `layers` has the pages of another layer between its own."""
    width = DIM + value_dim
    if layout == "tokens":
        return torch.randn(3, PAGE, KEY_HEADS, width).transpose(1, 2)
    if layout == "padded":
        return torch.randn(3, KEY_HEADS * PAGE * width + 8)[:, :-8].view(3, KEY_HEADS, PAGE, width)
    return (
        torch.randn(3, 2, KEY_HEADS, PAGE, width)[:, 1]
        if layout == "layers"
        else torch.randn(3, KEY_HEADS, PAGE, width)
    )


LAYOUTS = ["heads", "tokens", "padded", "layers"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", [[40, 3, 17], [-1, 40, -1, 3], [-1, -1], []], ids=str)
def test_new_keys_are_written_to_their_slots_alone(layout, slots):
    pool = stored(layout)
    want = pool.clone()
    k, v = torch.randn(2, len(slots), KEY_HEADS, DIM)
    for i, slot in enumerate(slots):
        if slot >= 0:
            want[slot // PAGE, :, slot % PAGE] = torch.cat([k[i], v[i]], -1)
    vllm_pages.write(pool, k, v, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(pool, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value_dim", [DIM, 8])
def test_pools_of_any_strides_and_value_sizes_are_read(layout, value_dim):
    pool, blocks = stored(layout, value_dim), torch.tensor([[2, 0], [1, 0]])
    starts, lengths = torch.tensor([0, 1, 6]), torch.tensor([20, 5])
    batch = vllm_pages.PagedBatch.of(1, starts, lengths, blocks, torch.zeros(6), tokens=6)
    q = torch.randn(6, HEADS, DIM)
    out = vllm_pages.ServedLayer().attend(q, pool, batch)
    assert out.shape == (6, HEADS, value_dim)
    for a, b, n, row in [(0, 1, 20, blocks[0]), (1, 6, 5, blocks[1])]:
        page = torch.cat([pool[i] for i in row], 1)[None, :, :n].double()
        places = torch.arange(n)
        last = q[a:b].double().transpose(0, 1)[None]
        want, *_ = dense(last, page[..., :DIM], page[..., DIM:], places[n - b + a :, None] >= places, lambda s: s, None)
        torch.testing.assert_close(out[a:b].double(), want[0].transpose(0, 1), rtol=2e-6, atol=2e-6)


# -- registering, and what is refused ---------------------------------------------------------------------------------


def test_vllm_backend_registers_only_into_a_free_place(vllm):
    custom, cpu = vllm_standin.AttentionBackendEnum.CUSTOM, vllm_standin.AttentionBackendEnum.CPU_ATTN
    vllm_standin.registered.clear()
    vllm.register()
    path = vllm_standin.registered[custom]
    module, _, name = path.rpartition(".")
    assert (module, getattr(vllm, name)) == (vllm.__name__, vllm.VllmBackend)
    assert vllm.VllmBackend.get_name() == custom.name
    assert vllm_standin.registered[cpu] == f"{module}.CpuBackend"
    vllm_standin.registered.clear()
    vllm_standin.registered[custom] = "another.plugin"
    vllm.register()
    assert vllm_standin.registered == {custom: "another.plugin"}


def test_vllm_on_cpus_takes_frisket_where_custom_is_chosen(vllm, config):
    assert vllm.CpuBackend is vllm.VllmBackend
    config.attention_config.backend = None
    assert vllm.CpuBackend == "vLLM's own"
    with pytest.raises(AttributeError, match="no attribute 'GpuBackend'"):
        vllm.GpuBackend  # noqa: B018


def test_vllm_is_told_what_the_backend_can_do(vllm):
    backend = vllm.VllmBackend
    assert backend.get_supported_kernel_block_sizes(kv_cache_spec=None) == [vllm_standin.MultipleOf(16)]
    assert backend.supports_sink()
    assert backend.supports_sliding_window()
    assert not backend.supports_device_cpu_query_lens_mismatch()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"attention_config.backend": None},
            r"frisket_mask is set, .*\n  add --attention-backend CUSTOM, for all kinds",
        ),
        (
            {"attention_config.backend_per_kind": {"sliding_window": None}},
            r"add --attention-backend CUSTOM, for all kin",
        ),
        ({"model_config.use_mla": True}, r"take a model without MLA, whose attention vLLM keeps, or leave frisket_m"),
        ({"another": "a.plugin"}, r"leave out the plug-in whose CUSTOM is a\.plugin, or"),
        ({"model_config.hf_config": SimpleNamespace(frisket_maks="causal")}, r"config\.frisket_maks is not read"),
    ],
)
def test_vllm_never_drops_a_mask_silently(vllm, config, changes, why):
    """Masks that vLLM would not compute with are refused when its config is made, on every platform."""
    registered = vllm_standin.registered
    registered.clear()
    registered.update({vllm.CUSTOM: changes.pop("another", None)} if "another" in changes else {})
    vllm.register()
    vllm.register()
    update = vllm_standin.platform.check_and_update_config
    vllm_standin.platform.updated.clear()
    config.additional_config = {"frisket_mask": "causal & window(9)"}
    if registered[vllm.CUSTOM] == vllm.PATH:
        update(config)
        assert vllm_standin.platform.updated == [config]  # wrapped once
    for path, value in changes.items():
        part, name = path.split(".")
        setattr(getattr(config, part), name, value)
    with pytest.raises(ParameterError, match=why):
        update(config)
    config.model_config.runner_type = "draft"
    update(config)
    config.model_config.runner_type = "generate"
    if "maks" not in why:
        config.additional_config = {}
        update(config)


def test_vllm_refuses_masks_on_devices_without_custom(vllm, config, monkeypatch):
    """vLLM ignores CUSTOM on Intel's GPUs."""
    vllm_standin.registered.clear()
    vllm.register()
    monkeypatch.setattr(vllm_standin.platform, "device_name", "xpu", raising=False)
    vllm.check_served(config)
    config.additional_config = {"frisket_score": "softcap(5.0)"}
    with pytest.raises(
        ParameterError, match=r"frisket_score is set, .*\n  take a GPU or a CPU, .* CUSTOM on xpu, or leave"
    ):
        vllm.check_served(config)


def test_vllm_builders_of_other_positions_refuse_own_masks(vllm, config):
    chunked = type("ChunkedBuilder", (vllm.VllmBatchBuilder,), {})
    chunked(SimpleNamespace(block_size=PAGE), ["layer.0"], config, "cpu")
    config.additional_config = {"frisket_mask": "causal & window(9)"}
    with pytest.raises(ParameterError, match=r"layer\.0 counts positions from another token .* \(ChunkedBuilder\)"):
        chunked(SimpleNamespace(block_size=PAGE), ["layer.0"], config, "cpu")


def test_missing_vllm_is_named_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in ("frisket.integrations.vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingPackageError, match="vllm is not installed: pip install vllm"):
        import frisket.integrations.vllm  # noqa: F401


@pytest.mark.parametrize(
    ("layer", "mask", "why"),
    [
        ({}, "window(9)", r"has to be causal: a prompt that is read in chunks"),
        ({}, "causal & k < KV_LEN - 1", r"the mask reads KV_LEN, which changes from step to step"),
        ({"sliding_window": 20}, "causal", r"looks behind the sliding window of this layer: a ring of 20 tokens"),
        ({}, "causal & k < n", r"`n` of the frisket_ fields has no value"),
        (
            {"attn_type": "encoder"},
            None,
            r"does not know attention of type encoder\n  choose another --attention-backe",
        ),
        ({"use_alibi_sqrt": True}, None, r"does not know use_alibi_sqrt=True"),
        ({"kv_cache_dtype": "bfloat16"}, None, r"a KV cache of bfloat16 for a model of float32: give --kv-cache-dtype"),
        ({"kv_cache_dtype": "fp8"}, None, r"a KV cache of fp8 for a model of float32: give --kv-cache-dtype auto"),
    ],
)
def test_vllm_backend_refuses_bad_layers_and_masks(vllm, config, layer, mask, why):
    config.additional_config = {"frisket_mask": mask}
    with pytest.raises(ParameterError, match=why):
        Engine(vllm, 1, **layer)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("is_mm_prefix_lm", True, "does not know images whose tokens see each other"),
        ("rswa_window", 64, "does not know R-SWA"),
    ],
)
def test_vllm_backend_refuses_models_of_other_masks(vllm, config, field, value, why):
    setattr(config.model_config, field, value)
    with pytest.raises(ParameterError, match=why):
        Engine(vllm, 1)


def test_vllm_config_names_a_misspelt_field(vllm, config):
    config.additional_config = {"frisket_masks": "causal"}
    with pytest.raises(ParameterError, match=r"--additional-config: frisket_masks is not read; did you mean `frisket"):
        Engine(vllm, 1)
    config.additional_config, config.model_config.hf_text_config.frisket_scores = {}, "softcap(5)"
    with pytest.raises(ParameterError, match=r"config\.frisket_scores is not read; did you mean `frisket_score`"):
        Engine(vllm, 1)


def test_vllm_backend_refuses_bad_steps(vllm):
    engine = Engine(vllm, 2)
    with pytest.raises(ParameterError, match="not causal"):
        engine.builder.build(0, replace(told(engine), causal=False))
    with pytest.raises(ParameterError, match=r"blocks of 24 tokens\n  give --block-size a multiple of 16"):
        vllm.VllmBatchBuilder(SimpleNamespace(block_size=24), ["layer.0"], vllm_standin.config, "cpu")
    with pytest.raises(ShapeError, match=r"lower vLLM's max_num_seqs or max_model_len"):
        vllm_pages._row(torch.zeros(9), torch.zeros(8), torch.zeros(8, 1 << 21), 0, 1, 16)
    q = torch.zeros(1, HEADS, DIM)
    with pytest.raises(ParameterError, match="output of 8 bits"):
        engine.layer.forward(None, q, q, q, engine.pool, None, q, output_scale=torch.ones(1))
    assert engine.layer.forward(None, q, q, q, engine.pool, None, torch.ones(1, HEADS, DIM)).sum() == 0
