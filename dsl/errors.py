"""Every error of frisket: one class per kind of mistake, with a position where there is one and a way out.

Hints are for words and signs of other libraries and of mathematics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

SHOWN = 160  # characters of a line


class FrisketError(Exception):
    """The base class of all errors. `str(error)` says what is wrong, where, and how to write it right.

    >>> import frisket as fk
    >>> try:
    ...     fk.mask("causal & windw(4)")
    ... except fk.FrisketError as error:
    ...     print(error)
    there is no function `windw`
      mask 1:10
        causal & windw(4)
                 ^^^^^^^^
      did you mean `window`?
    """


@dataclass(frozen=True)
class Span:
    """A half-open range of characters `[start, stop)` in one source text."""

    start: int
    stop: int


@dataclass(frozen=True)
class TextProblem:
    """One mistake found by the parser or checker."""

    message: str
    span: Span
    remedy: str = ""


def caret(source: str, span: Span, name: str = "mask") -> tuple[str, str]:
    """("mask 1:5", the line of `source` with carets below) for a span."""
    start = min(span.start, len(source))
    line_start = source.rfind("\n", 0, start) + 1
    line_stop = source.find("\n", line_start)
    line = source[line_start : len(source) if line_stop < 0 else line_stop]
    row, column = source.count("\n", 0, start) + 1, start - line_start
    width = max(1, min(span.stop - start, len(line) - column))
    offset = max(0, min(column - 60, len(line) - SHOWN))  # a window around the caret: a page of text does not help
    if len(line) > SHOWN:
        width = min(width, 100)
    shown = "".join(c if c.isprintable() else " " for c in line[offset : offset + SHOWN])  # a tab would move the carets
    return f"{name} {row}:{column + 1}", f"{shown}\n{' ' * (column - offset)}{'^' * width}"


@dataclass
class MaskSyntaxError(FrisketError, SyntaxError):
    """A text is not in the language, or has the wrong types; lists every problem found.

    >>> import frisket as fk
    >>> fk.mask("causal &")
    Traceback (most recent call last):
    frisket.dsl.errors.MaskSyntaxError: ...
    >>> problem = TextProblem("there is no name `causl`", Span(0, 5), "did you mean `causal`?")
    >>> print(MaskSyntaxError("causl", [problem]).render())
    there is no name `causl`
      mask 1:1
        causl
        ^^^^^
      did you mean `causal`?
    """

    source: str
    problems: list[TextProblem] = field(default_factory=list)
    name: str = "mask"

    def __post_init__(self) -> None:  # tracebacks print `msg` of a SyntaxError, not its str
        self.msg = self.render()
        super().__init__(self.msg)

    def render(self) -> str:
        """The text of all problems, each with its place and its remedy."""
        parts = []
        for p in self.problems:
            where, picture = caret(self.source, p.span, self.name)
            lines = [p.message, f"  {where}", *(f"    {x}" for x in picture.split("\n"))]
            if p.remedy:
                lines.append(f"  {p.remedy}")
            parts.append("\n".join(lines))
        return "\n".join(parts)

    def __str__(self) -> str:
        return self.render()

    def __reduce__(self) -> tuple[Any, ...]:  # `args` has the rendered text alone, `__init__` takes three fields
        return (type(self), (self.source, self.problems, self.name))


class TraceError(FrisketError):
    """A Python callable did something that the language cannot express.

    >>> import frisket as fk
    >>> fk.mask(lambda b, h, q, k: q >= k and q < 4)
    Traceback (most recent call last):
    frisket.dsl.errors.TraceError: ...
    """


class ParameterError(FrisketError, ValueError):
    """A parameter or table is unbound, unused, reserved, or of the wrong rank, dtype or size.

    >>> import frisket as fk
    >>> fk.mask("window(w)").layout(64, 64)
    Traceback (most recent call last):
    frisket.dsl.errors.ParameterError: ...
    """


class UnknownNameError(ParameterError, KeyError):
    """A name is looked up and not defined anywhere; also a KeyError."""

    __str__ = Exception.__str__  # a KeyError would quote it


class ShapeError(FrisketError, ValueError):
    """Arrays or lengths do not fit together.

    >>> import frisket as fk
    >>> fk.mask("causal").layout(-1, 64)
    Traceback (most recent call last):
    frisket.dsl.errors.ShapeError: ...
    """


class EvaluationError(FrisketError, ValueError):
    """An expression has no value at these positions. `clause` is the Expr whose integers leave 64 bits, if they do.

    >>> import frisket as fk
    >>> try:
    ...     fk.mask("causal & (q & (1 << 63)) != 0").dense(4, 4)
    ... except fk.EvaluationError as error:
    ...     print(error)
    an integer leaves 64 bits in `1 << 63`
      mask 1:16
        causal & (q & (1 << 63)) != 0
                       ^^^^^^^
      to test a bit write `(q >> 63) & 1`
    """

    clause: Any = None


class LoweringError(FrisketError):
    """A backend cannot make a kernel for a mask or score mod; the text says why and what can be done.

    >>> import frisket as fk
    >>> fk.compile("causal").source("dense")  # it runs library calls
    Traceback (most recent call last):
    frisket.dsl.errors.LoweringError: ...
    """


class BackendError(FrisketError, RuntimeError):
    """A backend is unknown, or not usable on this machine.

    >>> import frisket as fk
    >>> fk.compile("causal", backend="tritn")
    Traceback (most recent call last):
    frisket.dsl.errors.BackendError: ...
    """


class MissingPackageError(ModuleNotFoundError, BackendError):
    """An optional package is not installed; the text names the extra that brings it.

    >>> issubclass(MissingPackageError, ImportError) and issubclass(MissingPackageError, BackendError)
    True
    """


class BackwardError(FrisketError, NotImplementedError):
    """Gradients are asked of a forward-only backend."""


class MismatchError(FrisketError, AssertionError):
    """The result of a kernel differs from the reference's.

    >>> from frisket import Report
    >>> Report(out=0.5, lse=0.0, dense_out=1e-7, dense_lse=1e-7, dtype="float32").require()
    Traceback (most recent call last):
    frisket.dsl.errors.MismatchError: ...
    """


class ExportError(FrisketError, ValueError):
    """A layout does not fit an export format; the text says which part does not, and which format does.

    >>> import frisket as fk
    >>> fk.mask("q % 3 == k % 3").layout(64, 64).to_flashmask()
    Traceback (most recent call last):
    frisket.dsl.errors.ExportError: ...
    """


class CapacityError(FrisketError, RuntimeError):
    """A KV cache has no room for more tokens; the cache has not changed.

    >>> from frisket.caches import PagePool
    >>> PagePool(pages=1, page=16).allocate("prompt", 40)
    Traceback (most recent call last):
    frisket.dsl.errors.CapacityError: ...
    """


class PeerError(FrisketError, RuntimeError):
    """Processes of a group ask for different things, or one of them does not answer; the text names them.

    >>> issubclass(PeerError, FrisketError) and issubclass(PeerError, RuntimeError)
    True
    """


class BudgetError(FrisketError):
    """An exact answer would cost more than the stated budget.

    >>> import frisket as fk
    >>> fk.mask("any(i in 0..4000: any(j in 0..4000: (q * i + j) % 7 == k))").dense(256, 256)
    Traceback (most recent call last):
    frisket.dsl.errors.BudgetError: ...
    """


class Undecided(FrisketError):  # noqa: N818 (a public name)
    """A question about a mask is beyond the budget; the answer is not guessed.

    >>> import frisket as fk
    >>> fk.mask("q * q % 7 < k * k % 11").implies("causal", 4096, 4096, budget=1)
    Traceback (most recent call last):
    frisket.dsl.errors.Undecided: ...
    """


_GLYPHS = "≥:>= ≤:<= ≠:!= ∧:& ∨:| ¬:~ ⊕:^ ×:* ·:* ÷:/ −:- ∞:inf π:pi ≪:<< ≫:>>"
GLYPHS = dict(pair.split(":") for pair in _GLYPHS.split())
TURNED = {("=", ">"): ">=", ("=", "<"): "<="}  # two signs in the other order
POSITIONS = {
    **dict.fromkeys(("q_idx", "query_idx", "query", "qi", "q_index", "row", "i"), "q"),
    **dict.fromkeys(("kv_idx", "k_idx", "key_idx", "key", "kv", "ki", "kv_index", "col", "j"), "k"),
    **dict.fromkeys(("b_idx", "batch", "batch_idx"), "b"),
    **dict.fromkeys(("h_idx", "head", "head_idx"), "h"),
}
KEYWORDS = {  # of attention elsewhere -> what says it here
    **dict.fromkeys(("is_causal", "causal"), 'write mask="causal"'),
    **dict.fromkeys(("attn_mask", "attention_mask"), 'a dense mask is a table: mask="t[b, h, q, k]", t=...'),
    **dict.fromkeys(("mask_mod", "block_mask"), "give it as mask="),
    **dict.fromkeys(("score_mod",), "give it as score="),
    **dict.fromkeys(("bias", "attn_bias"), 'a bias is a table: score="score + t[b, h, q, k]", t=...'),
    **dict.fromkeys(("dropout_p", "dropout_rate", "dropout_prob"), "write dropout= in frisket.compile or attention"),
    "window_size": 'write mask="flash_window(left, right)"',
    "local_window_size": 'write mask="sliding(left, right)"',
    "sliding_window": 'write mask="sliding_window(w)"',
    **dict.fromkeys(("softcap", "logits_soft_cap", "attn_logits_soft_cap"), 'write score="softcap(50)"'),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), 'write mask="document(off)", off=...'),
    **dict.fromkeys(("softmax_scale", "sm_scale"), "write scale="),
    **dict.fromkeys(("divisor", "normalizer"), "write divide="),
    "alibi_slopes": 'write score="alibi(slopes)", slopes=...',
    "segment_ids": 'write mask="same_by_batch(ids)", ids=...',
}
OF_COMPILE = (
    "mask score weight divide scale dropout backend tile engines reorder deterministic enable_gqa invariant".split()
)
CALL_KEYWORDS = [
    *"mask score weight divide scale sinks dropout seed backend return_lse return_max return_sums origin sizes".split(),
    *"axes layout plan".split(),
]
CALLED = [*CALL_KEYWORDS, *"invariant enable_gqa deterministic tile k_scale v_scale pages".split()]


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant; a name that differs only in case is nearest."""
    # difflib counts a change of case as a change of letters
    folded = {n.casefold(): n for n in names}
    return next((folded[n] for n in get_close_matches(name.casefold(), folded, 1, 0.6)), None)


