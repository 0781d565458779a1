"""Every operator of the language in C++, for single numbers and for vectors, beside the interpreter."""

import ctypes
import itertools

import numpy as np
import pytest
from support.native import call as native_call

from frisket.dsl import ir
from frisket.dsl.evaluate import OPERATORS as MEANING
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import lit, lookup, random
from frisket.dsl.sugar import k, q
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.kernels.cpp import forward as cpp
from frisket.lowering.plan import Geometry, LoopPlan, Spans, TableUse, Target
from frisket.runtime.machine import cpp_build as native_build

pytestmark = pytest.mark.skipif(bool(native_build.reason()), reason=native_build.reason())

FLOATS = np.array([-np.inf, -1e30, -90.0, -20.0, -3.5, -1.0, -0.25, -1e-3, -0.0, 0.0, 1e-30, 1e-3, 0.3, 0.5, 1.0, 2.75,
                   11.0, 40.0, 88.0, 1e30, np.inf, np.nan])  # fmt: skip
BOOLS = np.array([False, True])
SMALL = np.array([-100, -64, -7, -3, -1, 0, 1, 2, 3, 5, 31, 32, 63, 64, 100])
LARGE = np.concatenate([SMALL, [-(2**40), -(2**31), 2**31, 2**40]])
# operators whose Int results must fit
NARROW = {"mul": np.arange(-9, 10), "shl": np.arange(-3, 15), "pow": np.arange(0, 8)}
# units in the last place that functions may be off by
LAST = {"exp": 2, "exp2": 2, "tanh": 4, "sigmoid": 4, "log": 2, "log2": 3, "log1p": 3, "erf": 3, "pow": 2, "rsqrt": 2,
        "tan": 2, "sin": 2, "cos": 2}  # fmt: skip
TABLES = {INT: "i", FLOAT: "f", BOOL: "b"}
MANY = {INT: "Ints", FLOAT: "Vec", BOOL: "Bits"}
UNARY = {"neg", "abs", "sign", "bitnot", "not", "int", "float", "floor", "isfinite"} | ir.FLOAT_FUNCTIONS


def signatures(op):
    """Every list of argument types the operator takes."""
    sizes = (2, 3) if op in ("and", "or") else (3,) if op == "where" else (1,) if op in UNARY else (2,)
    for n in sizes:
        for types in itertools.product((BOOL, INT, FLOAT), repeat=n):
            if ir.result_type(op, types) is not None:
                yield types


CASES = [(op, types) for op in sorted(set(MEANING) - {"random"}) for types in signatures(op)]


class Functions(cpp.CppKernel):
    """A source of functions `name(call, count, out)` that evaluate an expression at k = q = 0, 1, ... count."""

    def __init__(self, roots, plan, dtype):
        self.given = roots
        super().__init__(plan, Target("cpp", 16, 16), cpp.CppArrays(16, 16, dtype))

    def source_roots(self):
        return self.given

    def source(self):
        return "\n".join([self.head(), *map(cpp.part, cpp.ARITHMETIC), self.functions()])

    def functions(self):
        heads = [f"{MANY[root.type]} {name}_({cpp.ARGUMENTS})" for name, root in self.given.items()]
        lines = [self.expressions()]
        for name, head in zip(self.given, heads, strict=True):
            lines += self._function(name, head, "")
        lines += [
            "}  // namespace",
            "",
            'extern "C" void all(const Call *call, int64_t count, int64_t next, void **out) {',
        ]
        lines += ["    const Fixed fixed = fixed_of(call, 0, 0);", "    for (int64_t i = 0; i < count; i += next) {"]
        lines += ["        const Row row = row_of(fixed, (Int)i);"]
        lines += ["        const Column column = column_of(fixed, (Int)i, count - i);"]
        for n, (name, root) in enumerate(self.given.items()):
            one = "Real" if root.type is FLOAT else "int64_t"
            lines += [f"        const auto x{n} = {name}_(fixed, row, column);"]
            lines += ["        for (int j = 0; j < next && i + j < count; j++)"]
            lines += [f"            (({one} *)out[{n}])[i + j] = ({one})x{n}[j];"]
        lines += ["    }", "}", 'extern "C" int lanes() { return LANES; }', ""]
        page = "\n".join(lines)
        for head, root in zip(heads, self.given.values(), strict=True):
            if "k" in ir.uses(root):  # vectors: all of them in one function take g++ three times as long
                page = page.replace(f"INLINE {head}", f"__attribute__((noinline)) {head}")
        return page


def run(roots, plan, record, dtype, variant, level, count, functions=Functions):
    """The values of `roots` at 0, 1, ... count, by name. Roots of another level (k: vectors, q: numbers) are wrong."""
    library = native_build.library(functions(roots, plan, dtype).source(), variant)
    library.all.argtypes = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
    real = np.float64 if dtype == "float64" else np.float32
    out = {n: np.zeros(count, real if e.type is FLOAT else np.int64) for n, e in roots.items()}
    places = np.array([x.ctypes.data for x in out.values()], np.int64)
    library.all(record.ctypes.data, count, 1 if level is q else library.lanes(), places.ctypes.data)
    return {n: x != 0 if roots[n].type is BOOL else x for n, x in out.items()}


