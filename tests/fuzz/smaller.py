"""A failure made small: the shortest program, or text, found that fails in the same way; and a test of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from outside.programs import LIBRARY, Case, Node, names, program

from .targets import Problem, trouble, what_of

LEAVES = {
    True: [Node(sign, (Node("name", held="q"), Node("name", held="k"))) for sign in (">=", "==")],
    False: [Node("number", held=0), Node("number", held=1), Node("name", held="q"), Node("name", held="k")],
}


def smaller_case(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """No single step of `steps` makes the result smaller and lets it fail, unless the time was up."""
    end = time.monotonic() + seconds
    found = True
    while found and time.monotonic() < end:
        found = False
        for one in steps(case):
            if time.monotonic() > end:
                break
            if fails(one):
                case, found = one, True
                break
    return case


def steps(case: Case) -> Iterator[Case]:
    for name in ("q_len", "kv_len", "batch", "heads"):
        n = getattr(case, name)
        for less in sorted({1, 2, n // 2, n - 1}):
            if 0 < less < n:
                yield written_again(replace(case, **{name: less}))
    for i in (0, 1):
        n = case.block[i]
        for less in sorted({1, 2, n // 2, n - 1}):
            if 0 < less < n:
                yield replace(case, block=tuple(less if i == j else x for j, x in enumerate(case.block)))
    yield from without_definition(case)
    for body in less_than(case.mask, case):
        yield written_again(replace(case, mask=body))
    for name, (params, body) in case.definitions.items():
        for less in less_than(body, case):
            yield written_again(replace(case, definitions={**case.definitions, name: (params, less)}))


def less_than(n: Node, case: Case) -> Iterator[Node]:
    """Trees with one part replaced by a part of it, or by a leaf, of the same type."""
    if n.op in ("name", "number"):
        if n.op == "number" and n.held not in (0, 1):
            yield from LEAVES[False][:2]
        return
    kind = is_bool(n, case)
    yield from (x for x in n.args if is_bool(x, case) == kind)
    if n not in LEAVES[True]:
        yield from LEAVES[kind]
    for i, x in enumerate(n.args):
        for less in less_than(x, case):
            yield replace(n, args=(*n.args[:i], less, *n.args[i + 1 :]))


def is_bool(n: Node, case: Case) -> bool:
    if n.op == "if":
        return is_bool(n.args[1], case)
    if n.op == "reduce":
        return n.held[0] != "sum"
    if n.op == "lookup":
        return n.held == "flag"  # a definition that nobody calls may read a table that the case is without
    if n.op == "call":
        return n.held in LIBRARY or is_bool(case.definitions[n.held][1], case)
    return n.op in ("and", "or", "xor", "not", "chain", "at", "<", "<=", ">", ">=", "==", "!=")


def written_again(case: Case) -> Case:
    """With its text, and without values and tables that the mask does not read."""
    read = names(case.mask, case.definitions)
    case = replace(
        case,
        **{
            key: {n: x for n, x in getattr(case, key).items() if n in read} for key in ("scalars", "tables", "defaults")
        },
    )
    case.text = program(case)
    return case


def without_definition(case: Case) -> Iterator[Case]:
    trees = {"": case.mask, **{name: body for name, (_, body) in case.definitions.items()}}
    for name in case.definitions:
        if not any(name in called(tree) for other, tree in trees.items() if other != name):
            yield written_again(replace(case, definitions={n: d for n, d in case.definitions.items() if n != name}))


def called(n: Node) -> set[str]:
    return set().union({n.held} if n.op == "call" else (), *(called(x) for x in n.args))


def same_failure(target: str, kind: str) -> Callable[[Any], bool]:
    def fails(one: Any) -> bool:
        try:
            what = what_of(target, one)
        except Exception:  # a name without its place: no program
            return False
        found = trouble(target, what)
        return found is not None and found[0] == kind

    return fails


def smaller_text(text: str, fails: Callable[[str], bool], seconds: float = 60.0) -> str:
    """Runs of characters left out, long ones first."""
    end = time.monotonic() + seconds
    size = max(1, len(text) // 2)
    while size and time.monotonic() < end:
        at, before = 0, text
        while at < len(text) and time.monotonic() < end:
            less = text[:at] + text[at + size :]
            if fails(less):
                text = less
            else:
                at += size
        size = size if text != before else size // 2
    return text


# -- as a test -------------------------------------------------------------------------------------------------


def as_test(name: str, target: str, what: Problem | str, why: str) -> str:
    """Source of a test for a module that has `from fuzz.targets import Problem, TARGETS, rows`."""
    head = f"def test_{name}():\n    # {' '.join(why.split())[:100]}\n"
    if isinstance(what, str):
        return f"{head}    TARGETS[{target!r}]({what!r})\n"
    return f"{head}    TARGETS[{target!r}]({problem_as_source(what)})\n"


def problem_as_source(what: Problem) -> str:
    batch, heads, _, kv_len = what.seen.shape
    lines = ["".join(".#"[int(x)] for x in row) for row in what.seen.reshape(-1, kv_len)]
    where = "".join(f", {n}={x}" for n, x in (("batch", batch), ("heads", heads)) if x > 1)
    bound = ", ".join(f"{n!r}: {as_source(x)}" for n, x in what.bound.items())
    seen = f"rows({', '.join(repr(x) for x in lines)}{where})"
    more = f", synonym={what.synonym!r}" if what.synonym != what.text else ""
    if what.others:
        more += f", others=({', '.join(map(problem_as_source, what.others))},)"
    if what.functions:
        more += f", functions={what.functions!r}"
    if what.points:
        more += f", points={{{', '.join(f'{n!r}: {as_source(x)}' for n, x in what.points.items())}}}"
    return f"Problem({what.text!r}, {{{bound}}}, {seen}, {what.block}{more})"


def as_source(x: Any) -> str:
    return f"np.array({x.tolist()}, {x.dtype.name!r})" if isinstance(x, np.ndarray) else repr(x)