def looks_like_lengths(name: str) -> str:
    return f"these look like lengths: give numpy.cumsum([0, *{name}])"


def misnamed(name: str) -> str:
    """The hint for a name that other libraries give a position; empty for any other name.

    >>> misnamed("q_idx")
    'positions are `b`, `h`, `q` and `k`: write `q`'
    """
    return f"positions are `b`, `h`, `q` and `k`: write `{POSITIONS[name]}`" if name in POSITIONS else ""


def keyword(name: str, names: Sequence[str] = (), called: Sequence[str] = CALLED) -> str:
    """The hint for a keyword that neither a call nor a mask knows; empty for keywords without a hint.

    `names` are the parameters of the mask and the score mod, `called` the keywords of the call.

    >>> keyword("is_causal"), keyword("scal"), keyword("docs", ["doc"])
    ('write mask="causal"', 'did you mean the keyword `scale`?', 'did you mean `doc`?')
    >>> keyword("casual"), keyword("casual", called=["causal", "bias"])
    ('write mask="causal"', 'did you mean the keyword `causal`?')
    """
    if called is CALLED and name in OF_COMPILE:
        return f"`{name}=` belongs to `frisket.compile`"
    # elsewhere such a name may be right: the hints are those of attention calls
    elsewhere = KEYWORDS if called is CALLED else {}
    # a parameter of the mask is nearer than a keyword of the call
    if name not in elsewhere and (near := nearest(name, names)):
        return f"did you mean `{near}`?"
    near = next(iter(get_close_matches(name, [*elsewhere, *called], 1, 0.75)), "")
    return elsewhere.get(near) or (near and f"did you mean the keyword `{near}`?")


def dense(kind: str, axes: int) -> str:
    """The hint for a dense mask or bias that is given as an array of `axes` axes."""
    index = {1: "k", 2: "q, k", 3: "h, q, k", 4: "b, h, q, k"}.get(axes, "...")
    text = f"t[{index}]" if kind == "mask" else f"score + t[{index}]"
    return f'an array is a table of the text: frisket.{"mask" if kind == "mask" else "score"}("{text}", t=...)'