def values(types, op, double, wide):
    found = []
    for t in types:
        if t is INT:
            found.append(NARROW.get(op, LARGE if wide else SMALL))
        else:
            found.append(FLOATS if t is FLOAT else BOOLS)
    grids = [x.ravel() for x in np.meshgrid(*found, indexing="ij")]
    return [np.float32(x).astype(float) if x.dtype == float and not double else x for x in grids]


def call(tables, real, wide):
    """A call whose tables are these arrays, by name."""
    kinds = {"i": INT, "f": FLOAT, "b": BOOL}
    uses = tuple(TableUse(n, n, x.ndim, kinds[n[0]]) for n, x in tables.items())
    plan = LoopPlan(None, None, "general", (), uses, None, False, False, False, wide, "")
    spans = Spans(np.zeros((1, 1, 1, 4), np.int32), np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32))
    g = Geometry(1, 1, 1, 1, 1, 16, 16, 1.0)
    return plan, native_call.record(plan, spans, g, {}, tables, real, {}, {}, None, 1, 24, ())


SETTINGS = [("float32", False, "native"), ("float64", True, "native")]
SLOW = [(d, w, v) for d in ("float32", "float64") for w in (False, True) for v in native_build.VARIANTS if v != "neon"]


def meaning(e, env):
    """The interpreter's value; its sigmoid, by tanh, has few digits of small results."""
    return 1 / (1 + np.exp(-env[e.args[0].name])) if e.op == "sigmoid" else evaluate(e, env)


def off(dtype, wide, variant, level):
    """Each operator that is not what the interpreter says, with an example. Both levels are one library."""
    if why := native_build.lacking(variant):
        pytest.skip(why)
    double, real = dtype == "float64", np.float64 if dtype == "float64" else np.float32
    tables, roots, wanted = {}, {}, {}
    for n, (op, types) in enumerate(CASES):
        arrays = values(types, op, double, wide)
        names = [f"{TABLES[t]}{n}_{i}" for i, t in enumerate(types)]
        tables |= dict(zip(names, arrays, strict=True))
        leaves = [ir.param(m, t) for m, t in zip(names, types, strict=True)]
        with np.errstate(all="ignore"):
            wanted[f"f{n}"] = meaning(ir.build(op, *leaves), dict(zip(names, arrays, strict=True)))
        for at, name in ((k, f"k{n}"), (q, f"q{n}")):
            roots[name] = ir.build(op, *(lookup(m, (at,), t) for m, t in zip(names, types, strict=True)))
    plan, (record, _keep) = call(tables, real, wide)
    found = run(roots, plan, record, dtype, variant, level, max(map(len, tables.values())))
    wrong = {}
    for n, (op, types) in enumerate(CASES):
        want = wanted[f"f{n}"]
        got = found[f"{'q' if level is q else 'k'}{n}"][: len(want)]
        good = same(op, got, want, real, wide)
        if not good.all():
            i = int(np.argmin(good))
            wrong[op, types] = ([tables[f"{TABLES[t]}{n}_{m}"][i] for m, t in enumerate(types)], got[i], want[i])
    return wrong


def same(op, got, want, real, wide):
    with np.errstate(all="ignore"):
        if want.dtype.kind == "f":
            want = want.astype(real).astype(float)
            tiny = 2.4e-38 if real is np.float32 else 0  # subnormal results may be 0
            near = np.abs(got - want) <= LAST.get(op, 0.5) * np.finfo(real).eps * np.abs(want) + tiny
            return near | (got == want) | (np.isnan(got) & np.isnan(want))
        if op in ("int", "floor"):  # what does not fit is the largest that does
            most = 2.0**62 if wide else 2.0**31
            return (got == want) | ((np.abs(want) >= most) & (np.abs(got) >= most - 256) & ((got < 0) == (want < 0)))
        return got == want


@pytest.mark.parametrize("optimized", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("dtype", "wide", "variant"), SETTINGS)
def test_native_operators_on_vectors_equal_the_reference(dtype, wide, variant, optimized):
    """Exhaustive with all optimizations, which take g++ 5 seconds."""
    assert off(dtype, wide, variant, k) == {}


@pytest.mark.parametrize(("dtype", "wide"), [("float32", False), ("float64", True)])
def test_native_operators_on_scalars_equal_the_reference(dtype, wide):
    assert off(dtype, wide, "native", q) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "wide", "variant"), SLOW)
def test_native_operators_agree_on_every_instruction_set(dtype, wide, variant):
    assert off(dtype, wide, variant, k) == {}
    assert off(dtype, wide, variant, q) == {}


