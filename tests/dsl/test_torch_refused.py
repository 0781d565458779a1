"""What a torch callable may not do: each error names the operation and the user's line, and says what to write."""

# ruff: noqa: E501 (one row, one case)

from __future__ import annotations

import inspect
import linecache

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812

import frisket as fk  # noqa: E402
from frisket.dsl.errors import TraceError  # noqa: E402
from frisket.dsl.from_python.trace import trace  # noqa: E402

doc = torch.tensor([0, 0, 1, 1])
bias = torch.ones(2, 3, 4, 4)
learned = torch.nn.Parameter(torch.ones(4))
sparse = torch.eye(4).to_sparse()
meta = torch.empty(4, device="meta")
complex_ = torch.ones(4, dtype=torch.complex64)


def assigned(b, h, q, k):
    bias[0] = 1
    return q > k


def iadded(score, b, h, q, k):
    x = bias[0, 0, 0, 0]
    x = x.mul_(2)
    return score + x


REFUSED = [
    (lambda b, h, q, k: q >= k and k > 2, "write `(x) & (y)` for `x and y`"),
    (lambda b, h, q, k: q >= k or k > 2, "write `(x) | (y)` for `x or y`"),
    (lambda b, h, q, k: not q >= k, "write `~(x)` for `not x`"),
    (lambda b, h, q, k: k > 2 if q >= k else k > 3, "write `torch.where(condition, a, b)` for `a if condition else b`"),
    (lambda b, h, q, k: 0 <= q - k < 4, "write `(a <= x) & (x < b)` for `a <= x < b`"),
    (lambda b, h, q, k: min(q, k) > 2, "write `torch.minimum(x, y)` for `min(x, y)`"),
    (lambda b, h, q, k: any([q > k, k > 3]), "write `(x) | (y)` for `any([x, y])`"),
    (lambda b, h, q, k: q.item() > 0, "`.item()` of a position: it has no value while the function is traced"),
    (lambda b, h, q, k: int(q) > 0, "int() of a position"),
    (lambda b, h, q, k: range(q) and q > 0, "no range(), no Python indexing"),
    (lambda b, h, q, k: [1, 2][q] > 0, "no range(), no Python indexing"),
    (lambda b, h, q, k: q.shape[0] > 0, "its shape is (): capture the length in a variable of the function"),
    (lambda b, h, q, k: q[0] > k, "a position has 0 axes, indexed with 1"),
    (lambda b, h, q, k: torch.randn(4)[q] > 0, "`torch.randn` gives other numbers at every call; in the language"),
    (lambda s, b, h, q, k: F.dropout(s), "`torch.dropout` gives other numbers at every call"),
    (lambda s, b, h, q, k: s.add_(1), "`add_` changes a tensor in place: write the new value, as in `x = x + 1`"),
    (assigned, "`__setitem__` changes a tensor in place"),
    (iadded, "`mul_` changes a tensor in place"),
    (lambda s, b, h, q, k: torch.sin(s, out=bias), "`sin` changes a tensor in place"),
    (lambda b, h, q, k: doc[q / 2] > k, "`doc` is indexed with a Float; an index is one Int per axis"),
    (lambda b, h, q, k: doc[q.float()] > k, "`doc` is indexed with a Float"),
    (lambda b, h, q, k: doc[q > k] > k, "`doc` is indexed with a Bool"),
    (lambda b, h, q, k: doc[q, k] > k, "`doc` has 1 axes, indexed with 2"),
    (lambda b, h, q, k: doc[4] > k, "`doc` is indexed with 4, and its axis has 4 entries"),
    (lambda b, h, q, k: doc[:q].sum() > k, "no range(), no Python indexing"),
    (lambda b, h, q, k: (doc + bias[b, h, q, :3])[k] > 0, "arrays of shapes 4 and 3 meet in `add`"),
    (lambda b, h, q, k: torch.arange(q).sum() > k, "`torch.arange` of a position has no counterpart in the language: its"),
    (lambda b, h, q, k: torch.cumsum(bias[0, 0, q], 0)[k] > 0, "`torch.cumsum` of a position has no counterpart"),
    (lambda s, b, h, q, k: torch.fft.fft(bias[b, h, q])[0] + s, "`torch.fft.fft` of a position has no counterpart"),
    (lambda s, b, h, q, k: torch.inner(bias[b, h], bias[b, h, :q.ndim])[0, 0] + s, "`inner` of arrays with 2 and 2 axes"),
    (lambda s, b, h, q, k: F.linear(bias[b, h], bias[b, h, q])[0] + s, "`linear` of an array with 2 axes: it takes one vector"),
    (lambda s, b, h, q, k: torch.max(bias[b, h, q], -1)[0] + s, "gives indices too, which a mask cannot hold: write"),
    (lambda s, b, h, q, k: s.numpy(), "`torch.Tensor.numpy` of a position has no counterpart in the language"),
    (lambda s, b, h, q, k: s.imagined, "a position has no `imagined`"),
    (lambda s, b, h, q, k: s.detach() + 1, "`detach` of a value that depends on a position"),
    (lambda s, b, h, q, k: s + learned[q].detach(), "`detach` of a value that depends on a position"),
    (lambda s, b, h, q, k: torch.complex(s, s), "`torch.complex` of a position has no counterpart"),
    (lambda b, h, q, k: doc[q].to(torch.complex64) > k, "complex64 has no counterpart in the language"),
    (lambda b, h, q, k: (q > k) - (k > 3), "`-` of two Bools: write `x ^ y`, or `x & ~y`"),
    (lambda s, b, h, q, k: s & 3, "`and` of a Float: compare it first"),
    (lambda s, b, h, q, k: torch.where(q > k, s), "where() received an invalid combination of arguments"),
    (lambda s, b, h, q, k: torch.norm(bias[b, h, q], p=3), "`norm` of order 3: the orders are 1, 2 and inf"),
    (lambda s, b, h, q, k: s + sparse[q, k], "`sparse` is a sparse or nested tensor: capture a dense one"),
    (lambda s, b, h, q, k: s + meta[q], "`meta` has no values to read: it is a meta or fake tensor, or inside torch.vmap or torch.func\n  give it to"),
    (lambda s, b, h, q, k: s + complex_[q], "`complex_` is of torch.complex64; tables hold bool, int or float"),
    (lambda s, b, h, q, k: torch.vmap(lambda x: x + s)(doc)[0], "inside torch.vmap or torch.func"),
    (lambda b, h, q, k: "a" + q, "a str and a position meet in `add`"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_torch_errors_name_the_line_of_the_user(fn, message):
    before = bias.clone()
    with pytest.raises(TraceError) as caught:
        trace(fn)
    text = str(caught.value)
    assert message in text
    line = int(text.split(f"{__file__}:")[1].split("\n")[0])
    first = inspect.unwrap(fn).__code__.co_firstlineno
    assert first <= line <= first + 3
    assert text.split("\n")[-1].strip() == linecache.getline(__file__, line).strip()
    assert torch.equal(bias, before), "nothing the user holds is changed"


WHOLE = [
    (lambda b, h, q, k: bias, "this lambda returns an array of 2x3x4x4; index it, or reduce it as in `.any(-1)`"),
    (lambda b, h, q, k: bias[q], "this lambda returns an array of 3x4x4"),
    (lambda b, h, q, k: torch.ones(3, dtype=torch.bool), "this lambda returns an array of 3"),
    (lambda b, h, q, k: (q > k, k), "this lambda returns a tuple"),
    (lambda b, h, q, k: None, "this lambda returns nothing"),
    (lambda b, h, q, k: q - k, "a mask returns a Bool, this lambda returns an Int; compare it with something"),
    (lambda b, x, q: q, "this lambda takes b, x, q; name its arguments among b, h, q, k (and score), or take four"),
    (lambda a, b, c, d, e, f: a, "this lambda takes a, b, c, d, e, f"),
    (
        lambda q_idx, k, b, h: q_idx > k,
        "this lambda takes q_idx, k, b, h; by place `k` would be `h`, since not all are",
    ),
    (
        lambda b, h, score, q, x: q > x,
        "this lambda takes b, h, score, q, x; by place `b` would be `score`, since not all",
    ),
]


@pytest.mark.parametrize(("fn", "message"), WHOLE, ids=[m for _, m in WHOLE])
def test_torch_functions_of_a_wrong_form_are_refused(fn, message):
    with pytest.raises(TraceError) as caught:
        fk.mask(fn)
    assert str(caught.value).startswith(message)


def test_a_score_mod_of_four_by_place_would_lose_the_score():
    with pytest.raises(TraceError, match=r"takes s, h, q, k; name .* or take five \(score, b, h, q, k\) by place"):
        fk.score(lambda s, h, q, k: s - h * (q - k))
    assert str(fk.score(lambda b, h, q, k: 0.5 * (q - k))) == "0.5 * (q - k)"


def test_an_index_that_torch_would_wrap_is_found():
    shifted = fk.mask(lambda b, h, q, k: doc[q - 1] == doc[k])
    wrapped, _ = shifted.layout(4, 4).lookups
    assert (wrapped.proved, wrapped.witness, wrapped.value) == (False, (0, 0, 0, 0), -1)
    guarded = fk.mask(lambda b, h, q, k: (q > 0) & (doc[q - 1] == doc[k]))
    assert all(one.proved for one in guarded.layout(4, 4).lookups)
