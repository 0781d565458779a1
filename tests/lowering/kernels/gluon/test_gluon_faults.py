"""The interpreter of tests/support/gluon sees mistakes: each is planted in the kernel's text, and found in every
schedule that is tried."""

import re

import numpy as np
import pytest
from support.attention_cases import Case, causal
from support.gluon import numbers
from support.gluon.call import check, install, run
from support.gluon.machine import DeadlockError, FaultError
from support.gluon.numbers import Tensor, tensor

from frisket.dsl.sugar import k

CASE = Case(causal & (k % 7 > 0), q_len=200, kv_len=700, sizes=(1, 1, 700, 700), origin=(0, 0, 500, 0), heads=1,
            kv_heads=1, dtype="bfloat16", block=(128, 64))  # fmt: skip
WAIT_K = "mbarrier.wait(k_full.index(slot), phase)\n"
LOADED_K = re.escape("load_tile(K, [batch, kv_head, tile * BLOCK_K, 0], k_full.index(slot), keys.index(slot))\n")
# what is changed in the text, how often it stands there, by what, and what is said of it
FAULTS = {
    "missing arrival": (r"mbarrier.arrive\(k_free.index\(slot\), count=1\)\n", 3, "pass\n", "k_free"),
    "missing arrival of values": (r"mbarrier.arrive\(v_free.index\(before\), count=1\)\n", 3, "pass\n", "v_free"),
    "one arrival too many": (
        r"(mbarrier.arrive\(k_free.index\(slot\), count=)1",
        3,
        r"\g<1>2",
        "an arrival too many|copies to it|all partitions wait",
    ),
    "arrival of one half": (
        r"mbarrier.init\(k_free.index\(slot\), count=2\)",
        1,
        "mbarrier.init(k_free.index(slot), count=1)",
        "too many|copies to it|all partitions wait",
    ),
    "wrong phase of the producer": (r"phase = n // STAGES & 1 \^ 1", 1, "phase = n // STAGES & 1", "produce"),
    "phase that does not turn": (
        r"slot, phase = n % STAGES, n // STAGES & 1",
        3,
        "slot, phase = n % STAGES, n * 0",
        "before it is known|all partitions wait",
    ),
    "wrong phase of values": (
        r"before, before_phase = slot, phase",
        3,
        "before, before_phase = slot, phase ^ 1",
        "nobody has written|before it is known|all partitions wait",
    ),
    "one stage too few": (r"(keys = gl.allocate_shared_memory\(K.dtype, \[STAGES)", 1, r"\1 - 1", "no 1"),
    "one stage less in the phases": (
        r"(slot, phase = n % )STAGES, n // STAGES",
        3,
        r"\1(STAGES - 1), n // (STAGES - 1)",
        "before it is known|all partitions wait",
    ),
    "released too early": (
        r"( +)(score = hopper.warpgroup_mma_wait\([01], \[score\]\)\n) +(mbarrier.arrive\(k_free.index\(slot\), "
        r"count=1\)\n)",
        3,
        r"\1\3\1\2",
        "is reading it|before it is known",
    ),
    "read before the copy": (re.escape(WAIT_K), 3, "pass\n", "keys.*(nobody has written|before it is known)"),
    "values read before the copy": (
        r"mbarrier.wait\(v_full.index\(before\), before_phase\)",
        5,
        "pass",
        "values.*(nobody has written|before it is known)",
    ),
    "queries read before the copy": (
        r"mbarrier.wait\(q_full.index\(half\), 0\)",
        1,
        "pass",
        "queries.*(nobody has|before it is known)",
    ),
    "slot not awaited": (
        r"mbarrier.wait\(k_free.index\(slot\), phase\)",
        1,
        "pass",
        "copies to it|still to arrive|before it is known",
    ),
    "product not awaited": (r"score = hopper.warpgroup_mma_wait\(1, \[score\]\)", 2, "pass", "Product"),
    "too few products awaited": (
        r"warpgroup_mma_wait\(1, \[score\]\)",
        2,
        "warpgroup_mma_wait(2, [score])",
        "not been waited for",
    ),
    "sums read too early": (r"acc = hopper.warpgroup_mma_wait\(0, \[acc\]\)", 3, "pass", "Product|not been waited for"),
    "bytes that nobody expects": (
        r"mbarrier.expect\(k_full.index\(slot\), K.block_type.nbytes\)",
        1,
        "mbarrier.expect(k_full.index(slot), K.block_type.nbytes // 2)",
        "bytes arrive where",
    ),
    "bytes that never come": (
        r"mbarrier.expect\(k_full.index\(slot\), K.block_type.nbytes\)",
        1,
        "mbarrier.expect(k_full.index(slot), K.block_type.nbytes * 2)",
        "bytes short",
    ),
    "no copy": (LOADED_K, 1, "pass\n", "consume[01] waits for k_full"),
    "missing turn": (r"mbarrier.arrive\(turns.index\(1 - half\), count=1\)", 3, "pass", "turns"),
    "nobody begins": (r"mbarrier.arrive\(turns.index\(0\), count=1\)", 1, "pass", "turns"),
    "no fence": (r"hopper.fence_async_shared\(\)", 1, "pass", "without a fence"),
    "result not awaited": (r"tma.store_wait\(0\)", 1, "pass", "ends while a copy is under way"),
}
BLACKWELL = {
    "scores not awaited": (r"mbarrier.wait\(s_full.index\(half\), n & 1\)", 2, "pass", "scores.*(nobody|before it is)"),
    "weights not awaited": (
        r"mbarrier.wait\(p_full.index\(half\), \(n - 1\) & 1\)",
        1,
        "pass",
        "holds float32, read as bfloat16|before it is known",
    ),
    "wrong phase of weights": (
        r"p_full.index\(half\), \(n - 1\) & 1",
        1,
        "p_full.index(half), n & 1",
        "before|holds|wait",
    ),
    "sums not awaited": (r"mbarrier.wait\(o_full.index\(half\), 0\)", 1, "pass", "sums.*before it is known"),
    "keys not awaited": (r"mbarrier.wait\(k_full.index\(slot\), n // STAGES & 1\)", 1, "pass", "keys.*(nobody|before)"),
    "values not awaited": (
        r"mbarrier.wait\(v_full.index\(before\), \(n - 1\) // STAGES & 1\)",
        1,
        "pass",
        "values.*(nobody|before)",
    ),
    "queries not awaited": (r"mbarrier.wait\(q_full.index\(half\), 0\)", 1, "pass", "queries.*(nobody|before)"),
    "weights that no product waits for": (
        r"mbarrier.arrive\(p_full.index\(half\), count=1\)",
        2,
        "pass",
        "multiply2 waits for p_full",
    ),
    "two arrivals where one counts": (
        r"mbarrier.arrive\(p_full.index\(half\), count=1\)",
        2,
        "mbarrier.arrive(p_full.index(half), count=2)",
        "an arrival too many",
    ),
    "a barrier of two arrivals": (
        r"mbarrier.init\(p_full.index\(half\), count=1\)",
        1,
        "mbarrier.init(p_full.index(half), count=2)",
        "multiply2 waits for p_full",
    ),
    "scores without a commit": (r"blackwell.tcgen05_commit\(s_full.index\(half\)\)", 1, "pass", "waits for s_full"),
    "keys that are never free": (r"blackwell.tcgen05_commit\(k_free.index\(slot\)\)", 1, "pass", "waits for k_free"),
    "keys that are free after one half": (
        r"if half == 1:(\n +blackwell.tcgen05_commit\(k_free)",
        1,
        r"if half == 0:\1",
        "keys.*before it is known",
    ),
    "keys that are free before their product": (
        r"( +)(blackwell.tcgen05_mma\(query, key, score, use_acc=False\)\n)( +if half == 1:\n"
        r" +blackwell.tcgen05_commit\(k_free.index\(slot\)\)\n)",
        1,
        r"\3\1\2",
        "keys.*before it is known that multiply2's products has read it",
    ),
    "sums before they are zero": (
        r"acc.slice\(part \* 64, 64\).store\(.*\)\n",
        1,
        "pass\n",
        "sums.*nobody has written",
    ),
    "more tensor memory than there is": (
        r"gl.float32, \[2, 128, DIM_V\]",
        1,
        "gl.float32, [4, 128, DIM_V]",
        "which has 512",
    ),
    "a product that nobody waits for": (
        r"blackwell.tcgen05_commit\(o_full.index\(half\)\)",
        1,
        "mbarrier.arrive(o_full.index(half), count=1)",
        "sums.*before it is known",
    ),
}