@pytest.mark.parametrize("wide", [False, True])
def test_native_random_numbers_equal_the_reference(wide):
    seeds = np.array([0, 1, 2**31 - 1, 12345])
    i, j, n = (x.ravel() for x in np.meshgrid(seeds, np.arange(-3, 200, 7), np.arange(5), indexing="ij"))
    tables = {"i0": i, "i1": j, "i2": n}
    root = random(lookup("i0", (q,)), lookup("i1", (q,)), lookup("i2", (k,)))
    plan, (record, _keep) = call(tables, np.float32, wide)
    of_a_row = random(lookup("i0", (q,)), lookup("i1", (q,)))  # a number, where the other is a vector
    out = run({"draw": root, "row": of_a_row}, plan, record, "float32", "native", q, len(i))
    assert (out["draw"] == evaluate(random(*map(ir.param, tables)), tables)).all()
    assert (out["row"] == evaluate(random(ir.param("i0"), ir.param("i1")), tables)).all()


@pytest.mark.parametrize("level", [k, q], ids=["LANES", "1"])
def test_neighbours_along_any_axis(level):
    """Entries of a vector lie one behind another, or a row of the table apart, and those outside are the nearest."""
    draw, at = np.random.default_rng(1), np.arange(64)
    tables = {"i0": draw.integers(0, 99, (40, 3)), "i1": draw.integers(0, 99, (3, 40))}
    places = {"ahead": (k - 4, at - 4), "behind": (50 - k, 50 - at)}
    roots, wanted = {}, {}
    for name, (place, where) in places.items():
        inside = where.clip(0, 39)
        roots |= {f"{name}_0": lookup("i0", (place, lit(1))), f"{name}_1": lookup("i1", (lit(2), place))}
        wanted |= {f"{name}_0": tables["i0"][inside, 1], f"{name}_1": tables["i1"][2, inside]}
    roots |= {f"{n}_of_q": ir.substitute(x, {k: q}) for n, x in roots.items()}
    plan, (record, _keep) = call(tables, np.float32, False)
    found = run(roots, plan, record, "float32", "native", level, len(at))
    for name, want in wanted.items():
        values_of_level = found[f"{name}_of_q" if level is q else name]
        np.testing.assert_array_equal(values_of_level[: len(at)], want, name)


FUNCTIONS = {"exp": (-87, 88), "exp2": (-125, 128), "tanh": (-12, 12), "sigmoid": (-30, 30), "log": (1e-6, 100.0),
             "log2": (1e-6, 100.0), "log1p": (-0.99, 50), "erf": (-4, 4)}  # fmt: skip


def test_functions_at_many_points():
    """The polynomials, over where they are used: errors in units of the last place."""
    draw = np.random.default_rng(0)
    tables, roots = {}, {}
    for n, (op, (lo, hi)) in enumerate(FUNCTIONS.items()):
        near = draw.uniform(-1, 1, 4000) * 10.0 ** draw.uniform(-8, 0, 4000)
        some = np.concatenate([draw.uniform(lo, hi, 10000), near[(near > lo) & (near < hi)]])[:11000]
        tables[f"f{n}"] = np.float32(some).astype(float)
        roots[op + "_at"] = ir.build(op, lookup(f"f{n}", (k,), FLOAT))
    plan, (record, _keep) = call(tables, np.float32, False)
    found = run(roots, plan, record, "float32", "native", k, 11000)
    for n, op in enumerate(FUNCTIONS):
        x = tables[f"f{n}"]
        want = meaning(ir.build(op, ir.param("x", FLOAT)), {"x": x})
        units = np.abs(found[op + "_at"][: len(x)] - want) / np.spacing(np.abs(want).astype(np.float32))
        assert units.max() <= LAST[op], f"{op}: {units.max():.2f} units at {x[units.argmax()]!r}"


class Weights(Functions):
    """The same, with `weight` for `exp2`."""

    def functions(self):
        return super().functions().replace("exp2(", "weight(")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_of_the_softmax_at_many_points(dtype):
    real = np.dtype(dtype).type
    lowest = -126 if real is np.float32 else -1022
    x = np.random.default_rng(1).uniform(lowest, 0, 9000)
    x = np.concatenate([x, x / 100, -np.logspace(-12, 0, 99), [0, lowest * 2, -np.inf, np.nan]]).astype(real)
    plan, (record, _keep) = call({"f0": x.astype(float)}, real, False)
    root = {"at": ir.build("exp2", lookup("f0", (k,), FLOAT))}
    got = run(root, plan, record, dtype, "native", k, len(x), Weights)["at"]
    want = np.exp2(x.astype(np.longdouble))
    want[-3:] = 0, 0, np.nan
    assert np.isnan(got[-1])
    assert (got[-3:-1] == 0).all()
    units = np.abs(got[:-3] - want[:-3]) / np.spacing(want[:-3].astype(real))
    assert units.max() <= 1.5, f"{units.max():.2f} units at {x[units.argmax()]!r}"
