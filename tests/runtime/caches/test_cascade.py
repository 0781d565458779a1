"""Prefixes that rows of a paged cache share, read once: every row as dense attention of float64 to its tokens."""

from pathlib import Path

import numpy as np
import pytest
from support.tiers import default_only
from support.triton.process import run

import frisket as fk
from frisket.caches import PagePool
from frisket.dsl.errors import ParameterError
from frisket.runtime.caches import positions
from frisket.runtime.caches.cascade import SharedPrefixes
from frisket.runtime.machine.cpp_build import reason

torch = pytest.importorskip("torch")
torch_plain = pytest.importorskip("frisket.runtime.caches.torch_plain")
torch_cascade = pytest.importorskip("frisket.runtime.caches.torch_cascade")
make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
caches = pytest.importorskip("frisket.caches.torch")
NATIVE = pytest.mark.skipif(bool(reason()), reason="no compiler")
PAGE, WIDTH, HEADS, KV_HEADS, DIM, V_DIM = 16, 8, 4, 2, 16, 8
# of every row: the tokens that it shares with rows of the same letter, and tokens of its own; "-" shares nothing
ROWS = [("a", 40, 3), ("b", 70, 17), ("a", 40, 0), ("-", 0, 30), ("b", 70, 1), ("a", 40, 21), ("-", 0, 0)]
GAIN = torch.linspace(0.5, 1.5, len(ROWS) * HEADS).view(len(ROWS), HEADS)
DOC = torch.arange(WIDTH * PAGE).expand(len(ROWS), -1) // (11 + torch.arange(len(ROWS))[:, None])
CASES = {
    "plain": (None, None, {}),
    "causal": ("causal", None, {}),
    "window": ("causal & window(40)", "softcap(20)", {}),
    "sinks": ("causal & (sinks(4) | window(9))", "score - 0.1 * (q - k)", {}),
    "batch": ("causal & (q + k + b) % 3 > 0", "score * gain[b, h] + 0.1 * b", {"gain": GAIN}),
    "sizes": ("causal & k * 3 < KV_LEN + B & q < Q_LEN", None, {}),
    "documents": ("causal & doc[b, q] == doc[b, k]", None, {"doc": DOC}),
}


@pytest.fixture(autouse=True)
def pays(monkeypatch):
    """Prefixes of tests are short, and are read once all the same."""
    monkeypatch.setattr(torch_cascade, "CPU_BYTES", 0)
    monkeypatch.setattr(torch_cascade, "FEWEST_MEMBERS", (2, 2))


@pytest.fixture
def unprepared(monkeypatch):
    """No planner is built for the steps of tests whose subject is what a cascade asks of its calls."""
    monkeypatch.setattr(torch_plain, "step_of", lambda *a: None)


class Rows:
    """A paged cache of sequences that share prefixes, and the tokens of each as the cache holds them, in float64."""

    def __init__(self, dtype=torch.float32, new=2, rows=ROWS, seed=0):
        self.g, self.rows, self.dtype = torch.Generator().manual_seed(seed), rows, dtype
        batch = len(rows)
        self.pool = PagePool(80, PAGE)
        self.cache = caches.PagedKVCache.create(80, PAGE, batch, WIDTH, KV_HEADS, DIM, V_DIM, dtype)
        self.held = [None] * batch
        prompts = {name: n for name, n, _ in rows if n}
        for name, n in prompts.items():
            self.pool.allocate(name, n)
        first = [*prompts, *[None] * (batch - len(prompts))]
        self.add(first, [prompts.get(s, 0) for s in first], [])
        of_prompt = {s: self.held[b] for b, s in enumerate(first) if s}
        for b, (name, n, _) in enumerate(rows):
            self.pool.fork(name, b) if n else self.pool.allocate(b)
        for name in prompts:
            self.pool.free(name)
        self.held = [of_prompt.get(name) for name, _, _ in rows]
        self.add(range(batch), own := [m for *_, m in rows], self.pool.append(dict(enumerate(own))))
        self.add(range(batch), [new] * batch, self.pool.append(dict.fromkeys(range(batch), new)))

    def add(self, sequences, counts, copies):
        self.cache.seat(self.pool, list(sequences), counts, copies)
        k, v = (torch.randn(len(counts), KV_HEADS, max(counts), d, generator=self.g) for d in (DIM, V_DIM))
        self.cache.append(k, v, counts)
        for b, n in enumerate(counts):
            new = [self.stored(x[b : b + 1, :, :n]) for x in (k, v)]
            old = self.held[b]
            self.held[b] = new if old is None else [torch.cat(pair, 2) for pair in zip(old, new, strict=True)]

    def stored(self, x):
        if self.dtype == torch.int8:
            values, scale = caches.quantized(x, self.dtype)
            return values.double() * scale.double()[..., None]
        return x.to(self.dtype).double()

    def queries(self, new, dtype=torch.float32):
        return torch.randn(len(self.rows), HEADS, new, DIM, generator=self.g).to(dtype)

    def dense(self, att, q, b, **more):
        """Row b alone, by the reference."""
        k, v = self.held[b]
        sizes = len(self.rows), HEADS, WIDTH * PAGE, WIDTH * PAGE
        more |= {"origin": (b, 0, k.shape[2] - q.shape[2], 0), "sizes": sizes, "return_lse": True}
        return att(q[b : b + 1].double(), k, v, **more)


