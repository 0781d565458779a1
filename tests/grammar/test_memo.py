"""Remembered answers: their bounds, what keys hold, threads, forks, counts."""

import gc
import os
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from frisket.grammar import memo as tables
from frisket.grammar.memo import Memo, memo, weight


class Thing:
    """An object that can be held weakly."""


def test_equal_arguments_have_one_answer():
    asked = []
    double = memo(4)(lambda n: asked.append(n) or 2 * n)
    assert [double(n) for n in (1, 2, 1, 2)] == [2, 4, 2, 4]
    assert asked == [1, 2]
    assert double.memo.info()[1:3] == (2, 4)
    assert double.memo.info()[4:] == (2, 2)


def test_old_entries_go():
    asked = []
    name = memo(2)(lambda x: asked.append(x) or str(x))
    for n in (1, 2, 1, 3, 1, 2):
        name(n)
    assert asked == [1, 2, 3, 2]
    assert name.memo.info().entries == 2


def test_bytes_are_bounded():
    zeros = memo(100, bytes=10_000)(lambda key: np.zeros(300))
    keys = [Thing() for _ in range(40)]
    most = 0
    for key in keys:
        zeros(key)
        assert zeros.memo.info().bytes <= 10_000
        most = max(most, zeros.memo.info().entries)
    assert most == 3


def test_an_entry_beyond_the_bound_is_kept_alone():
    table = Memo("large", 10, bytes=100)
    table.put("a", bytes(50_000))
    assert table.get("a")
    table.put("b", bytes(50_000))
    assert table.get("a") is None
    assert table.info().entries == 1


def test_memo_tables_share_a_budget_of_bytes(monkeypatch):
    tables.clear()  # those of other tests may be heavier
    heavy, light = Memo("heavy", 10), Memo("light", 10)
    heavy.put(1, bytes(50_000))
    light.put(1, bytes(100))
    monkeypatch.setattr(tables, "BUDGET", tables._total + 10_000)
    light.put(2, bytes(20_000))
    assert max(t.bytes for t in tables.tables()) <= tables.BUDGET
    assert tables._total <= tables.BUDGET
    assert light.get(1)


def test_weak_entries_go_with_their_object():
    asked = []
    x = Thing()
    tables._on_objects.clear()
    answers = [tables.cached_on(x, key, lambda key=key: asked.append(key) or key) for key in ("a", "a", "b")]
    assert answers == ["a", "a", "b"]
    assert asked == ["a", "b"]
    assert tables._on_objects.info().entries == 2
    del x
    gc.collect()
    assert tables._on_objects.info().entries == 0


def test_errors_are_not_remembered():
    asked = []

    @memo(8)
    def broken(x):
        asked.append(x)
        raise ValueError("broken")

    x = Thing()
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            broken(x)
    assert len(asked) == 2
    assert broken.memo.info().entries == 0


def test_memo_remembers_none_as_an_answer():
    asked = []
    nothing = memo(8)(lambda x: asked.append(x))
    x = Thing()
    assert nothing(x) is nothing(x) is None
    assert len(asked) == 1


def test_functions_may_call_themselves_and_each_other():
    @memo(300)
    def even(n):
        return n == 0 or odd(n - 1)

    @memo(300)
    def odd(n):
        return n != 0 and even(n - 1)

    assert even(200)
    assert not odd(200)


def test_memo_answers_are_right_under_threads():
    """Every answer is right and the counts are whole while threads ask, evict and clear."""
    sizes = memo(16, bytes=40_000)(lambda x: (x, bytes(x.size)))
    things = [Thing() for _ in range(64)]
    for n, thing in enumerate(things):
        thing.size = 100 * n
    wrong = []

    def ask(seed):
        for n in range(1500):
            thing = things[n * (2 * seed + 1) % 64]
            answer = sizes(thing)
            if answer[0] is not thing or len(answer[1]) != thing.size:
                wrong.append(answer)
            if n % 500 == 499:
                sizes.memo.clear()

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert sizes.memo.info().entries <= 16
    sizes.memo.clear()
    assert sizes.memo.info()[1:4] == (0, 16, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_locks_of_its_own():
    table = Memo("forked", 4)
    with tables._lock:  # as another thread may
        held = threading.Thread(target=lambda: table.put(1, "waits"))
        held.start()
        child = os.fork()
        if not child:
            asked = threading.Thread(target=lambda: table.put(1, "answer"), daemon=True)
            asked.start()
            asked.join(5)
            os._exit(0 if table.get(1) == "answer" else 1)
    held.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_clear_forgets_everything():
    name = memo(8)(str)
    name(1)
    other = Memo("other.table", 8)
    other.put(1, "a")
    tables.clear()
    assert other.get(1) is None
    assert name.memo.info()[1:] == (0, 8, 0, 0, 0)


def test_a_hit_by_value_enters_no_function_of_python():
    double = memo(4)(lambda n: 2 * n)
    double(1)
    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    double(1)
    sys.setprofile(None)
    assert entered == []


def test_functions_of_a_group_share_a_table(monkeypatch):
    monkeypatch.setitem(tables.GROUPS, "tests", (3, None))
    double, negative = memo(group="tests")(lambda n: 2 * n), memo(group="tests")(lambda n: -n)
    assert [double(3), negative(3), double(3), negative(3)] == [6, -3, 6, -3]
    assert double.memo is negative.memo
    assert double.memo.info()[:3] == ("tests", 2, 3)
    assert double.memo.info()[4:] == (2, 2)


def test_entries_of_one_weight_are_bounded_by_their_number():
    name = memo(1000, bytes=5000, weigh=1000)(str)
    for n in range(20):
        name(n)
    assert name.memo.info()[1:4] == (5, 5, 5000)


def test_weight_looks_into_what_an_answer_holds():
    array = np.zeros(1000)
    assert weight(array) == 8000
    assert 8000 < weight((array, array)) < 8200
    assert 16_000 < weight(SimpleNamespace(a=array, b={"c": [array + 1]})) < 17_000
    assert weight(weight, np) == 0
    deep = [array]
    for _ in range(10_000):
        deep = [deep]
    assert weight(deep) < 8000 * 10
