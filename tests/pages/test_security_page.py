"""SECURITY.md against the source: its limits are the constants and hold, its list of what loads code is whole."""

import ast
import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.pages import sources

import frisket as fk
from frisket.dsl.errors import FrisketError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.program import parse_expression
from frisket.runtime.cli.show import array_of_file
from frisket.runtime.explore.answer import answer

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
LIMITS = {c: float(n.replace(",", "")) for n, c in re.findall(r"^\| [^|]+ \| ([\d,.]+) \| `([\w.]+)` \|$", PAGE, re.M)}
PLACES = set(re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \| ", PAGE, re.M))
# calls that load machine code, run text as Python, read pickles or start programs; `np.load` may read pickles
LOADERS = re.compile(
    r"(ctypes\.\w*(CDLL|PyDLL|LoadLibrary)|(torch\.ops|torch\.classes)\.load_library|.*\bregister_ffi_target"
    r"|exec|eval|__import__|importlib\.util\.spec_from_file_location|runpy\.\w+"
    r"|(pickle|cPickle|dill|cloudpickle|marshal|joblib|shelve)\.(loads?|Unpickler|open)|(np|numpy|torch)\.load"
    r"|subprocess\.\w+|os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*))$"
)


def test_security_limits_are_constants_of_the_source():
    assert len(LIMITS) == PAGE.count("| `frisket.") == 26
    for name, value in LIMITS.items():
        module, _, constant = name.rpartition(".")
        assert getattr(importlib.import_module(module), constant) == value, name


def test_security_page_lists_each_place_that_loads_code():
    found = set()
    for file, nodes in sources().walked.items():
        froms = [n for n in nodes if isinstance(n, ast.ImportFrom)]
        names = {x.asname or x.name: f"{n.module}.{x.name}" for n in froms for x in n.names}
        for node in nodes:
            if isinstance(node, ast.Call):
                first, dot, rest = ast.unparse(node.func).partition(".")
                if LOADERS.match(name := names.get(first, first) + dot + rest):
                    found.add((file, name))
    assert found == PLACES


def chained(n, step="f{i}"):
    return "\n".join(["def f0 = q > k", *(f"def f{i + 1} = " + step.format(i=i) for i in range(n)), f"f{n}"])


BEYOND = {  # constant: a text that is one too long, deep or large
    "MAX_TEXT": "q > k" + " " * 65_532,
    "MAX_NESTING": "(" * 201 + "q > k" + ")" * 201,
    "MAX_NODES": chained(20, "f{i} & f{i}"),
    "MAX_CALLS": chained(201),
    "MAX_RANGE": "any(j in 0..4097: q > j)",
    "MAX_REDUCTIONS": "".join(f"any(j{i} in 0..1: " for i in range(7)) + "q > j0" + ")" * 7,
}  # fmt: skip
WITHIN = {
    "MAX_TEXT": "q > k" + " " * 65_531, "MAX_NESTING": "(" * 200 + "q > k" + ")" * 200,
    "MAX_CALLS": chained(199), "MAX_RANGE": "any(j in 0..4096: q > j)",
    "MAX_REDUCTIONS": "".join(f"any(j{i} in 0..1: " for i in range(6)) + "q > j0" + ")" * 6,
}  # fmt: skip


@pytest.mark.parametrize("constant", BEYOND)
def test_a_text_past_its_limits_is_refused(constant):
    (value,) = (v for name, v in LIMITS.items() if name.endswith(f".{constant}") and ".dsl." in name)
    value = LIMITS["frisket.dsl.parse.MAX_NODES"] if constant == "MAX_CALLS" else value  # so its error says
    with pytest.raises(FrisketError, match=f"more than {value:,.0f}"):
        fk.mask(BEYOND[constant])
    if constant in WITHIN:
        fk.mask(WITHIN[constant])


def test_reductions_and_analyses_have_budgets():
    sums = "".join(f"sum(j{i} in 0..4096: " for i in range(3)) + "q * j0 * j1 ^ j2" + ")" * 3
    with pytest.raises(FrisketError, match="17,179,869,184"):
        evaluate(parse_expression(f"{sums} > k"), {"q": np.arange(1), "k": np.arange(1)})
    facts = fk.mask("(q * q * 7919 + k * k * k) % 104729 < 50").layout(1 << 20, 1 << 20).facts
    assert not facts.exact


def test_a_table_is_no_program(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    np.save(tmp_path / "t.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    with pytest.raises(FrisketError, match="allow_pickle=False"):
        array_of_file("t=@t.npy", str(tmp_path / "t.npy"))
    assert not (tmp_path / "ran").exists()


ASKED = {"text": "causal", "q_len": 256, "kv_len": 256, "batch": 1, "heads": 1, "block": [64, 64]}


@pytest.mark.parametrize(
    "more",
    [
        {"text": "q>k" + " " * 20_000},
        {"q_len": (1 << 22) + 1},
        {"q_len": 1 << 22, "kv_len": 1 << 22, "block": [16, 16]},
        {"q_len": 1 << 22, "heads": 9},
        {"batch": 1 << 22, "heads": 1 << 22},
    ],
)
def test_explorer_refuses_requests_beyond_its_limits(more):
    assert "data" in answer(ASKED, {})
    assert "data" not in answer({**ASKED, **more}, {})


def test_explorer_answer_for_long_masks_stays_small():
    """Four million tokens, an irregular mask: the answer holds what the page draws, not the tiles."""
    found = answer({**ASKED, "text": "(q // 64 * k // 64) % 5 < 2", "q_len": 1 << 22, "kv_len": 1 << 22}, {})
    assert "data" in found
    assert len(json.dumps(found)) < 4 << 20