def test_without_a_fault(monkeypatch):
    install(monkeypatch)
    check(CASE, *run(CASE))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 3))])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(monkeypatch, name, seed):
    check_seen(monkeypatch, CASE, seed, *FAULTS[name])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 2))])
@pytest.mark.parametrize("name", BLACKWELL)
def test_faults_on_blackwell_are_seen(monkeypatch, name, seed):
    check_seen(monkeypatch, CASE.but(block=(256, 64), dim=128, v_dim=128), seed, *BLACKWELL[name], arch="sm_100")


def check_seen(monkeypatch, case, seed, was, count, now, words, **more):
    def change(text):
        changed, times = re.subn(was, now, text)
        assert times == count
        return changed

    install(monkeypatch, change, seed)
    with pytest.raises((FaultError, TypeError, AttributeError), match=words):
        run(case, **more)


def test_a_deadlock_says_who_waits_for_what(monkeypatch):
    install(monkeypatch, lambda text: text.replace("mbarrier.arrive(turns.index(0), count=1)", "pass"))
    with pytest.raises(DeadlockError) as caught:
        run(CASE)
    assert str(caught.value) == (
        "all partitions wait\n"
        "  consume0 waits for turns[0] in phase 0, 1 arrivals and 0 bytes short\n"
        "  consume1 waits for turns[1] in phase 0, 1 arrivals and 0 bytes short\n"
        "  produce2 waits for k_free[0] in phase 0, 2 arrivals and 0 bytes short"
    )


def test_numbers_are_those_of_a_gpu():
    big, seven = tensor(2**31 - 1), tensor(-7)
    assert int(big + 1) == -(2**31)
    assert int(seven // 2) == -3
    assert int(seven % 2) == -1
    assert (tensor(1) / 3).kind is numbers.F32
    assert float(tensor(1.0 + 2**-9).to(numbers.BF16).data) == 1.0
    assert (seven + Tensor(np.int64(1), numbers.I64)).kind is numbers.I64
    assert int(tensor(-1).to(numbers.U32) >> 31) == 1
    assert (tensor(3) * 0.5).kind is numbers.F32
