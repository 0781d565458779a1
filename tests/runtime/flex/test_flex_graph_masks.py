"""Masks made, cut and looked at inside compiled functions: what eager mode gives, whatever the data."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.attention.flex_attention as theirs  # noqa: E402

import frisket as fk  # noqa: E402
import frisket.flex as ours  # noqa: E402
from frisket.runtime.flex.tensor_mask import LISTS  # noqa: E402

S, BLOCK = 60, 16
NAMES = list(LISTS)


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "aten")


def data(seed):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 2, S, 8, generator=g)
    doc = torch.randint(0, 4, (S,), generator=g).sort()[0]
    return q, doc, torch.randint(0, 4, (1,), generator=g)


def causal(b, h, q, k):
    return q >= k


def documents(doc):
    return lambda b, h, q, k: (q >= k) & (doc[q] == doc[k])


def made(doc, mod=None, **more):
    return ours.create_block_mask(documents(doc) if mod is None else mod, None, 2, S, S, "cpu", BLOCK, **more)


def lists(mask):
    return [getattr(mask, n) for n in NAMES if getattr(mask, n) is not None]


def listed(mask, **more):
    """A mask made again from its lists."""
    given = [getattr(mask, n) for n in NAMES[:4]]
    return ours.BlockMask.from_kv_blocks(*given, BLOCK, mask.mask_mod, (S, S), **more)


def attend(q, mask, k=None):
    k = q if k is None else k
    return ours.flex_attention(q, k, k, block_mask=mask)


def renewed(mask, mod, lengths=None):
    mask.mask_mod = mod
    if lengths is not None:
        mask.seq_lengths = lengths
    return mask


def shorter(mask, lengths):
    mask.seq_lengths = lengths
    return mask


def replaced(mask):
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)
    return mask


CASES = {  # name: what a compiled function does with q, doc, at, and a mask from outside
    "create": lambda q, doc, at, mask: attend(q, made(doc)),
    "create by text": lambda q, doc, at, mask: attend(q, made(doc, "q >= k & (h == 0 | q % 3 != 1)")),
    "its lists": lambda q, doc, at, mask: lists(made(doc)),
    "lists of a text": lambda q, doc, at, mask: lists(made(doc, "causal & window(9)")),
    "lists together": lambda q, doc, at, mask: lists(made(doc, separate_full_blocks=False)),
    "order": lambda q, doc, at, mask: made(doc, compute_dq_write_order=True).dq_write_order,
    "create_mask": lambda q, doc, at, mask: ours.create_mask(documents(doc), 1, 2, S, S, "cpu"),
    "and": lambda q, doc, at, mask: attend(q, made(doc, ours.and_masks(causal, lambda b, h, q, k: doc[q] > doc[k]))),
    "or": lambda q, doc, at, mask: attend(q, made(doc, ours.or_masks(documents(doc), lambda b, h, q, k: k < 3))),
    "noop": lambda q, doc, at, mask: attend(q, made(doc, ours.noop_mask)),
    "from_kv_blocks": lambda q, doc, at, mask: attend(q, listed(made(doc))),
    "from lists outside": lambda q, doc, at, mask: [*lists(listed(mask)), attend(q, listed(mask))],
    "rows of queries alone": lambda q, doc, at, mask: lists(listed(mask, compute_q_blocks=False)),
    "constructor": lambda q, doc, at, mask: attend(
        q, ours.BlockMask((S, S), *(getattr(mask, n) for n in NAMES), BLOCK, mask.mask_mod)),
    "row": lambda q, doc, at, mask: attend(q[:, :, 16:32], mask[:, :, 1], q),
    "row of a new mask": lambda q, doc, at, mask: attend(q[:, :, 16:48], made(doc)[:, :, 1:3], q),
    "last row": lambda q, doc, at, mask: attend(q[:, :, 48:], mask[:, :, -1], q),
    "row by a tensor": lambda q, doc, at, mask: attend(
        q[:, :, :1], renewed(mask[:, :, at], lambda b, h, i, k: i + 16 * at[0] >= k, (1, S)), q),
    "rows by a tensor": lambda q, doc, at, mask: attend(q[:, :, :32], mask[:, :, torch.tensor([2, 0])], q),
    "row by a scalar": lambda q, doc, at, mask: lists(mask[:, :, at[0]]),
    "head": lambda q, doc, at, mask: attend(q, mask[:, 1]),
    "heads turned": lambda q, doc, at, mask: attend(q, mask[:, [1, 0]]),
    "ellipsis": lambda q, doc, at, mask: attend(q[:, :, :32], mask[..., :2], q),
    "adjust": lambda q, doc, at, mask: attend(q[:, :, :40], mask._adjust(40, 30), q[:, :, :30]),
    "adjust lists": lambda q, doc, at, mask: attend(q[:, :, :40], listed(mask)._adjust(40, 30), q[:, :, :30]),
    "to": lambda q, doc, at, mask: [*lists(mask.to("cpu")), attend(q, made(doc).to("cpu"))],
    "intersection": lambda q, doc, at, mask: attend(q, mask & made(doc)),
    "union with a function": lambda q, doc, at, mask: attend(q, listed(mask) | (lambda b, h, q, k: k < 4)),
    "union with a text": lambda q, doc, at, mask: attend(q, made(doc) | "k < 4"),
    "inverse": lambda q, doc, at, mask: attend(q, mask.__invert__()),  # Dynamo does not know ~
    "mask_mod": lambda q, doc, at, mask: attend(q, renewed(made(doc), causal)),
    "mask_mod of one outside": lambda q, doc, at, mask: attend(q, made(doc, mask.mask_mod)),
    "seq_lengths": lambda q, doc, at, mask: attend(q[:, :, :32], shorter(made(doc), (32, S)), q),
    "a list replaced": lambda q, doc, at, mask: attend(q, replaced(made(doc))),
    "shapes": lambda q, doc, at, mask: [
        q.new_tensor([*x.shape, *x.BLOCK_SIZE, *x.seq_lengths, x.as_tuple()[0]]) for x in (mask, made(doc))],
    "to_dense": lambda q, doc, at, mask: [mask.to_dense(), made(doc).to_dense()],
    "as_tuple": lambda q, doc, at, mask: [x for x in made(doc).as_tuple(flatten=False) if isinstance(x, torch.Tensor)],
    "lay_out": lambda q, doc, at, mask: attend(q, made(doc).lay_out()),
    "torch's mask": lambda q, doc, at, mask: attend(
        q, theirs.create_block_mask(documents(doc), None, 2, S, S, "cpu", BLOCK)),
}  # fmt: skip


def outside(doc):
    return ours.create_block_mask(
        lambda b, h, q, k: (q >= k) & ((doc[q] == doc[k]) | (h == 1)), None, 2, S, S, "cpu", BLOCK
    )


ALWAYS = {"row by a tensor", "mask_mod", "union with a text"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "fullgraph"),
    [
        pytest.param(n, f, marks=[] if f and n in ALWAYS else pytest.mark.exhaustive)
        for n in CASES
        for f in (True, False)
    ],
)
def test_in_a_compiled_function(name, fullgraph):
    compiled = torch.compile(CASES[name], backend="eager", fullgraph=fullgraph, dynamic=False)
    for seed in range(3):
        q, doc, at = data(seed)
        want = CASES[name](q, doc, at, outside(doc))
        found = compiled(q, doc, at, outside(doc))
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_mask_made_of_lists_in_every_forward(fullgraph):
    """modded-nanogpt's pattern: tiles of documents from the tokens at hand, dynamic=False."""

    def forward(q, doc, windows):
        tiles = torch.arange(4, dtype=torch.int32)
        low, high = doc.view(4, 16).amin(1), doc.view(4, 16).amax(1)
        some = (tiles[:, None] >= tiles) & (low[:, None] <= high) & (high[:, None] >= low)
        whole = (tiles[:, None] > tiles) & (low[:, None] == high) & (high[:, None] == low)

        def ordered(dense):
            count = dense.sum(dim=-1, dtype=torch.int32)
            return count[None, None], dense.argsort(dim=-1, stable=True).flip(-1).to(torch.int32)[None, None]

        (count, index), (full, full_index) = ordered(some & ~whole), ordered(whole)
        block_mask = ours.BlockMask.from_kv_blocks(
            torch.clamp_max(count, torch.clamp_min(windows - full, 1)), index, torch.clamp_max(full, windows - 1),
            full_index, BLOCK_SIZE=16, mask_mod=documents(doc),
        )  # fmt: skip
        return ours.flex_attention(q, q, q, block_mask=block_mask)

    compiled = torch.compile(forward, backend="eager", fullgraph=fullgraph, dynamic=False)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        q, doc = torch.randn(1, 2, 64, 8, generator=g), torch.randint(0, 4, (64,), generator=g).sort()[0]
        windows = torch.tensor(8, dtype=torch.int32)
        want = theirs.flex_attention(
            q, q, q, block_mask=theirs.create_block_mask(documents(doc), None, None, 64, 64, "cpu")
        )
        torch.testing.assert_close(compiled(q, doc, windows), want)


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_prefill_and_decode_of_gpt_fast(fullgraph, dynamic):
    longest = 50  # no multiple of the tile

    def forward(mask, q, k, v, input_pos):
        before, offset = mask.mask_mod, input_pos[0]
        mask.mask_mod = lambda b, h, q, kv: before(b, h, q + offset, kv)
        return ours.flex_attention(q, k, v, block_mask=mask)

    def decode(q, k, v, input_pos, block_mask):
        mask = block_mask[:, :, input_pos // block_mask.BLOCK_SIZE[0]]
        mask.mask_mod = block_mask.mask_mod
        mask.seq_lengths = (1, longest)
        return forward(mask, q, k, v, input_pos)

    def prefill(q, k, v, input_pos):
        return forward(ours.create_block_mask(causal, 1, 1, input_pos.shape[0], longest, q.device), q, k, v, input_pos)

    decode, prefill = (
        torch.compile(f, backend="eager", fullgraph=fullgraph, dynamic=dynamic) for f in (decode, prefill)
    )
    k, v, q = torch.randn(3, 1, 2, longest, 8)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    block_mask = ours.create_block_mask(causal, 1, 1, longest, longest, "cpu", BLOCK)
    for n in (5, 20, 33):
        torch.testing.assert_close(prefill(q[:, :, :n], k, v, torch.arange(n)), whole[:, :, :n])
    for at in (0, 20, 49):
        found = decode(q[:, :, at : at + 1], k, v, torch.tensor([at]), block_mask)
        torch.testing.assert_close(found, whole[:, :, at : at + 1])


def test_a_mask_that_leaves_its_graph():
    compiled = torch.compile(lambda doc: made(doc), backend="eager", fullgraph=True)
    q, doc, _ = data(1)
    found = compiled(doc)
    torch.testing.assert_close(lists(found), lists(made(doc)))
    torch.testing.assert_close(attend(q, found), attend(q, made(doc)))
    assert str(found.mask) == str(made(doc).mask)


@pytest.mark.exhaustive
def test_block_mask_statistics_run_between_graphs():
    _, doc, _ = data(0)
    compiled = torch.compile(lambda doc: made(doc).sparsity() + doc.sum(), backend="eager")
    torch.testing.assert_close(compiled(doc), made(doc).sparsity() + doc.sum())
    torch.compiler.reset()
    with pytest.raises(Exception, match="it runs between two graphs"):
        torch.compile(lambda doc: str(made(doc).layout), backend="eager", fullgraph=True)(doc)


@pytest.mark.exhaustive
def test_jagged_masks_in_a_graph():
    def forward(x):
        return ours.flex_attention(x, x, x, block_mask=ours.create_nested_block_mask(causal, 1, 1, x, BLOCK_SIZE=16))

    compiled = torch.compile(forward, backend="eager", fullgraph=True)
    for lengths in ((3, 9, 20), (7, 0, 30)):
        items = [torch.randn(n, 2, 8) for n in lengths]
        x = torch.nested.nested_tensor(items, layout=torch.jagged).transpose(1, 2)
        torch.testing.assert_close(compiled(x).values(), forward(x).values())


def test_torchs_names_replaced_by_ours(monkeypatch):
    """For libraries that one does not edit: nothing of ours looks a function up where it has been replaced."""
    for name in ours.__all__:
        monkeypatch.setattr(theirs, name, getattr(ours, name), raising=False)
    q, doc, _ = data(0)
    late = lambda b, h, q, k: k > q + 3  # noqa: E731
    for join in (theirs.or_masks, theirs.and_masks):
        mask = theirs.create_block_mask(join(documents(doc), late), None, 2, S, S, "cpu", BLOCK)
        dense = theirs.create_mask(join(documents(doc), late), None, 2, S, S, "cpu")
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=dense).nan_to_num()
        torch.testing.assert_close(theirs.flex_attention(q, q, q, block_mask=mask), want)
        listed(mask).mask.layout(S, S, block=(16, 16)).to_block_mask("cpu")


