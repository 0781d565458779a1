"""Calls with keys and values as caches store them, and attention read at other positions, through the public door."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support import stored_cases
from torch.utils._python_dispatch import TorchDispatchMode

import frisket as fk
from frisket.dsl.errors import BackwardError, ParameterError, ShapeError
from frisket.lowering.pipeline import _values, simplified_program
from frisket.runtime.attention.attention import Attention
from frisket.runtime.caches.positions import APPENDED
from frisket.runtime.caches.positions import placed as placed_in
from frisket.runtime.calls.options import Options
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.masks.mask import Mask, ScoreMod
from frisket.runtime.torch.spec import attention_of, spec_of

FRAMEWORKS = ("torch", "jax")
EIGHT = ("int8", "float8_e4m3fn", "float8_e5m2")


def array(x: np.ndarray, framework: str) -> Any:
    if framework == "jax":
        return jnp.asarray(x)
    narrow = x.dtype.kind == "V" or x.dtype.name in ("bfloat16", *EIGHT[1:])  # numpy has none, torch takes their bits
    if not narrow:
        return torch.from_numpy(np.ascontiguousarray(x))
    bits = torch.from_numpy(np.ascontiguousarray(x).view(f"int{8 * x.dtype.itemsize}"))
    return bits.view(getattr(torch, x.dtype.name))


@dataclass(frozen=True)
class Case:
    mask: str | None = "k <= q + start[b] & k < end[b]"
    score: str | None = None
    kv: str = "int8"
    page: int = 0
    heads: int = 4
    kv_heads: int = 2
    q_len: int = 3
    scales: str = "kv"
    params: dict = field(default_factory=dict)
    call: dict = field(default_factory=dict)


STARTS = {"start": np.array([60, 13], np.int32), "end": np.array([63, 16], np.int32)}
SLOPES = {"slope": np.array([0.1, -0.2, 0.3, 0.05], np.float32)}
CASES = {
    "int8": Case(params=STARTS),
    "pages": Case(page=32, params=STARTS, score="softcap(3)"),
    "e4m3": Case("causal & window(5)", kv="float8_e4m3fn", page=16, q_len=40, call={"origin": (0, 0, 30, 0)}),
    "e5m2": Case(None, "score + slope[h] * (k - q)", kv="float8_e5m2", kv_heads=4, params=SLOPES),
    "pages of floats": Case("causal", kv="float32", page=48, scales="", q_len=20, kv_heads=1),
    "keys alone": Case("causal | k % (h + 2) == 0", scales="k", q_len=70),
    "values alone, an empty row": Case("k < 7 * q", scales="v", page=16, q_len=2),
    "sinks": Case("causal", call={"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32)}, page=16, q_len=9),
    "a crop": Case("causal & (b + h + k) % 3 > 0", q_len=9, call={"origin": (1, 4, 50, 11), "sizes": (4, 8, 96, 120)}),
    "origins of a batch": Case("causal", page=16, call={
        "origin": (0, 0, np.array([70, 40]), np.array([0, 16])), "sizes": (2, 4, 96, 112)}),
    "dropout": Case("causal", q_len=30, page=16, call={"seed": 3}),
}  # fmt: skip
COMPILED = ("pages", "origins of a batch", "dropout")  # by JAX, in every run of the tests
LENGTH, DIM, WIDE = 96, 16, 24


@dataclass(frozen=True)
class Problem:
    """Arrays [batch, heads, length, dim], and what keys and values mean."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    live: dict[str, np.ndarray]
    meant: tuple[np.ndarray, np.ndarray]


