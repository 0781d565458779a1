"""What a REPL and a notebook show of the objects that users hold."""

import copy
import pickle
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import frisket as fk

LAYOUT = fk.mask("causal").layout(512, 512)


def attention():
    return fk.compile("causal & window(w)", "softcap(50)", w=8, dropout=0.25, sinks=np.zeros(2, np.float32))


SENTENCES = {  # what the REPL prints
    "hidden: in causal, q >= k is false: q = 3, k = 9": lambda: LAYOUT.explain(3, 9),
    "visible: in causal, q >= k is true: q = 9, k = 3": lambda: LAYOUT.explain(9, 3),
    "full: in causal, q >= k is true throughout: q = 128..255, k = 0..127": lambda: LAYOUT.explain(tile=(1, 0)),
    "no: query 3 sees key 0 under the first mask and not under the second (b 0, h 0)": lambda: fk.mask(
        "causal"
    ).implies("window(3)", 9, 9),
    "yes: no query sees a key": lambda: fk.mask("q < k & k < q").is_empty(9, 9),
}


@pytest.mark.parametrize("said", SENTENCES)
def test_answers_read_as_sentences(said):
    found = SENTENCES[said]()
    assert repr(found) == str(found) == said
    assert shown(found) == said


def test_a_report_says_whether_it_is_good():
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    report = fk.compile("causal").check(q, k, v)
    assert repr(report) == shown(report) == f"good: {report}"


class Text(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.open, self.found = [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag != "script"
        if tag not in ("br", "img"):
            self.open.append(tag)
        elif tag == "br":
            self.found.append("\n")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.found.append(data)


def shown(what):
    """The text of an object's HTML, whose tags are closed."""
    return "".join(Text(what._repr_html_()).found)


def test_masks_and_attention_show_their_text_and_values():
    m = fk.mask("causal & same(doc) & window(w)", w=256, doc=np.zeros(100, np.int32))
    assert shown(m) == "maskcausal & same(doc) & window(w)docint32[100]w256"
    assert shown(fk.score("softcap(c)", c=3.0)) == "score modsoftcap(c)c3.0"
    assert shown(attention()) == ("maskcausal & window(w)score modsoftcap(50)w8dropout0.25sinks2 logits")
    assert shown(fk.compile()) == "maskeverything visible"


def test_stages_open_one_by_one():
    stages = fk.compile("causal & window(64)").stages(q_len=256)
    assert repr(stages) == str(stages)
    page = stages._repr_html_()
    assert page.count("<details>") == 7
    assert "q >= k & q - k <= 63" in shown(stages)


def test_figures_are_pictures():
    """A notebook asks an object for `_repr_png_`; matplotlib's own figures have none, unless pyplot made them."""
    pytest.importorskip("matplotlib")
    figure = LAYOUT.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert pickle.loads(pickle.dumps(figure))._repr_png_() == figure._repr_png_()
    assert copy.deepcopy(figure)._repr_png_() == figure._repr_png_()
