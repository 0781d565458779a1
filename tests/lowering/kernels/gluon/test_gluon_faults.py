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

from frisket.dsl.sugar import k, score

CASE = Case(causal & (k % 7 > 0), q_len=200, kv_len=700, sizes=(1, 1, 700, 700), origin=(0, 0, 500, 0), heads=1,
            kv_heads=1, dtype="bfloat16", block=(128, 64))  # fmt: skip
SIZES = {"q_len": 256, "kv_len": 384, "sizes": (1, 1, 256, 384), "origin": (0, 0, 0, 0)}  # no border tile is first
RISING = CASE.but(
    mask=None, score=score + 0.2 * k, block=(256, 128), dim=128, v_dim=128, **SIZES
)  # whose sums every tile rescales
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
SECOND_K = re.escape("load_tile(K1, [batch, kv_head, tile * BLOCK_K, 128], k_full.index(slot), keys1.index(slot))\n")
IN_PARTS = {  # of heads of 192
    "bytes of the first part alone": (
        r"mbarrier.expect\(k_full.index\(slot\), K0.block_type.nbytes \+ K1.block_type.nbytes\)",
        1,
        "mbarrier.expect(k_full.index(slot), K0.block_type.nbytes)",
        "bytes arrive where",
    ),
    "no copy of the second part": (SECOND_K, 1, "pass\n", "bytes short"),
    "a copy of the first part alone": (
        rf"(K0.block_type.nbytes) \+ K1.block_type.nbytes(\)\n(?:.*\n).*){SECOND_K}",
        1,
        r"\1\2pass\n",
        "keys1.*(nobody has written|before it is known)",
    ),
    "values of the second part not expected": (
        r"mbarrier.expect\(v_full.index\(slot\), V0.block_type.nbytes \+ V1.block_type.nbytes\)",
        1,
        "mbarrier.expect(v_full.index(slot), V1.block_type.nbytes)",
        "bytes arrive where",
    ),
    "too few products awaited": (
        r"warpgroup_mma_wait\(2, \[score\]\)",
        2,
        "warpgroup_mma_wait(3, [score])",
        "not been waited for",
    ),
    "sums of the second part not awaited": (
        r"acc0, acc1 = hopper.warpgroup_mma_wait\(0, \[acc0, acc1\]\)",
        3,
        "acc0 = hopper.warpgroup_mma_wait(1, [acc0])",
        "Product|not been waited for",
    ),
    "values released too early": (
        r"( +)(acc0, acc1 = hopper.warpgroup_mma_wait\(0, \[acc0, acc1\]\)\n)"
        r" +(mbarrier.arrive\(v_free.index\(before\), count=1\)\n)",
        3,
        r"\1\3\1\2",
        "is reading it|before it is known",
    ),
    "queries of the second part not expected": (
        r"mbarrier.expect\(q_full.index\(half\), Q0.block_type.nbytes \+ Q1.block_type.nbytes\)",
        1,
        "mbarrier.expect(q_full.index(half), Q0.block_type.nbytes)",
        "bytes arrive where",
    ),
    "no fence": (r"hopper.fence_async_shared\(\)", 1, "pass", "without a fence"),
}
KEYS = r"(turn = 2 \* n\n +slot = turn % STAGES\n +)"  # lines before the wait for keys, and for values
VALUES = r"(turn = 2 \* n - 1.*\n +slot = turn % STAGES\n +)"
WAIT = r"mbarrier.wait\(full.index\(slot\), turn // STAGES & 1\)"
WEIGHTS = r"mbarrier.wait\(p_full.index\(half \* 2 \+ piece\), \(n - 1\) & 1\)"
STORED = r"mbarrier.arrive\(p_full.index\(half \* 2 \+ piece\), count=1\)"
FREE = r"blackwell.tcgen05_commit\(free.index\(slot\)\)"
BLACKWELL = {
    "scores not awaited": (r"mbarrier.wait\(s_full.index\(half\), n & 1\)", 2, "pass", "scores.*(nobody|before it is)"),
    "weights not awaited": (WEIGHTS, 1, "pass", "scores.*(holds float32, read as bfloat16|before it is known)"),
    "second weights not awaited": (
        WEIGHTS,
        1,
        "mbarrier.wait(p_full.index(half * 2), (n - 1) & 1)",
        "scores.*(holds float32, read as bfloat16|before it is known that consume[01] has written)",
    ),
    "first weights not awaited": (
        WEIGHTS,
        1,
        "mbarrier.wait(p_full.index(half * 2 + piece), (n - 1) & 1) if piece else None",
        "scores.*(holds float32, read as bfloat16|before it is known that consume[01] has written)",
    ),
    "second weights where the first are": (
        r"slice\(piece \* PIECE, PIECE\)(.store\(p)",
        2,
        r"slice(0, PIECE)\1",
        "scores.*(holds float32, read as bfloat16|before it is known)",
    ),
    "wrong phase of weights": (r"(half \* 2 \+ piece\), )\(n - 1\) & 1", 1, r"\1n & 1", "before|holds|wait"),
    "sums not awaited": (r"mbarrier.wait\(o_full.index\(half\), 0\)", 1, "pass", "sums.*before it is known"),
    "keys not awaited": (KEYS + WAIT, 1, r"\1pass", "ring.*(nobody|before)"),
    "values not awaited": (VALUES + WAIT, 1, r"\1pass", "ring.*(nobody|before)"),
    "values of the slot before": (r"turn = 2 \* n - 1", 1, "turn = 2 * n - 2", "before|wait"),
    "keys of the slot before": (r"turn = 2 \* n\n", 1, "turn = 2 * n - 1\n", "before|wait|nobody"),
    "slot not awaited": (
        r"mbarrier.wait\(free.index\(slot\), n // STAGES & 1 \^ 1\)",
        2,
        "pass",
        "copies to it|still to arrive|before it is known|an arrival too many",
    ),
    "a slot less in memory": (
        r"(ring = gl.allocate_shared_memory\(K.dtype, \[STAGES)",
        1,
        r"\1 - 1",
        "has 1 entries, no 1",
    ),
    "one slot for keys and values of a tile": (
        r"(\n +n \+= 1\n +)(slot = n % STAGES\n +)",
        1,
        r"\1",
        "before it is known|copies to it|all partitions wait",
    ),
    "queries not awaited": (r"mbarrier.wait\(q_full.index\(half\), 0\)", 1, "pass", "queries.*(nobody|before)"),
    "weights that no product waits for": (STORED, 2, "pass", "multiply2 waits for p_full"),
    "two arrivals where one counts": (
        STORED,
        2,
        "mbarrier.arrive(p_full.index(half * 2 + piece), count=2)",
        "an arrival too many",
    ),
    "a barrier of two arrivals": (
        r"mbarrier.init\(p_full.index\(piece\), count=1\)",
        1,
        "mbarrier.init(p_full.index(piece), count=2)",
        "multiply2 waits for p_full",
    ),
    "scores without a commit": (r"blackwell.tcgen05_commit\(s_full.index\(half\)\)", 1, "pass", "waits for s_full"),
    "slots that are never free": (FREE, 2, "pass", "waits for free"),
    "slots that are free after one half": (
        rf"if half == 1:(\n +{FREE})",
        2,
        r"if half == 0:\1",
        "ring.*before it is known|all partitions wait",
    ),
    "keys that are free before their product": (
        r"( +)(blackwell.tcgen05_mma\(query, key, scores.index\(half\), use_acc=False\)\n)"
        rf"( +if half == 1:\n +{FREE}\n)",
        1,
        r"\3\1\2",
        "ring.*before it is known that multiply2's products has read it",
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


BEFORE = r"o_full.index\(\(n \+ 1\) % 2\), \(n \+ 1\) // 2 & 1 \^ 1"
ONE_GROUP = {  # heads past 128, whose scores are a tile ahead
    "sums not awaited": (r"mbarrier.wait\(o_full.index\(2\), 0\)", 1, "pass", "sums"),
    "rescaled during a product": (
        rf"mbarrier.wait\({BEFORE}\)(\n +for part in gl.static_range\(4\):\n +some)",
        2,
        r"pass\1",
        "sums.*before it is known",
    ),
    "one tile of scores": (r"scores.index\(.*?% 2\)", 6, "scores.index(0)", "scores"),
    "scores of the tile before": (r"(score = scores.index\()n % 2", 2, r"\1(n + 1) % 2", "scores"),
    "weights of the other tile": (r"(weights_in\(scores.index\()\(n \+ 1\) % 2", 1, r"\1n % 2", "scores"),
    "weights of another phase": (r"\(n \+ 1\) // 2 & 1 \^ 1\)(\n +weights)", 1, r"(n + 1) // 2 & 1)\1", "scores|wait"),
    "one barrier of sums": (r"o_full.index\(\(n \+ 1\) % 2\), .*\)", 2, "o_full.index(0), (n - 1) & 1)", "sums|wait"),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 4))])
@pytest.mark.parametrize("name", ONE_GROUP)
def test_faults_of_one_group_are_seen(monkeypatch, name, seed):
    check_seen(monkeypatch, RISING.but(block=(128, 64), dim=256, v_dim=256), seed, *ONE_GROUP[name], arch="sm_100")


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
    check_seen(monkeypatch, CASE.but(block=(256, 128), dim=128, v_dim=128), seed, *BLACKWELL[name], arch="sm_100")


@pytest.mark.parametrize("seed", range(3))
def test_sums_that_are_rescaled_after_their_product_began(monkeypatch, seed):
    """The first weights are told of before the sums are rescaled: a product may add to them meanwhile."""
    change = r"(\n +)if piece == 0:(\n +if any_grown:)", 2, r"\1if piece == 1:\2"
    words = "sums.*before it is known|sums.*has read it"
    check_seen(monkeypatch, RISING, seed, *change, words, arch="sm_100")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 3))])
@pytest.mark.parametrize("name", IN_PARTS)
def test_faults_of_heads_in_two_parts_are_seen(monkeypatch, name, seed):
    check_seen(monkeypatch, CASE.but(dim=192, v_dim=192, q_len=100), seed, *IN_PARTS[name])


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