def problem(case: Case, batch: int = 2) -> Problem:
    draw = np.random.default_rng(1)
    q = draw.standard_normal((batch, case.heads, case.q_len, DIM)).astype(np.float32)
    held, live, meant = {}, {}, {}
    pages = 1 + draw.permutation(batch * LENGTH // case.page).reshape(batch, -1) if case.page else None
    for name, dim in (("k", DIM), ("v", WIDE)):
        most = 127 if name in case.scales else 3
        codes = draw.integers(-most, most + 1, (batch, case.kv_heads, LENGTH, dim))
        x = codes.astype(np.int8) if case.kv == "int8" else (codes / 40).astype(stored_cases.DTYPES[case.kv])
        scale = draw.uniform(0.005, 0.02, x.shape[:3]).astype(np.float32)
        mine = scale if name in case.scales else np.ones_like(scale)
        meant[name] = x.astype(np.float64) * mine[..., None].astype(np.float64)
        if name in case.scales:
            live[f"{name}_scale"] = scale if pages is None else pooled(scale, pages, case.page)
        held[name] = x if pages is None else pooled(x, pages, case.page)
    if pages is not None:
        live["pages"] = pages.astype(np.int32)
    return Problem(q, held["k"], held["v"], live, (meant["k"], meant["v"]))


def pooled(x: np.ndarray, pages: np.ndarray, page: int) -> np.ndarray:
    pool = np.zeros((pages.size + 2, x.shape[1], page, *x.shape[3:]), x.dtype)
    for b, i in np.ndindex(pages.shape):
        pool[pages[b, i]] = x[b, :, i * page : (i + 1) * page]
    return pool


def turned(x: np.ndarray, framework: str) -> np.ndarray:
    """Heads and lengths as the framework has them."""
    return x.swapaxes(1, 2) if framework == "jax" and x.ndim > 2 else x


def given(made: Problem, framework: str) -> tuple[list[Any], dict[str, Any]]:
    arrays = [array(turned(x, framework), framework) for x in (made.q, made.k, made.v)]
    return arrays, {n: array(turned(x, framework), framework) for n, x in made.live.items()}


def close(got: Any, want: np.ndarray, framework: str) -> None:
    np.testing.assert_allclose(turned(np.asarray(got), framework), want, rtol=3e-6, atol=3e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "framework"),
    [
        pytest.param(n, f, marks=pytest.mark.exhaustive if f == "jax" and n not in COMPILED else ())
        for n in CASES
        for f in FRAMEWORKS
    ],
)
def test_stored_keys_mean_what_their_scales_and_pages_say(name, framework):
    case, made = CASES[name], problem(CASES[name])
    rate = 0.25 if name == "dropout" else 0.0
    how = {**case.params, **case.call}
    want, want_lse = fk.reference(
        made.q.astype(np.float64),
        *made.meant,
        case.mask,
        case.score,
        layout="bhsd",
        return_lse=True,
        dropout=rate,
        **how,
    )
    arrays, live = given(made, framework)
    att = fk.compile(case.mask, case.score, backend="library", dropout=rate)
    out, lse = att(*arrays, **live, **how, return_lse=True)
    close(out, want, framework)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=3e-6, atol=3e-6)
    own, own_lse = fk.reference(  # the interpreter reads them itself
        made.q, made.k, made.v, case.mask, case.score, layout="bhsd", return_lse=True, dropout=rate, **made.live, **how
    )
    np.testing.assert_allclose(own, want, atol=1e-12)
    np.testing.assert_allclose(own_lse, want_lse, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        *((n, "torch") for n in stored_cases.STORED),
        ("int8 in pages", "jax"),
        *(pytest.param(n, "jax", marks=pytest.mark.exhaustive) for n in stored_cases.STORED if n != "int8 in pages"),
    ],
)
def test_anything_may_stand_where_nothing_is_visible(name, framework):
    stored = stored_cases.STORED[name]
    case, made = stored.case, stored_cases.problem(stored, "bhsd" if framework == "torch" else "bshd")
    score = None if case.score is None else ScoreMod(case.score)
    mask = None if case.mask is None else Mask(case.mask)
    att = Attention(CallProgram(mask, score, unwritten=True), Options(backend="library"))
    q = made.q.swapaxes(1, 2) if framework == "torch" else made.q
    read = {*att.program.names, "k_scale", "v_scale", "pages"}
    tables = {n: array(x, framework) for n, x in made.tables.items() if n in read}
    arrays = (array(x, framework) for x in (q, made.k, made.v))
    out, lse = att(*arrays, return_lse=True, origin=case.origin, sizes=case.sizes, **tables)
    out = out.float() if framework == "torch" else np.asarray(out, np.float64).swapaxes(1, 2)
    stored_cases.check(stored, made, out, lse)