def at_once(rows, att, q, *given, **more):
    """One call without a cascade, for which no planner is built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_plain, "step_of", lambda *a: None)
        return rows.cache.attend(att, q, *given, **more)


def require(got, want, tolerance):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", default_only(CASES, "sinks", "batch"))
def test_cascade_is_dense_attention_of_every_row(name, dtype, request):
    if name == "batch":  # no planner tells tiles of such a mask apart
        request.getfixturevalue("unprepared")
    mask, score, params = CASES[name]
    kind = getattr(torch, dtype)
    rows, att = Rows(kind), fk.compile(mask, score)
    q = rows.queries(2, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    got = rows.cache.attend(att, q, cascade=True, return_lse=True, **params)
    peer, tolerance = fk.compile(mask, score, backend="aten"), 2e-2 if dtype == "bfloat16" else 1e-5
    for b in range(len(ROWS)):
        require([x[b : b + 1] for x in got], rows.dense(peer, q, b, **params), tolerance)


WEIGHTED = {
    "sigmoid": ("causal", "sigmoid(score + gain[b, h])", None, {"gain": GAIN}),
    "squared relu": ("causal & window(40)", "relu(score) ** 2", "count + float(q % 7)", {}),
    "retention": ("causal", "score * 0.95 ** (q - k)", "max(abs(total), gain[b, h])", {"gain": GAIN}),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("name", default_only(WEIGHTED, "retention"))
def test_cascade_adds_sums_of_weighted_rows(name, dtype, monkeypatch):
    mask, weight, divide, params = WEIGHTED[name]
    rows, parts = Rows(kind := getattr(torch, dtype)), []
    q = rows.queries(2, torch.float32 if dtype == "int8" else kind)
    att, wide = (fk.compile(mask, weight=weight, divide=divide, backend=x) for x in ("aten", "dense"))
    read = type(rows.cache)._read
    monkeypatch.setattr(type(rows.cache), "_read", lambda *a: parts.append(a) or read(*a))
    out, sums = rows.cache.attend(att, q, cascade=True, return_sums=True, **params)
    assert len(parts) == 2
    assert out.dtype == q.dtype
    once, plain = rows.cache.attend(att, q, return_sums=True, **params)
    require(sums[1:], plain[1:], 1e-5)
    # the errors of two parts, each of them rounded, and those of one
    step = {"float32": 1e-6, "int8": 1e-6}.get(dtype, torch.finfo(kind).eps if dtype != "int8" else 0)
    for b in range(len(ROWS)):
        k, v = rows.held[b]
        where = (b, 0, k.shape[2] - 2, 0)
        want = wide(q[b : b + 1].double(), k, v, origin=where, sizes=(len(ROWS), HEADS, 128, 128), **params)
        size = max(1.0, float(want.abs().max()))
        error, of_once = ((x[b] - want[0]).abs().max() for x in (out.double(), once.double()))
        assert error <= 2 * of_once + 4 * step * size
    assert rows.cache.attend(att, q, cascade=True, **params).equal(out)


@pytest.mark.usefixtures("unprepared")
def test_two_prefixes_are_two_rows_of_packed_queries(monkeypatch):
    """The prefix of each group is read by one row of queries; the second call sees no key of a prefix."""
    rows, seen = Rows(), []
    read = caches.PagedKVCache._read

    def noted(self, att, q, tables, params, prefix=None):
        seen.append((tuple(q.shape), None if prefix is None else prefix.pages.tolist(), tables))
        return read(self, att, q, tables, params, prefix)

    monkeypatch.setattr(caches.PagedKVCache, "_read", noted)
    q = rows.queries(2)
    rows.cache.attend(fk.compile("causal"), q, cascade=True)
    (packed, prefix, tables), (behind, none, own) = seen
    assert (packed, behind, none) == ((2, HEADS, 6, DIM), q.shape, None)
    table = rows.cache.pages.tolist()
    assert prefix == [[*table[0][:2], 0, 0], table[1][:4]]
    assert own["cache_skip"].tolist() == [32, 64, 32, 0, 64, 32, 0]
    assert {n: x.tolist() for n, x in tables.items()} == {"cache_stop": [32, 64]}
    seen.clear()
    rows.cache.attend(fk.compile(*CASES["sinks"][:2]), q, cascade=True)
    assert seen[0][2]["cache_place"].shape == (2, 6)
    assert seen[0][2]["cache_stop"].tolist() == [32, 64]
    seen.clear()
    rows.cache.attend(fk.compile("causal"), q, [2, 2, 2, 0, 1, 2, 0], cascade=True)
    assert seen[0][2]["cache_stop"].tolist() == [[32] * 6, [64] * 3 + [0] * 3]
    seen.clear()
    rows.cache.attend(fk.compile("causal"), q)
    assert [x[0] for x in seen] == [q.shape]


def test_cascade_of_ragged_counts_and_of_drafts():
    """Padding sees nothing; trees see the prefix, their ancestors and themselves."""
    rows, att = Rows(new=4), fk.compile(*CASES["sinks"][:2])
    q, counts, tree = rows.queries(4), [4, 0, 1, 2, 3, 4, 1], [-1, 0, 0, 1]
    require([rows.cache.attend(att, q, counts, cascade=True)], [at_once(rows, att, q, counts)], 1e-5)
    require([rows.cache.attend(att, q, tree=tree, cascade=True)], [rows.cache.attend(att, q, tree=tree)], 1e-5)
    trees = torch.tensor([tree, [-1, -1, 0, 1]]).repeat(4, 1)[: len(ROWS)]
    require([rows.cache.attend(att, q, tree=trees, cascade=True)], [rows.cache.attend(att, q, tree=trees)], 1e-5)


@pytest.mark.usefixtures("unprepared")
def test_cascade_serves_rows_without_queries():
    rows, att, counts = Rows(new=1), fk.compile("causal"), [1, 0, 0, 1, 1, 1, 0]
    q = rows.queries(1)
    got = rows.cache.attend(att, q, counts, cascade=True)
    require([got], [rows.cache.attend(att, q, counts)], 1e-5)
    assert not got[[1, 2, 6]].any()


def test_sink_logits_of_a_cascade_count_once():
    rows, logits = Rows(), torch.tensor([0.5, -1.0, 3.0, -torch.inf])
    q, program = rows.queries(2), CASES["sinks"][:2]
    for att, given in ((fk.compile(*program, sinks=logits), {}), (fk.compile(*program), {"sinks": logits})):
        got = rows.cache.attend(att, q, cascade=True, return_lse=True, **given)
        require(got, at_once(rows, att, q, return_lse=True, **given), 1e-5)


@pytest.mark.usefixtures("unprepared")
def test_cascade_after_truncation_and_with_new_tokens():
    """Rows cut within the prefix see what is left; `attention` appends before it reads."""
    rows, att = Rows(), fk.compile("causal")
    rows.cache.truncate([20, 87, 1, 30, 71, 61, 0])
    q = rows.queries(1)
    require([rows.cache.attend(att, q, cascade=True)], [rows.cache.attend(att, q)], 1e-5)
    one, other = Rows(), Rows()
    for x in (one, other):
        copies = x.pool.append(dict.fromkeys(range(len(ROWS)), 3))
        x.cache.seat(x.pool, range(len(ROWS)), 3, copies)
    q, k, v = (torch.randn(len(ROWS), h, 3, d) for h, d in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM)))
    got = one.cache.attention(att, q, k, v, cascade=True)
    require([got], [other.cache.attention(att, q, k, v)], 1e-5)
    assert one.cache.lengths.tolist() == other.cache.lengths.tolist()


@pytest.mark.usefixtures("unprepared")
def test_rows_without_a_common_prefix_are_one_call(monkeypatch):
    rows = Rows(rows=[("-", 0, 5), ("-", 0, 40)])
    att, q = fk.compile("causal"), rows.queries(2)
    want = rows.cache.attend(att, q)
    monkeypatch.setattr(torch_cascade.Cascade, "attend", None)
    assert torch.equal(rows.cache.attend(att, q, cascade=True), want)
    fresh = caches.PagedKVCache.create(8, PAGE, 2, WIDTH, KV_HEADS, DIM, V_DIM)
    assert not fresh.attend(att, q, counts=[0, 0], cascade=True).any()  # no sequence sits in a row


def calls_of(monkeypatch, cache, q, att="causal"):
    """The shapes of queries in each call of a step."""
    shapes, read = [], caches.PagedKVCache._read
    with monkeypatch.context() as patch:
        noted = lambda self, att, q, *more: shapes.append(tuple(q.shape)) or read(self, att, q, *more)  # noqa: E731
        patch.setattr(caches.PagedKVCache, "_read", noted)
        cache.attend(fk.compile(att), q, cascade=True)
    return shapes


@pytest.mark.usefixtures("unprepared")
def test_cascade_is_taken_where_it_saves_enough_bytes(monkeypatch):
    """Groups of three rows with 32 tokens, and of two with 64: 128 tokens are read less often."""
    rows = Rows()
    q, saved = rows.queries(2), 128 * 4 * KV_HEADS * (DIM + V_DIM)
    for least, calls in ((saved, 2), (saved + 1, 1)):
        monkeypatch.setattr(torch_cascade, "CPU_BYTES", least)
        rows.cache._cascades.clear()
        assert len(calls_of(monkeypatch, rows.cache, q)) == calls
    shared = rows.cache._cascades
    assert [cascade for _, cascade in shared.values()] == [None]
    groups, of_token = SharedPrefixes.of(*rows.cache._table, PAGE), (32 << 20) // 128
    assert [torch_cascade.pays(groups, n, is_cpu=False) for n in (of_token, of_token - 1)] == [True, False]


@pytest.mark.parametrize(("lacks", "dtype", "fewest"), [("", "int8", 4), ("", "fp8", 8), ("no unit", "int8", 8)])
def test_members_of_8_bits_on_a_cpu(monkeypatch, lacks, dtype, fewest):
    """16 rows of a key head at most, in as many members as pay, or one call."""
    monkeypatch.setattr(torch_cascade, "FEWEST_MEMBERS", (4, 8))
    monkeypatch.setattr(torch_cascade, "lacking", lambda variant: lacks)
    keys = torch.empty(1, 2, 16, 8, dtype=torch.int8 if dtype == "int8" else torch.float8_e4m3fn)
    for heads, new, members in ((2, 1, 16), (4, 1, 8), (2, 3, 5), (8, 1, 4), (16, 1, 2), (2, 17, 0)):
        q = torch.empty(6, heads, new, 8)
        assert torch_cascade.most_members(q, keys, True) == (members if members >= fewest else 1)
        assert torch_cascade.most_members(q, keys.float(), False) is None
        assert torch_cascade.most_members(q.to("meta"), keys, True) is None


@pytest.mark.usefixtures("unprepared")
def test_int8_is_cut_into_small_groups(monkeypatch):
    """Two query heads a key head and four queries leave two members, and all rows see what they see in one call."""
    rows = Rows(torch.int8, new=4, rows=[("a", 40, n) for n in range(5)])
    q = rows.queries(4)
    assert calls_of(monkeypatch, rows.cache, q) == [(3, HEADS, 8, DIM), (5, HEADS, 4, DIM)]
    att = fk.compile(*CASES["sinks"][:2])
    require([rows.cache.attend(att, q, cascade=True)], [rows.cache.attend(att, q)], 1e-5)
    rows = Rows(torch.int8, new=9, rows=[("a", 40, n) for n in range(3)])
    assert calls_of(monkeypatch, rows.cache, rows.queries(9)) == [(3, HEADS, 9, DIM)]


def test_groups_are_cut_into_parts_of_about_a_size():
    table, counts = np.array([[7, 8, n] for n in range(5)], np.int32), np.full(5, 3)
    shared = SharedPrefixes.of(table, counts, 16, 4)
    assert shared.rows.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert (shared.saved, shared.neighbours) == (96, None)
    assert SharedPrefixes.of(table[:4], counts[:4], 16, 2).neighbours == slice(0, 4)
    assert SharedPrefixes.of(table, counts, 16).neighbours == slice(0, 5)
    turned = SharedPrefixes.of(table[[0, 1]], counts[:2], 16)
    assert turned.neighbours == slice(0, 2)
    assert not turned.equals(shared)


def step(rows):
    """A token more for every row."""
    rows.add(range(len(rows.rows)), [1] * len(rows.rows), rows.pool.append(dict.fromkeys(range(len(rows.rows)), 1)))


def by_rows(rows, att, q):
    got = rows.cache.attend(att, q, cascade=True, return_lse=True)
    for b in range(len(rows.rows)):
        require([x[b : b + 1] for x in got], rows.dense(att, q, b), 1e-5)


@pytest.mark.usefixtures("unprepared")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_plan_of_a_prefix_lasts_while_rows_share_it(dtype, monkeypatch):
    """Through steps and new pages; other sharers get other plans, and rows cut within the prefix none. On a CPU steps
    that are prepared need no plan; these are not."""
    rows, att = Rows(getattr(torch, dtype), new=1), fk.compile("causal", backend="aten")
    plans, plan_of = [], type(att).plan
    monkeypatch.setattr(type(att), "plan", lambda self, *a, **k: plans.append(k) or plan_of(self, *a, **k))
    for _ in range(20):  # pages have 16 tokens
        by_rows(rows, att, rows.queries(1))
        step(rows)
    assert [list(k) for k in plans] == [["sizes", "cache_stop"]]
    ((_, before),) = rows.cache._cascades.values()
    sequences = [0, 1, 2, 3, None, 5, 6]
    rows.cache.seat(rows.pool, sequences, 0)  # nobody shares the prefix of row 1 any more
    counts, q = [1, 1, 1, 1, 0, 1, 1], rows.queries(1)
    require([rows.cache.attend(att, q, counts, cascade=True)], [rows.cache.attend(att, q, counts)], 1e-5)
    ((_, after),) = rows.cache._cascades.values()
    assert after is not before
    assert after.arrays["stops"].tolist() == [32]
    rows.cache.truncate([20, 99, 99, 99, 0, 99, 99])
    require([rows.cache.attend(att, q, counts, cascade=True)], [rows.cache.attend(att, q, counts)], 1e-5)
    assert len(plans) == 1
    assert not after.plans


@pytest.mark.usefixtures("unprepared")
def test_masks_that_hide_earlier_keys_are_asked_of_every_prefix():
    """Masks that read tables, lengths, or another value at another call."""
    hides = {
        "causal": "",
        "": "",
        "q >= k | k < 4": "",
        "window(500) & causal": "",
        "causal & window(40)": "the mask hides",
    }
    hides |= {
        "causal & k < KV_LEN": "the mask reads",
        "causal & doc[q] == doc[k]": "the mask reads",
        "q > k + 1": "the",
    }
    for text, why in hides.items():
        reason = positions.hides_earlier(fk.compile(text or None), {}, 400)
        assert reason.startswith(why), text
        assert bool(reason) == bool(why), text
    att = fk.compile("param w: int\nmask = causal & window(w)")
    assert [bool(positions.hides_earlier(att, {"w": w}, 400)) for w in (400, 40, 400)] == [False, True, False]
    rows = Rows()
    q = rows.queries(2)
    for w in (500, 40, 9):
        require([rows.cache.attend(att, q, w=w, cascade=True)], [rows.cache.attend(att, q, w=w)], 1e-5)


def test_rows_in_order_are_packed_without_a_copy():
    rows = Rows(new=1, rows=[("-", 0, 9), ("a", 40, 3), ("a", 40, 1), ("b", 40, 2), ("b", 40, 9)])
    q, mask = rows.queries(1), CASES["sinks"][0]
    rows.cache.attend(fk.compile(mask), q, cascade=True)
    ((_, cascade),) = rows.cache._cascades.values()
    packed = cascade._packed(q)
    assert packed.data_ptr() == q[1].data_ptr()
    assert torch.equal(packed, q[cascade.arrays["rows"]].transpose(1, 2).flatten(2, 3))
    by_rows(rows, fk.compile(mask, "score * 0.5 + 0.1 * b", backend="aten"), q)


@pytest.mark.usefixtures("unprepared")
def test_cascades_refuse_what_they_lack():
    rows = Rows()
    q, before = rows.queries(2), rows.cache.lengths.tolist()
    with pytest.raises(ParameterError, match="reads keys in two parts; there is no max: leave out return_max or"):
        rows.cache.attend(fk.compile("causal"), q, cascade=True, return_max=True)
    k, v = torch.randn(len(ROWS), KV_HEADS, 2, DIM), torch.randn(len(ROWS), KV_HEADS, 2, V_DIM)
    with pytest.raises(ParameterError, match="there is no max"):
        rows.cache.attention(fk.compile("causal"), q, k, v, cascade=True, return_max=True)
    assert rows.cache.lengths.tolist() == before
    with pytest.raises(ParameterError, match=r"packs 150 queries into a row, and Q_LEN.*is 128\n  leave out cascade"):
        rows.cache.attend(fk.compile("causal & q < Q_LEN"), rows.queries(50), cascade=True)
    assert rows.cache.attend(fk.compile("causal"), rows.queries(50), [2] * 7, cascade=True).shape[2] == 50


@pytest.mark.parametrize("seed", range(5))
def test_prefixes_are_those_that_save_most_pages(seed):
    """Compared with every way to cut rows of a random tree of pages into groups with one prefix."""
    random = np.random.default_rng(seed)
    for _ in range(60):
        table, counts = random.integers(0, 2, (5, 4)).astype(np.int32), random.integers(0, 5, 5)
        shared = SharedPrefixes.of(table, counts, 1)
        assert (0 if shared is None else saved(shared)) == most(table, counts, list(range(5)))
        if shared is None:
            continue
        for row, real, pages in zip(shared.rows, shared.real, shared.pages, strict=True):
            for b in row[real]:
                n = shared.tokens[b, 0]
                assert n <= counts[b]
                np.testing.assert_array_equal(table[b, :n], pages[:n])
                assert shared.rows.reshape(-1)[shared.slots[b]] == b


def saved(shared):
    return sum(
        (real.sum() - 1) * shared.tokens[rows[0], 0] for rows, real in zip(shared.rows, shared.real, strict=True)
    )


def most(table, counts, rows):
    """The pages that the best groups among rows save."""
    if len(rows) < 2:
        return 0
    first, rest, best = rows[0], rows[1:], 0
    for bits in range(1 << len(rest)):
        group = [first, *(b for i, b in enumerate(rest) if bits >> i & 1)]
        others = [b for b in rest if b not in group]
        n = min(counts[group])
        while (table[group, :n] != table[first, :n]).any():
            n -= 1
        best = max(best, (len(group) - 1) * n + most(table, counts, others))
    return best


@pytest.mark.exhaustive
def test_cascade_runs_in_the_interpreter():
    run(Path(__file__).parent / "children/cascade_interpreted.py", TRITON_INTERPRET="1")


def test_graphs_take_no_cascade():
    """The plan of a step would be that of every later one."""
    rows = Rows()
    with torch.no_grad(), pytest.raises(ParameterError, match="a graph would keep this plan\n  call it outside of"):
        make_fx(lambda q: rows.cache.attend(fk.compile("causal"), q, cascade=True))(rows.queries(2))


@NATIVE
def test_native_kernels_read_a_prefix_once():
    """By the steps that are prepared for one call, in the order of axes of a step."""
    rows, att = Rows(new=1), fk.compile(*CASES["sinks"][:2], backend="cpp")
    q = rows.queries(1)
    want = rows.cache.attend(att, q)
    for _ in range(2):
        require([rows.cache.attend(att, q, cascade=True)], [want], 1e-5)
    assert sorted(step.ready.inputs.geometry.q_len for step in rows.cache._steps.values()) == [1, 1, 3]


@pytest.mark.exhaustive
def test_cascade_launches_few_kernels():
    run(Path(__file__).parent / "children/cascade_launched.py")
