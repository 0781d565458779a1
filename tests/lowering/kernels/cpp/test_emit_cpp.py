"""The text of the C++ kernels: golden files, names, errors. Nothing here needs a compiler."""

import re
from dataclasses import replace

import pytest

from frisket.dsl import ir
from frisket.dsl.errors import LoweringError
from frisket.dsl.evaluate import OPERATORS
from frisket.dsl.ir import lookup, param
from frisket.dsl.sugar import b, eq, function, h, k, q, score
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.kernels.cpp import backward as cpp_backward
from frisket.lowering.kernels.cpp import call
from frisket.lowering.kernels.cpp import expr as expr_cpp
from frisket.lowering.kernels.cpp import forward as cpp
from frisket.lowering.kernels.legalise import DECOMPOSITIONS
from frisket.lowering.plan import K_SCALE, PAGES, Pages, ProgramFacts, Target, make_plan, survives
from frisket.lowering.simplify import ProgramExprs

TARGET = Target("cpp", 96, 64)
ARRAYS = cpp.CppArrays(64, 64, "float32")
causal = q >= k
documents = eq(lookup("doc", (b, q)), lookup("doc", (b, k)))
softcap = 50.0 * function("tanh", score / 50.0)
alibi = lookup("slope", (h,), FLOAT) * (k - q)
GOLDEN = {
    "full.cpp": (
        make_plan(ProgramExprs(), facts=ProgramFacts(rows_nonempty=True, score_finite=True)),
        64,
        64,
        "float64",
    ),
    "documents.cpp": (make_plan(ProgramExprs(causal & documents), "causal & same(doc)"), 80, 64, "bfloat16"),
    "softcap_alibi.cpp": (
        make_plan(
            ProgramExprs(causal, softcap + alibi), "causal\nsoftcap(50) + slope[h] * (k - q)", keep_mask=survives()
        ),
        128,
        128,
        "float32",
    ),
    "relative_bias.cpp": (
        make_plan(
            ProgramExprs(
                causal & eq(q // 3 % param("n"), k // 3 % param("n")) & lookup("seen", (k + 2,), BOOL),
                score + lookup("bias", (h, q - k + 512), FLOAT) + lookup("grid", (q // 8, k // 8), FLOAT),
            ),
            "causal & q // 3 % n == k // 3 % n & seen[k + 2]\nscore + bias[h, q - k + 512] + grid[q // 8, k // 8]",
            ProgramFacts(limits={"q": 2**33, "k": 2**33}),
        ),
        64,
        64,
        "float16",
    ),
}


def without_parts(source):
    """The source, with a line for each text that every kernel contains: the hand-written headers and the call."""
    for name in (*cpp.ARITHMETIC, "scores", "work", "forward", "forward_work", "decode"):
        source = source.replace(cpp.part(name), f'#include "{name}.hpp"\n')
    return source.replace(call.text(), '#include "call.hpp"\n')


def test_golden_record_of_a_native_call(golden):
    golden("call.hpp", call.text())


def test_golden_native_source_of_a_window(golden):
    """The whole source, with the order of its parts."""
    made = make_plan(
        ProgramExprs(causal & (q - k < param("w"))), "causal & window(w)", facts=ProgramFacts(rows_nonempty=True)
    )
    golden("window.cpp", without_parts(cpp.CppKernel(made, TARGET, ARRAYS).source()))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_native_expressions_of_each_plan(name, golden):
    """What the plan decides of the source."""
    made, *rest = GOLDEN[name]
    kernel = cpp.CppKernel(made, TARGET, cpp.CppArrays(*rest))
    golden(name, without_parts(kernel.head()) + kernel.expressions())


def test_native_source_contains_the_handwritten_headers():
    made, *rest = GOLDEN["documents.cpp"]
    source = cpp.CppKernel(made, TARGET, cpp.CppArrays(*rest)).source()
    kernel = cpp.CppKernel(made, TARGET, cpp.CppArrays(*rest))
    for part in (kernel.head(), kernel.expressions(), *map(cpp.part, (*cpp.ARITHMETIC, "forward", "decode"))):
        assert part in source
    assert "\t" not in source
    assert max(map(len, source.split("\n"))) <= 120


def plain(mask, mod, tile=(96, 64), kernel=cpp.CppKernel, **limits):
    made = kernel(
        make_plan(ProgramExprs(mask, mod), str(mod), facts=ProgramFacts(limits=limits)),
        Target("cpp", *tile),
        ARRAYS,
        named=False,
    )
    return made.source(), made.literals


@pytest.mark.parametrize("kernel", [cpp.CppKernel, cpp_backward.BackwardKernel])
def test_native_source_contains_no_lengths_names_or_numbers(kernel):
    """Lengths, names and numbers; what is computed otherwise for another number stays."""
    mask, capped = causal & (q - k < 300), capped_by(50.0)
    text, numbers = plain(mask, capped, kernel=kernel)
    assert plain(causal & (q - k < 70), capped, (24, 64), kernel)[0] == text
    other, theirs = plain(mask, capped_by(30.0), kernel=kernel)
    assert other == text
    assert (numbers[0], theirs[0], len(numbers)) == (50, 30, len(theirs))
    assert plain(mask & (k < param("a")), capped)[0] == plain(mask & (k < param("b")), capped)[0]
    assert plain(mask & eq(k % 3, 0), None)[0] != plain(mask & eq(k % 5, 0), None)[0]
    assert plain(mask, capped_by(64.0))[0] != text  # a power of two is a sum less to compilers


def capped_by(n):
    return n * function("tanh", score / n)


def test_native_operator_table_is_complete():
    assert set(OPERATORS) <= {*expr_cpp.CPP, *DECOMPOSITIONS}


def test_names_of_users_do_not_meet_those_of_the_language():
    made = make_plan(ProgramExprs(causal & (k < param("int")) & (k < param("h_")) & (q < param("row"))), "x")
    text = cpp.CppKernel(made, TARGET, ARRAYS).expressions()
    assert "Int int_;" in text
    assert "Int row_;" in text


@pytest.mark.parametrize("kernel", [cpp.CppKernel, cpp_backward.BackwardKernel])
def test_names_of_users_do_not_meet_macros(kernel):
    source = kernel(make_plan(ProgramExprs(causal & (k < param("HALF"))), "x"), TARGET, ARRAYS).source()
    assert "Int HALF_;" in source
    assert set(re.findall(r"#define (\w+)", source)) <= set(cpp.MACROS)


def test_intervals_of_keys():
    """Where nothing else is asked of a key than that it lies between two ends, the forward has them."""

    def ends(mask):
        return cpp.CppKernel(make_plan(ProgramExprs(mask), "x"), TARGET, ARRAYS).storage()

    window = causal & (q - k < param("w")) & (q < 40)
    assert "if (!row.x0) return;\n    end = between(0, (int64_t)row.q + 1 - tile, keys);" in ends(window)
    assert "begin = between(0, (int64_t)row.x1 - tile, end);" in ends(window)
    assert "const bool INTERVAL = true;" in ends(causal)
    assert "begin = 0;" in ends(causal)
    assert "end = keys;" in ends(k >= q)
    assert "const bool INTERVAL = false;" in ends(causal & documents)
    assert "const bool INTERVAL = false;" in ends(None)
    scaled = make_plan(ProgramExprs(causal), "x", value_scale=lookup(K_SCALE, (k,), FLOAT))
    assert "const bool INTERVAL = false;" in cpp.CppKernel(scaled, TARGET, ARRAYS).storage()
    backward = cpp_backward.BackwardKernel(make_plan(ProgramExprs(window), "x"), TARGET, ARRAYS)
    assert not backward.interval_roots()


def test_lookups_along_the_keys_are_loads():
    def text(index):
        made = make_plan(ProgramExprs(score=score + lookup("t", (h, index), FLOAT)), "x")
        return cpp.CppKernel(made, TARGET, ARRAYS).expressions()

    assert "ahead<1>(fixed.t, fixed.h, column.first - row.q)" in text(k - q)
    assert "behind<1>(fixed.t, fixed.h, row.q - column.first)" in text(q - k)
    assert "behind<1>(fixed.t, fixed.h, -column.first)" in text(-k)
    assert "column.t_h_k = ahead<1>(fixed.t, fixed.h, column.first)" in text(k)
    assert "gather(fixed.t, ints(fixed.h), column.k + column.k)" in text(k + k)
    assert "gather(fixed.t, ints(fixed.h), " in text(2 * k)
    assert "row.t_h_q = at(fixed.t, fixed.h, row.q)" in text(q)
    made = make_plan(ProgramExprs(score=score + lookup("t", (k - q, h), FLOAT)), "x")  # along another axis
    assert "ahead<0>(fixed.t, column.first - row.q, fixed.h)" in cpp.CppKernel(made, TARGET, ARRAYS).expressions()


def test_scales_in_pages_are_loads():
    """Vectors of keys end where pages do: the page and the head are looked up once for each."""
    scale = lookup(K_SCALE, (lookup(PAGES, (b, (k - 5) // 48), INT), (k - 5) % 48, h // 4), FLOAT)
    made = make_plan(ProgramExprs(score=score * scale), "x", pages=Pages(PAGES, 48))
    text = cpp.CppKernel(made, TARGET, cpp.CppArrays(64, 64, "float32", "int8")).expressions()
    assert "ahead<1>(fixed.k_scale, at(fixed.pages, fixed.b, floordiv(" in text
    assert "gather" not in text
    again = make_plan(ProgramExprs(score=score * lookup("t", (k // 48, k % 48), FLOAT)), "x", pages=Pages(PAGES, 48))
    assert (
        "gather" in cpp.CppKernel(again, TARGET, cpp.CppArrays(64, 64, "float32", "int8")).expressions()
    )  # anyone's k begins anywhere


def test_heads_that_share_a_key_head_are_alike():
    def shared(scale):
        return cpp.CppKernel(make_plan(ProgramExprs(score=score * scale), "x"), TARGET, ARRAYS).storage()

    assert "return 4 % group == 0" in shared(lookup("t", (b, h // 4, k), FLOAT))
    assert "return false;" in shared(lookup("t", (b, h // 4 + h, k), FLOAT))
    assert "return false;" in shared(lookup("t", (h // 4, h // 2, k), FLOAT))


def test_native_backward_refuses_stored_keys():
    made = make_plan(ProgramExprs(), "x", pages=Pages(PAGES, 16))
    with pytest.raises(LoweringError, match="no gradients"):
        cpp_backward.BackwardKernel(made, TARGET, ARRAYS).source()


def test_a_draw_is_worked_out_in_stages():
    text = cpp.CppKernel(make_plan(ProgramExprs(causal), "x", keep_mask=survives()), TARGET, ARRAYS).expressions()
    stages = [line.strip() for line in text.split("\n") if "stirred" in line or "seeded" in line]
    assert stages == [
        "fixed.x0 = stirred(stirred(seeded(fixed.seed), fixed.b), fixed.h);",
        "row.x1 = stirred(fixed.x0, row.q);",
        "return uniform(stirred(words(row.x1), column.k)) >= fixed.rate;",
    ]


@pytest.mark.parametrize(
    ("target", "dtype", "message"),
    [
        (TARGET, "int8", "the C++ kernels take float32, float64, bfloat16, float16, not int8; convert q, k and v"),
        (
            Target("cpp", 64, 40),
            "float32",
            "C++ tiles have a multiple of 16 keys, this one is 64 queries by 40 keys; take 64 by 64",
        ),
    ],
)
def test_native_source_refuses_bad_dtypes_and_tiles(target, dtype, message):
    with pytest.raises(LoweringError) as refused:
        cpp.CppKernel(make_plan(ProgramExprs(causal)), target, cpp.CppArrays(64, 64, dtype)).source()
    assert str(refused.value) == message


def test_an_operator_without_a_form():
    made = make_plan(ProgramExprs(causal))
    odd = replace(made, score=ir.make("sinh", (score,), None, FLOAT))
    with pytest.raises(LoweringError, match=r"`sinh` has no C\+\+ form; rewrite the expression without it"):
        cpp.CppKernel(odd, TARGET, ARRAYS).source()


def test_a_name_that_the_plan_lacks():
    odd = replace(make_plan(ProgramExprs(causal)), mask=q - k < param("lost"))
    with pytest.raises(LoweringError, match="`lost` is neither a slot nor a table of the plan"):
        cpp.CppKernel(odd, TARGET, ARRAYS).source()