def test_kernels_know_what_caches_may_hold():
    """Whatever becomes of an attention of places on the way to them."""
    att = placed_in(fk.compile("causal & window(w)"), APPENDED)
    tables = {"cache_start": np.array([7, 0]), "cache_end": np.array([8, 1])}
    again = attention_of(spec_of(att.program, att.options, ()), tuple((n, 1, int) for n in tables) + (("w", 0, int),))
    for made in (att, att.at(k="k"), again):
        base = simplified_program(made.program.bind({"w": 4, **tables}))
        assert _values(base, None, True, (2, 1, 1, 32), False)[0].unwritten
        there = {n: jnp.asarray(x) for n, x in tables.items()}
        assert made.plan(1, 32, 2, 1, flat=True, w=4, **there).static.plan.unwritten
    base = simplified_program(fk.compile("causal").program)
    assert not _values(base, None, True, (2, 1, 1, 32), False)[0].unwritten


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_pages_are_an_array(framework):
    q, k = (array(np.ones(s, np.float32), framework) for s in ((1, 2, 2, 16), (4, 16, 16, 16)))
    with pytest.raises(ShapeError, match=r"pages are \[\[0, 1\]\]; they are an array int32"):
        fk.attention(q, k, k, "causal", pages=[[0, 1]])


def test_whole_numbers_are_what_they_are_without_a_scale():
    made = problem(Case("causal", scales=""))
    arrays, _ = given(made, "torch")
    want = fk.reference(made.q.astype(np.float64), *made.meant, "causal", layout="bhsd")
    close(fk.attention(*arrays, "causal"), want, "torch")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layouts_and_checks(framework, monkeypatch):
    case = Case("causal", "softcap(4)", page=16, q_len=9)
    made = problem(case)
    arrays, live = given(made, framework)
    att = fk.compile(case.mask, case.score, backend="library")
    want = np.asarray(att(*arrays, **live))

    def swapped(x):
        return x.swapaxes(1, 2) if framework == "torch" else jnp.asarray(np.asarray(x).swapaxes(1, 2))

    other = {n: x if n == "pages" else swapped(x) for n, x in live.items()}
    layout = "bshd" if framework == "torch" else "bhsd"
    for _ in range(2):  # the second call of torch is a shorter way
        got = att(*map(swapped, arrays), **other, layout=layout)
        np.testing.assert_allclose(np.asarray(got).swapaxes(1, 2), want, atol=1e-6)
    assert not att.check(*arrays, **live).gradients
    plan = att.plan(9, 96, 2, 4)
    np.testing.assert_allclose(np.asarray(att(*arrays, **live, plan=plan)), want, atol=1e-6)
    close(fk.compile(case.mask, case.score, backend="dense")(*arrays, **live), turned(want, framework), framework)
    monkeypatch.setenv("FRISKET_CHECK", "1")
    att(*arrays, **live)


WRONG_PAGES = {
    "high": ([[0, 9], [2, 3]], r"`pages` entry \[0, 1\] is 9, and the pool has pages 0..4; queries see keys"),
    "below": ([[0, 1], [-1, 3]], r"`pages` entry \[1, 0\] is -1, and the pool"),
    "twice": ([[0, 1], [2, 2]], r"`pages` entry \[1, 1\] is 2, as is entry \[1, 0\]; queries see keys"),
}


