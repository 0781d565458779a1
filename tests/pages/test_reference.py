"""Public names have docstrings, and examples that run (test_doctests.py runs them)."""

import importlib
import inspect
import re
from pathlib import Path

import frisket.flex  # noqa: F401 - a BlockMask

MODULES = (
    "frisket frisket.flex frisket.caches frisket.caches.jax frisket.caches.torch frisket.modeling frisket.operations "
    "frisket.parallel frisket.select frisket.sharding"
).split()
API = Path(__file__).parents[2] / "docs" / "api"
INTERNAL = {  # methods for other modules of frisket: the pages of the reference leave them out
    "frisket.Attention": "call check_if_asked check_planned jagged jagged_names run with_total",
    "frisket.FlatPlan": "stored_as with_tables",
    "frisket.Layout": "scope",
    "frisket.Plan": "stored_as with_tables",
    "frisket.flex.BlockMask": "of",
}


def ours(what):
    inner = getattr(what, "fget", None) or getattr(what, "func", None) or getattr(what, "__func__", what)
    return (getattr(inner, "__module__", None) or "").startswith("frisket")


def public():
    """(name, docstring, docstring of its class or None, whether it is called) of every function, class, method and
    property."""
    seen = set()
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            what = getattr(module, name)
            if not callable(what) or not ours(what) or id(what) in seen:
                continue
            seen.add(id(what))
            yield f"{module.__name__}.{name}", vars(what).get("__doc__", what.__doc__) or "", None, True
            for part in dir(what) if inspect.isclass(what) else ():
                static = inspect.getattr_static(what, part)
                called = callable(static) or isinstance(static, classmethod | staticmethod)
                if (
                    (part[0] == "_" and part != "__call__")
                    or not (called or hasattr(static, "fget"))
                    or not ours(static)
                ):
                    continue
                around = "\n".join(c.__doc__ or "" for c in what.__mro__ if ours(c))
                yield f"{module.__name__}.{name}.{part}", static.__doc__ or "", around, called


def lacking(names):
    """Names without a docstring, and names that are called without an example in theirs or of their classes."""
    bare, shown = [], []
    for name, text, around, called in names:
        if not text.strip() or re.match(rf"{name.rpartition('.')[2]}\(", text):  # the second is what dataclass writes
            bare.append(name)
        part = name.rpartition(".")[2]  # a call has no name: any session of its class may have it
        used = around and re.search(">>> " if part == "__call__" else rf">>> .*\.{part}\(", around)
        if called and ">>> " not in text and not used:
            shown.append(name)
    return bare, shown


def test_public_names_have_a_docstring():
    assert lacking(public())[0] == []


def internal():
    return {f"{kind}.{name}" for kind, names in INTERNAL.items() for name in names.split()}


def test_public_names_have_an_example():
    assert {*lacking(public())[1]} - internal() == set()


def test_internal_names_are_not_in_the_reference():
    assert internal() <= {name for name, *_ in public()}
    pages = "".join(page.read_text(encoding="utf-8") for page in API.glob("*.md"))
    for kind, names in INTERNAL.items():
        (options,) = re.findall(rf"^::: {re.escape(kind)}\n((?:    .*\n)+)", pages, re.M)
        members = re.search(r"members: \[(.*)\]", options)
        for name in names.split():
            assert name not in members[1].split(", ") if members else f'"!^{name}$"' in options


def test_names_without_docstring_or_example_are_counted():
    names = [
        ("m.f", "Does it.\n\n>>> f()", None, True), ("m.g", "", None, True), ("m.C", "C(x, y)", None, True),
        ("m.C.show", "Shows.", ">>> c.show()", True), ("m.C.hide", "Hides.", ">>> c.show()", True),
        ("m.C.size", "The size.", ">>> c", False),
    ]  # fmt: skip
    assert lacking(names) == (["m.g", "m.C"], ["m.g", "m.C", "m.C.hide"])
