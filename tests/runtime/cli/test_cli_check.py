"""`frisket check`: which cases there are, what a mismatch says, and that it can be repeated."""

import json
import shlex

import pytest

from frisket.dsl.errors import LoweringError, MismatchError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.cli import kernels as cli_kernels
from frisket.runtime.cli.main import arguments, main


@pytest.fixture
def run(capsys):
    def call(*argv):
        status = main(["check", *argv])
        return status, *capsys.readouterr()

    return call


def chosen(*argv):
    return list(cli_kernels.cases(arguments(["check", *argv])))


def test_check_of_a_running_backend_agrees(run):
    argv = ["causal & window(w)", "--set", "w=20", "--score", "softcap(20)", "--backend", "aten", "--quick"]
    status, out, err = run(*argv, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert found["good"] is True
    assert {c["backend"] for c in found["cases"]} == {"aten"}
    for c in found["cases"]:
        assert c["out"] <= 2 * c["dense_out"] + 1e-6
        assert {"dq", "dk", "dv"} <= c["gradients"].keys()


def test_check_prints_a_table_of_cases(run):
    status, out, _ = run("causal", "--q-len", "9", "--backend", "aten", "--dtype", "float32", "bfloat16")
    assert status == 0
    table = [line.split() for line in out.split("\n\n")[1].splitlines()]
    assert table[0] == ["arrays", "backend", "dtype", "cases", "error", "dense", "grads", "dense"]
    assert [line[:4] for line in table[1:]] == [["torch", "aten", "float32", "3"], ["torch", "aten", "bfloat16", "3"]]
    assert [line[-1] for line in table[1:]] == ["good", "good"]
    assert out.endswith("result    6 of 6 calls agree with the float64 reference\n")


def test_check_all_takes_each_combination():
    cases = chosen("causal", "--all", "--backend", "aten", "--heads", "6")
    assert len(cases) == len(set(cases)) == 3 * 4 * 3 * 2 * 2  # dtypes, lengths, heads of keys, rows, ways
    assert {c.kv_heads for c in cases} == {6, 3, 1}
    few, one = (chosen("causal", *level, "--backend", "aten") for level in ([], ["--quick"]))
    assert {c.gradients for c in few} == {c.hidden for c in few} == {False, True}
    assert len(one) == 1
    assert {c.backend for c in chosen("causal")} >= {"aten", "xla"}


def test_check_cases_can_be_named_and_repeated():
    for case in chosen("causal", "--all"):
        assert cli_kernels.case_of(str(case)) == case


@pytest.mark.parametrize("hidden", ["rows-hidden", "rows-as-is"])
def test_rows_without_keys_are_among_them(run, hidden, monkeypatch):
    seen = []
    check = Attention.check

    def look(self, q, k, v, **options):
        seen.append(str(self.program))
        return check(self, q, k, v, **options)

    monkeypatch.setattr(Attention, "check", look)
    assert run("causal", "--case", f"torch/aten/float32/12x12/4over2/{hidden}/gradients")[0] == 0
    (text,) = seen
    assert ("q % 5 != 3" in text) == (hidden == "rows-hidden")


def test_a_mismatch_says_which_and_how_to_repeat_it(run, monkeypatch):
    def wrong(self, q, k, v, *, gradients):
        if gradients:
            raise MismatchError("float32: out 1.0e+00")
        return good(self, q, k, v, gradients=gradients)

    good = Attention.check
    monkeypatch.setattr(Attention, "check", wrong)
    argv = ["causal & q - k < w", "--set", "w=3", "--q-len", "8", "--backend", "aten", "--dtype", "float32"]
    status, out, _ = run(*argv)
    assert status == 1
    assert "2 WRONG" in out
    name = "torch/aten/float32/8x8/4over2/rows-as-is/gradients"
    again = f"frisket check 'causal & q - k < w' --set w=3 --case {name}"
    assert f"MISMATCH  {name}\n          float32: out 1.0e+00\nrepeat    {again}\n" in out
    assert out.endswith("result    2 of 3 cases are wrong\n")
    status, out, _ = run(*shlex.split(again)[2:], "--json")
    found = json.loads(out)
    assert (status, found["good"], len(found["cases"])) == (1, False, 1)
    assert found["cases"][0]["mismatch"] == "float32: out 1.0e+00"


def test_check_reports_what_a_backend_refuses(run, monkeypatch):
    def refuse(self, *arrays, **options):
        raise LoweringError("no kernel for this\n  take another")

    monkeypatch.setattr(Attention, "check", refuse)
    status, out, _ = run("causal", "--backend", "aten", "--quick")
    assert status == 2
    assert "1 refused" in out
    assert "refused   aten: no kernel for this\n" in out
    assert out.endswith("result    nothing is checked: every call is refused\n")
    assert json.loads(run("causal", "--backend", "aten", "--quick", "--json")[1])["good"] is False


def test_check_counts_refused_calls(run, monkeypatch):
    def forward(self, *arrays, gradients):
        if gradients:
            raise LoweringError("no gradients of this")
        return good(self, *arrays, gradients=gradients)

    good = Attention.check
    monkeypatch.setattr(Attention, "check", forward)
    status, out, _ = run("causal", "--backend", "aten", "--q-len", "8", "--dtype", "float32")
    assert status == 0
    assert out.endswith("result    1 of 3 calls agree with the float64 reference, the rest is refused\n")


def test_a_backend_that_does_not_run_here(run):
    for name in ("gluon", "triton"):
        status, _, err = run("causal", "--backend", name)
        assert (status, err) == (2, "BackendError: no backend among these runs here; `frisket doctor` says why\n")


@pytest.mark.exhaustive
def test_interpreted_backends_are_checked_where_named(run):
    assert {c.backend for c in chosen("causal")} == {c.backend for c in chosen("causal", "--all")}
    assert {c.backend for c in chosen("causal")} <= {"aten", "xla", "cpp", "sdpa"}
    assert {c.backend for c in chosen("causal", "--backend", "pallas-mosaic-gpu")} == {"pallas-mosaic-gpu"}
    status, out, _ = run("causal", "--q-len", "5", "--quick")
    assert status == 0
    slow = "pallas-tpu, pallas-mosaic-gpu, splash: in an interpreter here, slowly; --backend pallas-tpu runs it"
    assert f"left out  {slow}\n" in out
    assert "left out" not in run("causal", "--backend", "aten", "--q-len", "5", "--quick")[1]
