"""A call of a native kernel as plain arrays with links between them: run in this process, or by a program of its own.

The program (`main.cpp` behind a kernel) is what sanitizers watch and other processors run: each array is an
allocation of its own, so that reading past an end is seen.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
from support.attention_cases import Case, geometry, spans
from support.native.pool import pool_threads

from frisket.dsl import ir
from frisket.lowering import dense
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.cpp import backward as cpp_backward
from frisket.lowering.kernels.cpp import call as cpp_call
from frisket.lowering.kernels.cpp import forward as cpp
from frisket.lowering.plan import RATE, SEED, ProgramFacts, Target, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.machine import cpp_build as native_build

KINDS = {"forward": 0, "backward": 1}
MAIN = Path(__file__).parent / "main.cpp"
POOL = Path(native_build.__file__).with_name("cpp_threads.cpp")


@dataclass
class Image:
    """`arrays[0]` is the record; `links` are (array, word, array): this word is the address of that array."""

    arrays: list[np.ndarray] = field(default_factory=list)
    links: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, array: np.ndarray) -> int:
        self.arrays.append(np.ascontiguousarray(array))
        return len(self.arrays) - 1

    def words(self, values: list) -> int:
        """An array of words; an ndarray among the values stands for its address."""
        at = self.add(np.array([0 if isinstance(x, np.ndarray) else x for x in values], np.int64))
        self.links += [(at, i, self.add(x)) for i, x in enumerate(values) if isinstance(x, np.ndarray)]
        return at


class Problem:
    """A case with its arrays, what the reference says, and a run of a kernel on it."""

    def __init__(self, case: Case, *, sinks: bool = False, dropout: float = 0.0, precision: str = "ieee") -> None:
        draw = np.random.default_rng(1)
        self.case, self.g, self.dropout = case, geometry(case), float(np.float32(dropout))
        self.precision = precision
        self.dtype = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
        self.real = np.dtype(np.float64 if case.dtype == "float64" else np.float32)
        limits = dict.fromkeys((*ir.COORDINATES, *ir.SIZES, *case.slots, *case.tables), 2.0**14)
        self.plan = make_plan(
            ProgramExprs(case.mask, case.score),
            "the text of the mask",
            ProgramFacts(limits=limits),
            keep_mask=survives() if dropout > 0 else None,
        )
        heads, kv = (case.batch, case.heads), (case.batch, case.kv_heads)

        def one(*shape: int) -> np.ndarray:
            return draw.standard_normal(shape).astype(np.float32).astype(self.dtype)

        self.q, self.k = one(*heads, case.q_len, case.dim), one(*kv, case.kv_len, case.dim)
        self.v, self.dout = one(*kv, case.kv_len, case.v_dim), one(*heads, case.q_len, case.v_dim)
        self.dlse = one(*heads, case.q_len).astype(self.real)
        self.sinks = one(case.heads).astype(self.real) if sinks else None
        self.params = {**case.slots, **({SEED: 11, RATE: self.dropout} if dropout else {})}
        self.spans = spans(case)

    def kernel(self, kind: str) -> cpp.CppKernel:
        target = Target("cpp", *self.case.block, precision=self.precision)
        made = cpp.CppKernel if kind == "forward" else cpp_backward.BackwardKernel
        return made(self.plan, target, cpp.CppArrays(self.g.head_dim, self.g.v_dim, self.case.dtype))

    def source(self, kind: str) -> str:
        return self.kernel(kind).source()

    def reference(self) -> dict[str, np.ndarray]:
        """Everything in float64: out, lse, top, dq, dk, dv."""
        q, k, v, dout = (x.astype(np.float64) for x in (self.q, self.k, self.v, self.dout))
        same = {"scale": self.g.scale, "params": self.params, "tables": self.case.tables, "problem": self.case.problem}
        more = {"keep_mask": survives(), "rate": self.dropout} if self.dropout else {}
        exprs = ProgramExprs(self.case.mask, self.case.score)
        call = dense.DenseCall(exprs, sinks=self.sinks, **same, **more)
        out, lse = dense.attention(q, k, v, call)
        dlse = np.where(np.isfinite(lse), self.dlse, 0).astype(np.float64)
        found = dense.gradients(q, k, v, call, dout, dlse)
        top = dense.top(q, k, call)
        return {"out": out, "lse": lse, "top": top, "dq": found["dq"], "dk": found["dk"], "dv": found["dv"]}

    # -- calls ------------------------------------------------------------------------------------

    def image(self, kind: str, forward: dict[str, np.ndarray] | None = None) -> tuple[Image, dict[str, int]]:
        """The record and its arrays, and which of them hold results."""
        g, filled = self.g, np.full
        results = {"lse": filled((g.batch, g.heads, g.q_len), 7, self.real)}
        results["out"] = filled((g.batch, g.heads, g.q_len, g.v_dim), 7, self.dtype)
        extra: dict[str, np.ndarray] = {}
        if kind == "forward":
            results["top"] = filled(results["lse"].shape, 7, self.real)
        else:
            results = {n: forward[n] for n in ("lse", "out")}
            extra = {n: np.full_like(getattr(self, n[1]), 7) for n in ("dq", "dk", "dv")}
            extra |= {f"gradient {i}": np.zeros(self._shape(x), self.real)
                      for i, x in enumerate(backward_of(self.plan).gradients)}  # fmt: skip
        values = self._fields() | {"lse": [results["lse"]], "top": [results.get("top", 0)]}
        arrays = {"q": self.q, "k": self.k, "v": self.v, "out": results["out"]}
        if kind == "backward":
            arrays |= {"dout": self.dout, **{n: extra[n] for n in ("dq", "dk", "dv")}}
            values["dlse"] = [np.where(np.isfinite(forward["lse"]), self.dlse, 0).astype(self.real)]
        for name, x in arrays.items():
            values[name] = [x, *(n // x.itemsize for n in x.strides[:3])]
        image, places = Image(), {}
        image.words([w for f in cpp_call.FIELDS for w in values.get(f.name, [0] * f.words)])
        for name in results if kind == "forward" else extra:
            if not name.startswith("gradient"):
                places[name] = next(t for a, w, t in image.links if a == 0 and w == cpp_call.OFFSET[name])
        self._link(image, "slots", np.frombuffer(self._slots(kind) or bytes(8), np.int64))
        tables = image.words(self._tables() or [0])
        image.links.append((0, cpp_call.OFFSET["tables"], tables))
        if sums := [x for n, x in extra.items() if n.startswith("gradient")]:
            at = image.words(sums)
            places |= {f"gradient {w}": t for a, w, t in image.links if a == at}
            image.links.append((0, cpp_call.OFFSET["gradients"], at))
        return image, places

    def _link(self, image: Image, name: str, array: np.ndarray) -> None:
        image.links.append((0, cpp_call.OFFSET[name], image.add(array)))

    def _fields(self) -> dict[str, list]:
        g, s = self.g, self.spans
        origins = [np.atleast_1d(x).astype(np.int64) for x in g.origin[2:]]
        numbers = {n: [getattr(g, n)] for n in ("batch", "heads", "kv_heads", "q_len", "kv_len")}
        sizes = zip(("size_b", "size_h", "size_q", "size_k"), g.full, strict=True)
        return numbers | {n: [x] for n, x in sizes} | {
            "scale": list(struct.unpack("<q", struct.pack("<d", g.scale))),
            "b_origin": [g.origin[0]], "h_origin": [g.origin[1]],
            "q_origin": [origins[0]], "k_origin": [origins[1]],
            "q_origin_step": [int(len(origins[0]) > 1)], "k_origin_step": [int(len(origins[1]) > 1)],
            "spans": [s.bounds.astype(np.int32)], "count": [s.count.astype(np.int32)],
            "slice_of": [s.slice_of.astype(np.int32)], "rows": [s.bounds.shape[1]], "records": [s.bounds.shape[2]],
            "block_q": [self.case.block[0]],
            "sinks": [0 if self.sinks is None else self.sinks],
        }  # fmt: skip

    def _slots(self, kind: str) -> bytes:
        values = self.plan.slot_values(self.params)
        packed = [struct.pack("<d" if s.type.name == "FLOAT" else "<q", values[s.name]) for s in self.plan.slots]
        return b"".join(packed + [struct.pack("<d", x) for x in self.kernel(kind).literals])

    def _tables(self) -> list:
        words: list = []
        found = self.plan.table_values(self.case.tables)
        for t in self.plan.tables:
            kinds = {"BOOL": np.uint8, "INT": np.int64 if self.plan.int64 else np.int32, "FLOAT": self.real}
            x = np.ascontiguousarray(np.asarray(found[t.name]).astype(kinds[t.type.name]))
            words += [x, *x.shape, *(n // x.itemsize for n in x.strides)]
        return words

    def _shape(self, gradient) -> tuple[int, ...]:
        g = self.g
        if gradient.over == "scatter":
            return self.plan.table_values(self.case.tables)[gradient.source].shape
        ends = {"head": (), "row": (g.q_len,), "column": (g.kv_len,), "diagonal": (g.q_len + g.kv_len - 1,)}
        return (g.batch, g.heads, *ends[gradient.over])

    def run(self, runner, *, backward: bool = True) -> dict[str, np.ndarray]:
        """Forward, and the backward of its results."""
        found = runner(self, "forward", *self.image("forward"))
        return found | runner(self, "backward", *self.image("backward", found)) if backward else found

    def check(self, found: dict[str, np.ndarray]) -> None:
        tolerance = {"float64": 1e-11, "float32": 2e-5}.get(self.case.dtype, 3e-2)
        for name, want in self.reference().items():
            if name in found:
                size = max(1.0, float(np.abs(np.where(np.isfinite(want), want, 0)).max(initial=0)))
                have = found[name].astype(np.float64)
                np.testing.assert_allclose(have, want, rtol=0, atol=tolerance * size, err_msg=name)


# -- runners: (problem, kind, image, places) -> results by name ----------------------------------------


def here(variant: str = "native", threads: int = 2):
    """In this process, on the threads of our own pool."""

    def runner(problem, kind, image, places):
        library = native_build.library(problem.source(kind), variant)
        pool = pool_threads(threads)
        record = image.arrays[0]
        record[cpp_call.OFFSET["threads"]], record[cpp_call.OFFSET["parallel"]] = threads, pool[1]
        for array, word, target in image.links:
            image.arrays[array][word] = image.arrays[target].ctypes.data
        kernel = getattr(library, f"frisket_{kind}")
        kernel.restype, kernel.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        assert kernel(record.ctypes.data) == 0
        return {name: image.arrays[at] for name, at in places.items()}

    return runner


def program(folder: Path, compiler: tuple[str, ...], flags: tuple[str, ...], emulator: tuple[str, ...] = (),
            threads: int = 2):  # fmt: skip
    """Built with these flags and run for itself, on the pool that kernels run on outside torch and XLA."""

    def runner(problem, kind, image, places):
        binary = built(folder, compiler, flags, problem.source(kind))
        given, back = folder / "given.bin", folder / "back.bin"
        sizes = [x.nbytes for x in image.arrays]
        head = [KINDS[kind], threads, len(image.arrays), len(image.links), *sizes, *np.ravel(image.links)]
        given.write_bytes(np.array(head, np.int64).tobytes() + b"".join(x.tobytes() for x in image.arrays))
        done = subprocess.run([*emulator, str(binary), given, back], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[:4000]
        held, starts, found = back.read_bytes(), np.cumsum([0, *sizes]), {}
        for name, at in places.items():
            like = image.arrays[at]
            found[name] = np.frombuffer(held[starts[at] : starts[at + 1]], like.dtype).reshape(like.shape)
        return found

    return runner


@cache
def built(folder: Path, compiler: tuple[str, ...], flags: tuple[str, ...], source: str) -> Path:
    kernel = folder / f"kernel{len(list(folder.glob('kernel*.cpp')))}.cpp"
    kernel.write_text(source)
    compiled(*compiler, *flags, "-o", kernel.with_suffix(""), kernel, main_object(folder, compiler, flags))
    return kernel.with_suffix("")


@cache
def main_object(folder: Path, compiler: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    main = folder / "main.cpp"
    main.write_text(f"#include <stdint.h>\ntypedef void Real;\n{cpp_call.text()}{POOL.read_text()}{MAIN.read_text()}")
    compiled(*compiler, *flags, "-c", "-o", main.with_suffix(".o"), main)
    return main.with_suffix(".o")


def compiled(*command) -> None:
    shared = [f for f in native_build.FLAGS if f not in ("-shared", "-O3")]
    done = subprocess.run([*map(str, command), *shared], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


def flags_of(variant: str) -> tuple[str, ...]:
    return native_build.VARIANTS[variant][0]