@pytest.mark.exhaustive
def test_masks_from_outside_of_every_kind():
    """Texts, functions and masks over tables, one after another to one compiled function, of torch too."""
    q, doc, _ = data(0)
    documents = fk.mask("same(doc)", doc=doc.numpy())
    kinds = ("causal", documents, causal, fk.mask("window(3)"), ours.and_masks("causal", documents))
    made = [ours.create_block_mask(x, None, None, S, S, "cpu", BLOCK) for x in kinds]
    part = lambda q, mask: attend(q[:, :, 16:32], mask[:, :, 1], q)  # noqa: E731
    whole = lambda q, mask: theirs.flex_attention(q, q, q, block_mask=mask)  # noqa: E731
    for run in (part, whole):
        compiled = torch.compile(run, backend="eager", fullgraph=True)
        for mask in made if run is part else made[:2]:
            want = part(q, mask) if run is part else attend(q, mask)
            torch.testing.assert_close(compiled(q, mask), want)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_with_a_mask_made_inside(strict):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("doc", torch.arange(S) // 7)

        def forward(self, q, limit):
            shown = lambda b, h, x, y: (self.doc[x] == self.doc[y]) & (y <= limit[x])  # noqa: E731
            return attend(q, ours.create_block_mask(shown, None, None, S, S, "cpu", BLOCK))

    q, model = data(0)[0], Model()
    program = torch.export.export(model, (q, torch.arange(S)), strict=strict)
    limit = torch.arange(S) - 2
    torch.testing.assert_close(program.module()(q, limit), model(q, limit))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strict", [True, False])
def test_exported_for_any_length(strict):
    """Without `strict`, lengths that a mask or a captured tensor has become those of the example."""

    class Model(torch.nn.Module):
        def forward(self, q, doc):
            n = q.shape[2]
            mask = ours.create_block_mask(lambda b, h, x, y: doc[x] == doc[y], None, None, n, n, "cpu", BLOCK)
            return attend(q, mask) + ours.flex_attention(q, q, q, lambda s, b, h, x, y: s - doc[y])

    q, length = data(0)[0], torch.export.Dim("length", max=999)
    asked = {"args": (q, torch.arange(S) // 7), "dynamic_shapes": ({2: length}, {0: length}), "strict": strict}
    if not strict:
        with pytest.raises(torch._dynamo.exc.UserError, match="specialized it to be a constant"):
            torch.export.export(Model(), **asked)
        return
    program, q = torch.export.export(Model(), **asked), torch.cat((q, q), 2)
    doc = torch.arange(2 * S) // 9
    torch.testing.assert_close(program.module()(q, doc), Model()(q, doc))
