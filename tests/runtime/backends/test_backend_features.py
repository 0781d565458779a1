"""A backend does with a tiny call what its record says of a feature: it is right, or raises the reason."""

from pathlib import Path

import pytest
from support.feature_probes import PROBES, compare, lacked
from support.triton.process import run

import frisket as fk
from frisket.lowering.kernels.features import CUTE, DENSE, FEATURES, GLUON, PALLAS_GPU, PALLAS_TPU, TRITON, XLA
from frisket.runtime.backends.base import RECORDS

CHILDREN = Path(__file__).parent / "children"
HALF = "bfloat16"  # of kernels that take 16 bits alone
# what is run in this process: aten, dense and sdpa in milliseconds; others compile, or run in an interpreter
RUNNING = {
    "torch": ("aten", "dense", "sdpa", "cpp"),
    "jax": ("dense", "splash", "xla", "cpp", "pallas-tpu"),
}
CHEAP = ("aten", "dense", "sdpa")
pytestmark = pytest.mark.filterwarnings("ignore:backend '.*' runs in:UserWarning")


def cells():
    for framework, names in RUNNING.items():
        for name in names:
            for feature, probe in PROBES.items():
                if framework in probe.frameworks:
                    quick = name in CHEAP or name == "splash" or feature in RECORDS[name].features
                    quick &= framework == "torch" or feature in RECORDS[name].features
                    marks = [] if quick else [pytest.mark.exhaustive]
                    yield pytest.param(framework, name, feature, marks=marks, id=f"{framework}-{name}-{feature}")


@pytest.mark.parametrize(("framework", "backend", "feature"), [*cells()])
def test_a_backend_does_what_its_record_claims(framework, backend, feature):
    pytest.importorskip(framework)
    if why := fk.backends()[backend]:
        pytest.skip(why)
    assert compare(backend, framework, feature) == ""


@pytest.mark.parametrize(
    "feature", [n for n in PALLAS_GPU if not n.startswith("gradients") and "jax" in PROBES[n].frameworks]
)
def test_hopper_kernels_of_jax_refuse_what_they_lack(feature):
    """The forward refuses before a kernel runs in the interpreter, which takes seconds."""
    pytest.importorskip("jax")
    assert compare("pallas-mosaic-gpu", "jax", feature, dtype=HALF) == ""


@pytest.mark.parametrize("feature", [n for n in PROBES if n in RECORDS["flash"].features])
def test_flash_engine_refuses_the_features_it_lacks(feature):
    pytest.importorskip("torch")
    from fuzz.kernels import stand_in

    with stand_in("flash", "sm_90"):
        assert compare("flash", "torch", feature, dtype=HALF, deterministic=False) == ""


@pytest.mark.parametrize("feature", [n for n in PROBES if n in RECORDS["gluon"].features])
def test_gluon_kernels_refuse_the_features_they_lack(feature):
    pytest.importorskip("triton")
    from fuzz.kernels import stand_in

    with stand_in("gluon", "sm_90"):
        assert compare("gluon", "torch", feature, dtype=HALF) == ""


def test_records_name_features_and_each_has_a_probe():
    assert PROBES.keys() == FEATURES.keys()
    for record in RECORDS.values():
        assert record.features.keys() <= FEATURES.keys(), record.name
        assert all(record.features.values()), record.name
        if record.interpreter is not None:
            assert record.interpreter.features.keys() <= FEATURES.keys()
        for framework in record.executors:  # of an engine without a backward, generated kernels find gradients
            assert (record.executors[framework].backward is None) <= ("backward" in record.features or record.is_engine)
    assert not any(probe.needs and not set(probe.needs) <= FEATURES.keys() for probe in PROBES.values())


@pytest.mark.parametrize(
    ("backend", "table"),
    [
        ("dense", DENSE),
        ("xla", XLA),
        ("triton", TRITON),
        ("gluon", {n: why for n, why in GLUON.items() if n != "float32"}),  # a call is refused in other words
        ("flash", {n: why for n, why in CUTE.items() if n != "paged caches"}),  # read where flags are the whole mask
        ("pallas-tpu", PALLAS_TPU),
        ("pallas-mosaic-gpu", PALLAS_GPU),
    ],
)
def test_records_have_the_reasons_of_their_kernels(backend, table):
    assert table.items() <= RECORDS[backend].features.items()
    assert lacked(backend, next(iter(table))) != ""


@pytest.mark.exhaustive
def test_triton_features_are_claimed_as_its_interpreter_has_them():
    pytest.importorskip("triton")
    run(CHILDREN / "features_interpreted.py", TRITON_INTERPRET="1")
