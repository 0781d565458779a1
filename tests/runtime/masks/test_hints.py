"""Hints of facts: clauses that show less than their name says."""

import numpy as np
import pytest

import frisket as fk

OFF, DOC = [0, 6, 16], np.array([0] * 6 + [1] * 10)
START = np.array([0] * 6 + [6] * 10)


@pytest.mark.parametrize(("text", "clause"), [
    ("causal & same(doc) & (window(4) | sinks(2))", "k < 2"), ("(sinks(n) | window(4)) & document(off)", "k < n"),
    ("same_by_batch(rows) & causal & (window(4) | q > 3 & k <= 1)", "k <= 1"),
    ("causal_document(off) & (window(4) | k < 2 | k == 7)", "k < 2"),
    ("document_by_batch(offs) & causal & (window(4) | sinks(3))", "k < 3"),
])  # fmt: skip
def test_sinks_under_a_document_mask_have_a_hint(text, clause):
    values = {"doc": DOC, "off": OFF, "rows": DOC[None], "offs": [OFF], "n": 3}
    facts = fk.mask(text, **{n: x for n, x in values.items() if n in fk.mask(text).unbound}).layout(16, 16).facts
    assert [x.partition(" shows keys of the first document alone")[0] for x in facts.hints] == [f"`{clause}`"]
    assert "hint      `" in str(facts)
    assert all(("`document_by_batch(off, m)`" in x) == ("rows" in text or "offs" in text) for x in facts.hints)


@pytest.mark.parametrize("text", [
    "causal & (window(4) | sinks(2))", "document(off, causal & (window(4) | sinks(2)))", "same(doc) & k < 12",
    "causal & same(doc) & (window(4) | k - start[k] < 2)", "document_by_batch(offs, causal & (window(4) | sinks(2)))",
])  # fmt: skip
def test_sinks_of_every_document_have_no_hint(text):
    values = {"off": OFF, "doc": DOC, "start": START, "offs": [OFF]}
    mask = fk.mask(text).bind(**{n: values[n] for n in fk.mask(text).unbound})
    assert not mask.layout(16, 16).facts.hints


def test_sinks_of_each_document_are_one_mask_in_both_forms():
    each = fk.mask("document(off, causal & (window(4) | sinks(2)))", off=OFF)
    assert each.equivalent(fk.mask("causal & same(doc) & (window(4) | k - start[k] < 2)", doc=DOC, start=START), 16, 16)