@pytest.mark.parametrize("wrong", WRONG_PAGES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_page_numbers_of_visible_keys_are_checked_on_request(framework, wrong, monkeypatch):
    x = np.random.default_rng(0).standard_normal((5, 16, 16, 2)).astype(np.float32)
    kv = array(x.transpose(0, 3, 1, 2) if framework == "torch" else x.swapaxes(2, 3), framework)
    q = array(np.ones((2, 2, 4, 16) if framework == "torch" else (2, 4, 2, 16), np.float32), framework)
    table, error = WRONG_PAGES[wrong]
    att, pages = fk.compile("k < n"), array(np.array(table, np.int32), framework)
    with pytest.raises(fk.ParameterError, match=error):
        att.check(q, kv, kv, pages=pages, n=17)
    if wrong != "below":
        assert att.check(q, kv, kv, pages=pages, n=16).good, "no query sees that page"
    monkeypatch.setenv("FRISKET_CHECK", "1")
    with pytest.raises(fk.ParameterError, match=error):
        att(q, kv, kv, pages=pages, n=17)


def test_values_of_scales_and_pages_plan_nothing_anew(monkeypatch):
    made = problem(Case("causal", page=16))
    arrays, live = given(made, "torch")
    att = fk.compile("causal", backend="library")
    att(*arrays, **live)
    for name in ("call", "_new_plan"):
        monkeypatch.setattr(Attention, name, None)
    swapped = {**live, "pages": live["pages"].flip(0), "k_scale": live["k_scale"] * 2}
    want = fk.reference(made.q, made.k, made.v, "causal", layout="bhsd", **{n: x.numpy() for n, x in swapped.items()})
    close(att(*arrays, **swapped), want, "torch")


def test_values_compile_nothing_anew_under_jit():
    made = problem(Case(page=16))
    arrays, live = given(made, "jax")
    att = fk.compile("causal & window(20)", backend="xla").at(q="q + start[b]")
    run = jax.jit(lambda q, k, v, start, **live: att(q, k, v, start=start, **live))
    for start in ([10, 20], [60, 0]):
        live = {**live, "pages": live["pages"][::-1], "v_scale": live["v_scale"] * 1.5}
        out = run(*arrays, jnp.array(start, "int32"), **live)
        held = {n: np.asarray(x) if n == "pages" else np.asarray(x).swapaxes(1, 2) for n, x in live.items()}
        want = fk.reference(
            made.q, made.k, made.v, "k <= q + s[b] & q + s[b] - k < 20", layout="bhsd", s=np.array(start), **held
        )
        close(out, want, "jax")
    assert run._cache_size() == 1


class Largest(TorchDispatchMode):
    """The bytes of the largest new tensor."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.found = max(self.found, out.numel() * out.element_size())
        return out


@pytest.mark.parametrize("page", [0, 16])
def test_stored_keys_are_never_converted_whole(page, one_thread):
    shape = (512, 8, 16, 64) if page else (1, 8, 8192, 64)
    k = torch.ones(shape, dtype=torch.int8)
    live = {"k_scale": torch.ones(shape[:3]), "v_scale": torch.ones(shape[:3])}
    if page:
        live["pages"] = torch.arange(512, dtype=torch.int32)[None]
    with Largest() as largest:
        fk.attention(torch.ones(1, 8, 1, 64), k, k, backend="aten", **live)
    assert 0 < largest.found <= k.numel() // 4  # of 8 bits each


@pytest.mark.parametrize("page", [0, 16])
def test_jax_converts_no_copy_of_the_cache(page):
    shape = (1024, 16, 8, 64) if page else (1, 16384, 8, 64)

    def like(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    k, scale = like(shape, "int8"), like(shape[:3], "float32")
    live = {"k_scale": scale, "v_scale": scale} | ({"pages": like((1, 1024), "int32")} if page else {})
    run = jax.jit(lambda q, k, v, **live: fk.attention(q, k, v, backend="xla", **live))
    memory = run.lower(like((1, 1, 8, 64), "float32"), k, k, **live).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 2 * k.size  # converted whole, keys alone would take four times their size


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- gradients and errors ---------------------------------------------------------------------------


def test_stored_keys_refuse_gradients():
    arrays, live = given(problem(Case("causal", "score + slope[h]", params=SLOPES)), "torch")
    q, k, v = arrays
    slope = torch.ones(4)
    att = fk.compile("causal", "score + slope[h]")
    said = (
        "keys and values of int8 are for the forward alone, without gradients\n  train with keys and values as they are"
    )
    for wanted in (q, slope, live["k_scale"]):
        wanted.requires_grad_()
        with pytest.raises(BackwardError, match=said):
            att(q, k, v, slope=slope, **live)
        with torch.no_grad():
            att(q, k, v, slope=slope, **live)
        wanted.requires_grad_(False)
    with pytest.raises(BackwardError, match="values with k_scale and v_scale are for the forward alone"):
        att(q, k.float().requires_grad_(), v.float(), slope=slope, **live)
    with pytest.raises(BackwardError, match=said):
        torch.func.grad(lambda q: att(q, k, v, slope=slope, **live).sum())(q)

    arrays, live = given(problem(Case("causal", page=16)), "jax")
    with pytest.raises(BackwardError, match=said):
        jax.grad(lambda q: fk.attention(q, *arrays[1:], "causal", **live).sum())(arrays[0])
    one = jax.grad(lambda w: (w * fk.attention(jax.lax.stop_gradient(w * arrays[0]), *arrays[1:], **live)).sum())
    assert np.isfinite(one(1.0))


def test_graphs_of_torch_take_them():
    (q, k, v), live = given(problem(Case(page=16, params=STARTS)), "torch")
    start = torch.from_numpy(STARTS["start"])
    att = fk.compile("causal", "softcap(4)").at(q="q + start[b]")
    run = torch.compile(
        lambda q, k, v, start, live: att(q, k, v, start=start, **live), backend="aot_eager", fullgraph=True
    )
    for step in range(2):
        torch.testing.assert_close(run(q, k, v, start + step, live), att(q, k, v, start=start + step, **live))


Q = np.zeros((2, 4, 3, 16), np.float32)
K = np.zeros((2, 2, 48, 16), np.int8)
S = np.ones((2, 2, 48), np.float32)
P = np.zeros((2, 3), np.int32)
WRONG = {
    "k_scale has the shape (2, 2, 47); it has one number for every token and head of k, (2, 2, 48), the axes of k "
    "without its last": {"k_scale": S[..., :47]},
    "v_scale is float16; it is float32: v_scale.to(torch.float32)": {"v_scale": S.astype(np.float16)},
    "pages are int64; they are int32 [batch, pages of a sequence]: pages.to(torch.int32)": {"pages": P.astype("int64")},
    "pages are of 3 sequences, q of 2": {"pages": np.zeros((3, 3), np.int32)},
    "pages have two axes, [batch, pages of a sequence]": {"pages": P[0]},
    "a page has 40 tokens, it has a multiple of 16": {"pages": P, "k": K[:, :, :40], "v": K[:, :, :40]},
    "the pools of k and v have different pages": {"pages": P, "v": K[:1]},
    "q, k and v have dtypes float32, int8, float32; convert them to one": {"v": K.astype(np.float32)},
    "q, k and v have dtypes float32, uint8, uint8; convert them to one": {"k": K.view("uint8"), "v": K.view("uint8")},
    "pages are 3; they are an array int32 [batch, pages of a sequence]": {"pages": 3},
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_errors_say_what_is_wrong(text):
    arrays = {"k": K, "v": K, **WRONG[text]}
    with pytest.raises(ShapeError) as caught:
        fk.attention(
            torch.from_numpy(Q), **{n: torch.from_numpy(x) if hasattr(x, "ndim") else x for n, x in arrays.items()}
        )
    assert str(caught.value).splitlines()[0] == text


def test_stages_show_how_keys_are_stored():
    (q, k, v), live = given(problem(Case("causal", page=16)), "torch")
    plan = str(fk.compile("causal").stages(q, k, v, **live).plan)
    assert "score    score * t1[t0[b, k // 16], h // 2, k % 16]" in plan
    assert "scaled   t2[t0[b, k // 16], h // 2, k % 16]" in plan
    assert "pages    of 16 keys, by t0" in plan
    with pytest.raises(ParameterError, match="scales and pages are those of q, k and v"):
        fk.compile("causal").stages(q_len=4, **live)


# -- Attention.at -------------------------------------------------------------------------------------

N = 50
ORDER = np.random.default_rng(3).permutation(N).astype(np.int32)
DOC = np.sort(np.random.default_rng(4).integers(0, 4, N)).astype(np.int32)
BIAS = np.random.default_rng(5).standard_normal((4, N)).astype(np.float32)


@pytest.mark.parametrize(
    ("framework", "rate"),
    [("torch", 0.0), ("torch", 0.3), *(pytest.param("jax", x, marks=pytest.mark.exhaustive) for x in (0.0, 0.3))],
)
def test_attention_to_arrays_in_another_order(framework, rate):
    att = fk.compile(
        "causal & same(doc) & window(w)", "softcap(4) + bias[h, k] * (k - q)", doc=DOC, w=30, dropout=rate,
        backend="library",
    )  # fmt: skip
    there = att.at(q="pos[q]", k="pos[k]")
    draw = np.random.default_rng(6)
    q, k, v, to = (draw.standard_normal((2, h, N, DIM)).astype(np.float32) for h in (4, 2, 2, 4))
    seed = {"seed": 7} if rate else {}
    straight = gradients(framework, att, (q, k, v), to, **seed)
    apart = gradients(
        framework, there, (x[:, :, ORDER] for x in (q, k, v)), to[:, :, ORDER], pos=array(ORDER, framework), **seed
    )
    for name, want in straight.items():
        got, want = apart[name], want if name == "bias" else want[:, :, ORDER]
        np.testing.assert_allclose(got, want, atol=5e-6 * np.abs(want).max(), err_msg=name)
    if framework == "torch":
        want = fk.reference(
            q, k, v, "causal & same(doc) & window(30)", "softcap(4) + bias[h, k] * (k - q)", doc=DOC, bias=BIAS,
            layout="bhsd", dropout=rate, **seed,
        )  # fmt: skip
        np.testing.assert_allclose(straight["out"], want, atol=2e-5)
        there.check(*map(torch.from_numpy, (q, k, v)), bias=torch.from_numpy(BIAS), pos=ORDER, **seed)


def gradients(framework: str, att: Any, qkv: Any, to: np.ndarray, **how: Any) -> dict[str, np.ndarray]:
    """out, and gradients of sum(out * to), [batch, heads, length, dim]."""
    arrays = dict(zip(("q", "k", "v", "bias"), (*qkv, BIAS), strict=True))
    if framework == "torch":
        leaves = {n: array(x, "torch").requires_grad_() for n, x in arrays.items()}
        out = att(**leaves, **how)
        (out * torch.from_numpy(to.copy())).sum().backward()
        return {"out": out.detach().numpy(), **{n: x.grad.numpy() for n, x in leaves.items()}}
    given = {n: jnp.asarray(turned(x, "jax")) for n, x in arrays.items()}

    @jax.jit
    def run(given: Any, how: Any) -> Any:
        def loss(given: Any) -> Any:
            out = att(**given, **how)
            return (out * turned(to, "jax")).sum(), out

        return jax.grad(loss, has_aux=True)(given)

    found, out = run(given, how)
    return {n: turned(np.asarray(x), "jax") for n, x in {"out": out, **found}.items()}


def test_names_of_positions_are_kept_apart():
    att = fk.compile("same(doc)", doc=DOC)
    assert str(att.at(q="doc[q]").mask) == "same(doc, q = doc[q])"  # its own
    other = att.at(q="doc[q]", doc=ORDER)
    assert str(other.mask) == "same(doc, q = doc_2[q])"
    np.testing.assert_array_equal(other.mask.params["doc_2"], ORDER)
    assert str(att.at(q="q + 1").at(q="2 * q").mask) == "same(doc, q = 2 * q + 1)"
    assert att.at(q="q + s[b]") is att.at(q="q + s[b]")
    first, *_ = [att.at(q=n) for n in range(40)]  # another number at every step: the oldest are let go
    assert att.at(q=39) is att.at(q=39)
    assert att.at(q=0) is not first
    with pytest.raises(ParameterError, match="`pos` is given and no coordinate uses it"):
        att.at(q="q + 1", pos=ORDER)
    with pytest.raises(ParameterError, match=r"at\(\) takes coordinates"):
        att.at(pos=ORDER)
    assert str(att.at().mask) == "same(doc)"  # the coordinates of an order that moves nothing


def test_a_plan_is_for_its_positions():
    att = fk.compile(dropout=0.5, backend="library")
    q = torch.ones(1, 1, 4, 8)
    there = att.at(q="q + 3")
    with pytest.raises(ParameterError, match="the plan is for another mask or score mod"):
        there(q, q, q, plan=att.plan(4, 4), seed=0)
    want = fk.attention(torch.ones(1, 1, 7, 8), q, q, dropout=0.5, seed=5)[:, :, 3:]
    torch.testing.assert_close(there(q, q, q, seed=5), want)
    run = torch.compile(lambda q: there(q, q, q, seed=5), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(q), want)


def test_a_name_of_the_masks_own():
    q = torch.zeros(1, 2, 4, 16)
    with pytest.raises(fk.ParameterError, match="rename it in the text, for example `my_pages`"):
        fk.attention(q, q, q, "k < pages[q]", pages=torch.arange(4))
    bound = fk.mask("k < pages[q]", pages=np.arange(4))
    assert fk.attention(q, q, q, bound).shape == q.shape
