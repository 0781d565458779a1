"""Captured tensors that are replaced after the attention was made: every call reads them by their path again."""

import copy
import functools
import pickle
import types
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.func import functional_call  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.caches.torch import KVCache  # noqa: E402
from frisket.dsl.errors import ParameterError  # noqa: E402

Parameter = torch.nn.Parameter
S = 8
SCORE = "score + bias[h, q - k]"
X = torch.randn(1, 2, S, 4, generator=torch.Generator().manual_seed(0))


def drawn(seed=1):
    return Parameter(torch.randn(2, S, generator=torch.Generator().manual_seed(seed)))


class Layer(torch.nn.Module):
    """A learned bias by distance, and a document mask of a buffer, of `make`: compile, or a mask and a score mod."""

    def __init__(self, **options):
        super().__init__()
        self.bias = Parameter(torch.zeros(2, S))
        self.register_buffer("doc", torch.arange(S) // 4)
        self.att = fk.compile(self.seen, lambda score, b, h, q, k: score + self.bias[h, q - k], **options)

    def seen(self, b, h, q, k):
        return (q >= k) & (self.doc[q] == self.doc[k])

    def forward(self, x, **options):
        return self.att(x, x, x, **options)


def dense(layer, x=X, bias=None):
    bias = layer.bias.detach() if bias is None else bias
    return fk.attention(x, x, x, "causal & same(doc)", SCORE, backend="aten", doc=layer.doc, bias=bias)


def close(x, y):
    return torch.allclose(x, y, atol=1e-5)


def replaced_by_name(layer):
    layer.bias = drawn()


def replaced_by_a_state(layer):
    layer.load_state_dict({"bias": drawn().detach(), "doc": torch.arange(S) // 2}, assign=True)


def materialised(layer):
    state = {**layer.state_dict(), "bias": drawn().detach()}
    layer.to("meta").to_empty(device="cpu").load_state_dict(state)


def buffer_replaced(layer):
    layer.doc = torch.arange(S) // 3


CHANGES = [replaced_by_name, replaced_by_a_state, materialised, buffer_replaced]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reorder", [None, "auto"])
def test_replaced_tensors_are_read_by_the_next_call(change, reorder):
    layer = Layer(backend="aten", reorder=reorder)
    before = layer(X)
    change(layer)
    for _ in range(2):
        out = layer(X)
        assert close(out, dense(layer))
        assert not close(out, before)
    out.square().sum().backward()
    again = layer.bias.detach().requires_grad_()
    dense(layer, bias=again).square().sum().backward()
    assert close(layer.bias.grad, again.grad)
    assert again.grad.any()


@pytest.mark.exhaustive
def test_replaced_tensors_reach_native_kernels_and_check():
    layer = Layer(backend="cpp")
    layer(X), layer(X)
    for change in (replaced_by_name, buffer_replaced):
        change(layer)
        assert all(close(layer(X), dense(layer)) for _ in range(3))
    assert layer.att.check(X, X, X).good
    layer.double()
    assert close(layer(X.double()), dense(layer, X.double()))


def test_attention_reads_replaced_tensors_of_masks_and_scores():
    layer = Layer(backend="aten")
    mask, score = fk.mask(layer.seen), fk.score(lambda score, h, q, k: score + layer.bias[h, q - k])
    for change in (lambda layer: None, replaced_by_name, replaced_by_a_state):
        change(layer)
        assert close(fk.attention(X, X, X, mask, score, backend="aten"), dense(layer))
    other = Layer(backend="aten")  # functions of equal expressions and tensors, and other paths
    other.bias, other.doc = layer.bias, layer.doc
    theirs = fk.score(lambda score, h, q, k: score + other.bias[h, q - k])
    assert close(fk.attention(X, X, X, mask, theirs, backend="aten"), dense(layer))
    layer.bias = drawn(5)
    assert close(fk.attention(X, X, X, mask, theirs, backend="aten"), dense(other))


def test_functional_call_reaches_an_attention_and_its_gradient():
    layer, bias = Layer(backend="aten"), drawn()
    assert close(functional_call(layer, {"bias": bias}, (X,)), dense(layer, bias=bias))
    by_func = torch.func.grad(lambda b: functional_call(layer, {"bias": b}, (X,)).square().sum())(bias.detach())
    dense(layer, bias=bias).square().sum().backward()
    assert close(by_func, bias.grad)
    assert not layer.bias.any()


def learned_in_place(layer):
    layer.table.requires_grad_()


def learned_by_another(layer):
    layer.table = Parameter(layer.table.clone())


@pytest.mark.parametrize("called", ["eager", "graph"])
@pytest.mark.parametrize("change", [learned_in_place, learned_by_another])
def test_captured_tensors_that_learn_later_get_gradients(change, called):
    """Attention went on with its copy, which has no gradient and the values of its time."""
    torch._dynamo.reset()
    layer = torch.nn.Module()
    layer.table = torch.randn(2, S)
    att = fk.compile("causal", lambda score, b, h, q, k: score + layer.table[h, q - k], backend="aten")
    graph = torch.compile(lambda x: att(x, x, x), backend="eager", fullgraph=True)
    # by default torch 2.11 takes a module's tensors for unchanged while its dicts are
    guarded = torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False)
    run, arrays = (att, (X, X, X)) if called == "eager" else (guarded(graph), (X,))
    run(*arrays)
    change(layer)
    for _ in range(2):
        bias = layer.table.detach().clone().requires_grad_()
        out, want = run(*arrays), fk.attention(X, X, X, "causal", SCORE, backend="aten", bias=bias)
        assert close(out, want)
        assert close(*(torch.autograd.grad(o.square().sum(), x)[0] for o, x in ((out, layer.table), (want, bias))))
        with torch.no_grad():
            layer.table.mul_(2)


def test_graphs_read_replaced_tensors():
    torch._dynamo.reset()
    layer = Layer(backend="aten")
    graph = torch.compile(layer, backend="eager", fullgraph=True)
    by_call = torch.compile(lambda p: functional_call(layer, p, (X,)), backend="eager", fullgraph=True)
    for change in (lambda layer: None, replaced_by_name, buffer_replaced, replaced_by_a_state):
        change(layer)
        assert close(graph(X), dense(layer))
    graph(X).square().sum().backward()
    assert layer.bias.grad.any()
    assert close(by_call({"bias": drawn(7)}), dense(layer, bias=drawn(7)))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_layers_have_the_parameter_of_the_layer(strict):
    layer = Layer(backend="aten")
    replaced_by_a_state(layer)
    program = torch.export.export(layer, (X,), strict=strict)
    assert {"bias", "doc"} <= set(program.state_dict)
    assert close(program.module()(X), dense(layer))


def test_copies_of_a_layer_read_their_own_tensors():
    layer = Layer(backend="aten")
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        copied.bias = drawn()
        assert close(copied(X), dense(copied))
        assert close(layer(X), dense(layer))
    twin = copy.deepcopy(layer)
    buffer_replaced(twin)
    assert close(twin(X), dense(twin))
    alone = [copy.deepcopy(layer.att), pickle.loads(pickle.dumps(layer.att))]
    expected = dense(layer)
    replaced_by_name(layer)
    assert all(close(att(X, X, X), expected) for att in alone)


def test_a_plan_of_a_replaced_tensor_is_refused():
    layer = Layer(backend="aten")
    for change, name in ((replaced_by_name, "self.bias"), (buffer_replaced, "self.doc")):
        plan = layer.att.plan(S, S, 1, 2)
        assert close(layer(X, plan=plan), dense(layer))
        change(layer)
        with pytest.raises(ParameterError, match=f"the plan holds `{name}`, which has been replaced since"):
            layer(X, plan=plan)
    plan = layer.att.plan(S, S, 1, 2, bias=drawn(9))
    layer.bias = drawn(3)
    assert close(layer(X, plan=plan), dense(layer, bias=drawn(9)))


def test_a_plan_of_a_tensor_that_learns_later_is_refused():
    bias, doc = drawn().detach()[0].clone(), torch.zeros(S, dtype=torch.int64)
    att = fk.compile(lambda q, k: doc[q] == doc[k], score=lambda score, b, h, q, k: score + bias[k], backend="aten")
    plan = att.plan(S, S, 1, 2)
    expected = att(X, X, X, plan=plan)
    bias.requires_grad_()
    with pytest.raises(ParameterError, match="the plan holds `bias`, which requires a gradient since"):
        att(X, X, X, plan=plan)
    out = att(X, X, X, plan=att.plan(S, S, 1, 2))
    assert close(out, expected)
    out.square().sum().backward()
    assert bias.grad.abs().max() > 0


def test_sharded_layers_train_their_captured_parameter(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        layer = Layer(backend="aten")
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(layer.parameters(), 1.0)
        before = layer(X)
        before.square().sum().backward()
        assert layer.bias.grad.full_tensor().any()
        optimizer.step()
        after = layer(X)
        assert not close(after, before)
        layer.reshard()
        assert close(after, dense(Layer(backend="aten"), bias=layer.bias.full_tensor().detach()))
    finally:
        torch.distributed.destroy_process_group()


def test_caches_and_moved_attentions_read_replaced_tensors():
    layer = Layer(backend="aten")
    at = layer.att.at(q="q + 0")
    for change in (lambda layer: None, replaced_by_name, buffer_replaced):
        change(layer)
        assert close(at(X, X, X), dense(layer))
        cache = KVCache.create(1, S, 2, 4)
        assert close(cache.attention(layer.att, X, X, X), dense(layer))


# -- paths ------------------------------------------------------------------------------------------


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = drawn()
        self.table = torch.nn.Embedding(2, S, _weight=drawn())
        self.lists = torch.nn.ModuleList([torch.nn.ParameterList([drawn()])])
        self.entries = {"bias": drawn()}

    @property
    def chosen(self):
        return self.bias

    def read(self, h, distance):
        return self.bias[h, distance]

    def modified(self, score, b, h, q, k):
        return score + self.read(h, q - k)

    def forward(self, score, b, h, q, k):
        return score + self.chosen[h, q - k]


class Slots:
    __slots__ = ("bias",)


class Class:
    bias = drawn()


GLOBAL = types.SimpleNamespace(bias=drawn())


def paths():
    """(score mod, how to replace its table) of every way that code may take to a tensor."""
    holder, slots = Holder(), Slots()
    slots.bias = drawn()
    local = drawn()

    def set_local(x):
        nonlocal local
        local = x

    def set_bias(x):
        holder.bias = x

    yield lambda score, h, q, k: score + holder.bias[h, q - k], set_bias
    yield holder.modified, set_bias
    yield holder, set_bias
    yield lambda score, h, q, k: score + holder.chosen[h, q - k], set_bias
    yield lambda score, h, q, k: score + getattr(holder, "bi" + "as")[h, q - k], set_bias
    yield functools.partial(lambda own, score, b, h, q, k: score + own.bias[h, q - k], holder), set_bias
    yield lambda score, h, q, k, own=holder: score + own.bias[h, q - k], set_bias
    yield lambda score, h, q, k: score + (1.0 * holder.bias).t()[q - k, h], set_bias
    yield lambda score, h, q, k: score + holder.table(h)[q - k], lambda x: setattr(holder.table, "weight", x)
    yield lambda score, h, q, k: score + holder.lists[0][0][h, q - k], lambda x: holder.lists[0].__setitem__(0, x)
    yield lambda score, h, q, k: score + holder.entries["bias"][h, q - k], lambda x: holder.entries.update(bias=x)
    yield lambda score, h, q, k: score + local[h, q - k], set_local
    yield lambda score, h, q, k: score + slots.bias[h, q - k], lambda x: setattr(slots, "bias", x)
    yield lambda score, h, q, k: score + Class.bias[h, q - k], lambda x: setattr(Class, "bias", x)
    yield lambda score, h, q, k: score + GLOBAL.bias[h, q - k], lambda x: setattr(GLOBAL, "bias", x)


@pytest.mark.parametrize("number", range(15))
def test_a_path_by_which_code_reads_is_found(number):
    mod, replace = list(paths())[number]
    att = fk.compile("causal", mod, backend="aten")
    for seed in (1, 2, 3):
        if seed > 1:
            replace(drawn(seed))
        assert close(att(X, X, X), fk.attention(X, X, X, "causal", SCORE, backend="aten", bias=drawn(seed)))
    att(X, X, X)


def test_two_modules_of_equal_values_learn_apart():
    one, other = Holder(), Holder()
    first = fk.score(lambda score, h, q, k: score + one.bias[h, q - k])
    att = fk.compile("causal", first.then(lambda score, h, q, k: score + other.bias[h, q - k]), backend="aten")
    att(X, X, X).square().sum().backward()
    assert one.bias.grad.any()
    assert close(one.bias.grad, other.bias.grad)
    other.bias = drawn(4)
    both = one.bias + other.bias
    assert close(att(X, X, X), fk.attention(X, X, X, "causal", SCORE, backend="aten", bias=both))


def test_tied_tensors_of_which_one_is_replaced_are_refused():
    holder = Holder()
    holder.tied = holder.bias
    mod = fk.score(lambda score, h, q, k: score + holder.bias[h, q - k] + holder.tied[h, 0])
    att = fk.compile("causal", mod, backend="aten")
    holder.bias = drawn(2)
    with pytest.raises(ParameterError, match=r"`holder.bias` and `holder.tied` were one array, .*, and are two now"):
        att(X, X, X)


def test_learned_tensors_out_of_reach_are_refused():
    bias = drawn()
    out_of_reach = weakref.ref(bias)
    with pytest.raises(ParameterError, match="is learned, and frisket cannot tell where its function reads it"):
        fk.compile("causal", lambda score, h, q, k: score + out_of_reach()[h, q - k])
    out = fk.attention(X, X, X, "causal", lambda score, h, q, k: score + out_of_reach()[h, q - k], backend="aten")
    assert close(out, fk.attention(X, X, X, "causal", SCORE, backend="aten", bias=bias))


def test_replaced_values_inside_an_expression_are_refused():
    holder = Holder()
    holder.register_buffer("lens", torch.tensor([3, 5]))
    att = fk.compile(lambda b, h, q, k: (q >= k) & (q - k < holder.lens.max()), backend="aten")
    before = att(X, X, X)
    holder.lens = holder.lens.clone()
    assert torch.equal(att(X, X, X), before), "another tensor of equal values, as `module.to(device)` makes"
    holder.lens = torch.tensor([1, 2])
    with pytest.raises(ParameterError, match=r"`holder\.lens` has been replaced since its function was traced"):
        att(X, X, X)
