"""The mutants of a text, and one mutant that tests notice beside one that they cannot."""

import json
import subprocess
import sys

import pytest

from . import areas, run, table
from .mutants import mutants_of

SOURCE = '''
"""A text."""
ROWS = ["and", f(2), *(g(x) for x in ROWS if x > 1)]
TABLE = {"min": min, **OTHER}

def clamp(x: int, lo: int = 0) -> int:
    if x < lo and not x is None:
        raise ValueError(f"{x} < {lo}")
    x += 1
    return (x - r.lo, lo if x else -x)
'''
CHANGED = {
    'comparison: x > 1 -> (x >= 1)', 'comparison: x < lo -> (x <= lo)', "comparison: x is None -> (x is not None)",
    "condition left out: x < lo and not x is None -> (x < lo)",
    "and/or: x < lo and not x is None -> (x < lo or not x is None)",
    "guard left out: x < lo and not x is None -> (False)", "filter left out: x > 1 -> (True)", "constant: 2 -> (3)",
    "constant: 0 -> (1)", 'another operator: "and" -> (\'or\')', "another name: min -> max", "another name: lo -> hi",
    "arithmetic: x - r.lo -> (x + r.lo)", "operands swapped: x - r.lo -> (r.lo - x)",
    "one branch: lo if x else -x -> (lo)",
    "one branch: lo if x else -x -> (-x)", "sign left out: -x -> (x)", "statement left out: x += 1 -> pass",
    'row left out: "and", -> gone', "row left out: f(2), -> gone", 'row left out: "min": min, -> gone',
    "row left out: **OTHER -> gone", "row left out: *(g(x) for x in ROWS if x > 1) -> gone",
    "pair swapped: (x - r.lo, lo if x else -x) -> (lo if x else -x, x - r.lo)",
}  # fmt: skip
TEMPLATE = """
$# min of nothing
\"\"\"One and another,
min and max.\"\"\"
\"\"\"A line or two.\"\"\"
$if start < 0:
    if at < 10 and $held:  # + 1
        acc += min(x, y)  $if x < 1
        x = y // 2
        tl.store(Out + 1, acc)
"""
HEADER = """
#include <min> // a + b
template <int N, int M = 2> struct S {};
static int f(int n) {
    if (n < 3 && n != 1) return;
    for (int i = 0; i < n; i++) sum[i] += n * 2;
    say("a + b");
}
"""


def told(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = mutants_of(tmp_path, name)
    for m in found:
        changed = m.applied(text.encode()).decode()
        assert changed != text
        if name.endswith(".py"):
            compile(changed, name, "exec")
    return found


def test_mutants_of_python(tmp_path):
    found = told(tmp_path, "a.py", SOURCE)
    lines = {str(m).partition(" ")[2].partition(" ")[2] for m in found}
    assert lines >= CHANGED, CHANGED - lines
    assert not any("int" in line or "ValueError" in line for line in lines)
    ids = [m.id for m in found]
    assert len(set(ids)) == len(ids)
    assert [m.id for m in told(tmp_path, "a.py", "\n\n# later\n" + SOURCE)] == ids


def test_mutants_of_a_template(tmp_path):
    lines = [f"{m.line} {m.kind}: {m.before.strip()} -> {m.after.strip()}" for m in told(tmp_path, "a.tpl", TEMPLATE)]
    assert lines == [
        "7 guard left out: at < 10 and $held -> False", "7 operator: < -> <=", "7 constant: 10 -> 11",
        "7 operator: and -> or", "8 statement left out: acc += min(x, y) -> pass", "8 operator: += -> -=",
        "8 another name: min -> max", "9 operator: // -> *", "9 constant: 2 -> 3",
        "10 statement left out: tl.store(Out + 1, acc) -> pass", "10 operator: + -> -", "10 constant: 1 -> 2",
    ]  # fmt: skip


def test_mutants_of_a_header(tmp_path):
    lines = [f"{m.line} {m.kind}: {m.before.strip()} -> {m.after.strip()}" for m in told(tmp_path, "a.hpp", HEADER)]
    assert lines == [
        "5 guard left out: n < 3 && n != 1 -> false", "5 operator: < -> <=", "5 constant: 3 -> 4",
        "5 operator: && -> ||", "5 operator: != -> ==", "5 constant: 1 -> 2", "6 constant: 0 -> 1",
        "6 operator: < -> <=",
        "6 operator: += -> -=", "6 operator: * -> +", "6 constant: 2 -> 3", '7 statement left out: say("a + b"); -> ;',
    ]  # fmt: skip


IDLE = """
Real sum[WIDE + 1], more[2 * WIDE];
INLINE Real small(Real x, Real y) { return x < y ? x : y; }
INLINE Real size(Real x) { return x < 0 ? -x : x; }
INLINE Real power(Real x) { return power(reals(x))[0]; }
__builtin_prefetch(from);
"""


def test_changes_without_effect_are_not_mutants(tmp_path):
    """Larger arrays, the choice of two equal numbers, lanes that are the same, what is fetched ahead, and blank lines
    and comments of a generated text."""
    lines = [f"{m.line} {m.kind}: {m.before.strip()} -> {m.after.strip()}" for m in told(tmp_path, "a.hpp", IDLE)]
    assert lines == ["2 operator: + -> -", "2 operator: * -> +", "4 constant: 0 -> 1"]
    assert told(tmp_path, "a.py", "def f(page):\n    page.blank()\n    page.comment('rows')\n") == []


def test_mutation_areas_have_mutants_and_existing_tests():
    for groups in areas.AREAS.values():
        for group in groups:
            assert len(areas.mutants(run.ROOT, group)) > 50, group.files
            assert all((run.ROOT / t.partition("::")[0]).exists() for t in group.tests)


def test_table_of_equivalent_mutants_names_existing_lines():
    there = {m.id for groups in areas.AREAS.values() for g in groups for m in areas.mutants(run.ROOT, g)}
    known = table.equivalent()
    assert all(known.values())
    assert not set(known) - there, "the lines have changed: look at these mutants again"


def test_mutation_score_counts_outcomes():
    results = [{"outcome": o} for o in ["killed"] * 6 + ["timed out", "survived", "equivalent", "invalid"]]
    assert table.summary("rules", results) == "| rules | 10 | 1 | 1 | 6 | 1 | 1 | 87.5% |"


# one change is noticed, one is none, one never ends, one cannot be imported
RUN = """
import json, sys
sys.path[0] = "tests"
from mutation import run
from mutation.areas import Group
from mutation.mutants import Mutant

file = "lowering/simplify/rules_select.py"
text = (run.ROOT / file).read_text()
changes = {
    "killed": ("RULES = [", "RULES = [] and ["), "survived": ("RULES = [", "RULES = [*()] + ["),
    "timed out": ("def ", "while True: pass\\ndef "),
    "invalid": ("RULES = [", "RULES = nothing + ["),
}
mutants = []
for name, (before, after) in changes.items():
    start = text.index(before)
    mutants.append(Mutant(name, file, 1, "planted", before, after, start, start + len(before)))
run.SLACK = 4
group = Group((file,), ("tests/lowering/simplify/test_rules_whole.py",))
print(json.dumps({r["id"]: r["outcome"] for r in run.of_group(group, mutants)}))
"""


@pytest.mark.exhaustive
def test_mutants_are_killed_survive_time_out_or_are_invalid():
    done = subprocess.run([sys.executable, "-c", RUN], cwd=run.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: name for name in ("killed", "survived", "timed out", "invalid")}
