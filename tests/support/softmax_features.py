"""The features of the online softmax, in each place where it is written, and the test that checks each one there.

A cell is the id of a test, or a `Lacks`: the backend of the place lacks the feature, and its record says why."""

from __future__ import annotations

from dataclasses import dataclass

FEATURES = {
    "sinks": "a logit for each head that has no value",
    "lse": "the log of a row's sum of weights",
    "max": "the largest score of a row",
    "dropout": "weights dropped by position",
    "value scales": "weights times the scale of a stored value",
    "empty rows": "rows without a key give 0, and no NaN",
    "lse residual": "the rounding error of lse, or what else makes the backward's weights those of the forward",
}


@dataclass(frozen=True)
class Lacks:
    """A feature of `lowering.kernels.features` that the backend of a place lacks."""

    feature: str


@dataclass(frozen=True)
class Place:
    """A place where the online softmax is written: its file, the backend, and a cell for each of FEATURES."""

    file: str
    backend: str
    cells: dict[str, str | Lacks]


LOWERING, ATTENTION = "tests/lowering", "tests/runtime/attention"
TRITON = f"{LOWERING}/kernels/triton/children"
GLUON = f"{LOWERING}/kernels/gluon/test_gluon_interpreted.py"
TPU, GPU = (f"{LOWERING}/kernels/pallas/test_pallas_{name}.py" for name in ("tpu", "gpu"))
CPP = f"{LOWERING}/kernels/cpp"
NATIVE = f"{CPP}/test_cpp_forward.py::test_native_forward_equals_the_reference"
CLAIMED = "tests/runtime/backends/test_backend_features.py::test_a_backend_does_what_its_record_claims"
LARGE = f"{ATTENTION}/test_large_scores_jax.py::test_weights_of_a_row_sum_to_one_by"


def _each(test: str, *features: str) -> dict[str, str | Lacks]:
    return dict.fromkeys(features, test)


def _gluon(arch: str) -> dict[str, str | Lacks]:
    test = f"{GLUON}::test_gluon_cases_with_sinks_and_dropout[{arch}-{{}}]".format
    cells = _each(test("gqa"), "sinks", "lse", "max", "dropout")
    cells["lse residual"] = f"{GLUON}::test_gluon_forward_has_the_rounding_error_of_lse[{arch}]"
    return cells | {"value scales": Lacks("value scales"), "empty rows": test("empty-rows")}


PLACES = {
    "Triton forward": Place(
        "lowering/kernels/triton/skeletons/forward.tpl",
        "triton",
        {
            **_each(
                f"{TRITON}/forward_interpreted.py::test_triton_cases_with_sinks_and_dropout[gqa]",
                *("sinks", "lse", "max", "dropout"),
            ),
            "value scales": f"{TRITON}/stored_interpreted.py::test_triton_forward_reads_stored_keys_and_values[int8]",
            "empty rows": f"{TRITON}/forward_interpreted.py::test_triton_cases_with_sinks_and_dropout[empty-rows]",
            "lse residual": f"{TRITON}/large_scores_interpreted.py::test_weights_in_torch[one key-1e+30]",
        },
    ),
    "Triton decode and combine": Place(
        "lowering/kernels/triton/skeletons/decode.tpl",
        "triton",
        {
            **_each(
                f"{TRITON}/decode_interpreted.py::test_parts_with_everything[gqa]",
                *("sinks", "lse", "max", "dropout"),
            ),
            "lse residual": f"{TRITON}/decode_interpreted.py::test_parts_have_the_rounding_error_of_lse[3]",
            "value scales": (
                f"{TRITON}/stored_interpreted.py::test_triton_decode_parts_read_stored_keys_and_values[int8]"
            ),
            "empty rows": f"{TRITON}/decode_interpreted.py::test_parts_with_everything[empty-rows]",
        },
    ),
    "Gluon for Hopper": Place("lowering/kernels/gluon/skeletons/hopper.tpl", "gluon", _gluon("sm_90")),
    "Gluon for Blackwell": Place("lowering/kernels/gluon/skeletons/blackwell.tpl", "gluon", _gluon("sm_100")),
    "Pallas for TPUs": Place(
        "lowering/kernels/pallas_tpu/skeletons/forward.tpl",
        "pallas-tpu",
        {
            **_each(
                f"{TPU}::test_pallas_tpu_sinks_dropout_and_largest_scores[gqa-empty-rows]",
                *("sinks", "lse", "max", "dropout", "empty rows"),
            ),
            "value scales": (
                f"{LOWERING}/kernels/pallas/test_pallas_tpu_stored.py::test_pallas_tpu_reads_each_storage_format[int8]"
            ),
            "lse residual": f"{LARGE}_pallas_for_tpus[one key]",
        },
    ),
    "Pallas for Hopper": Place(
        "lowering/kernels/pallas_gpu/skeletons/forward.tpl",
        "pallas-mosaic-gpu",
        {
            "sinks": f"{GPU}::test_pallas_gpu_forward_with_sinks_and_dropout",
            "dropout": f"{GPU}::test_dropout_keeps_what_other_backends_keep",
            **_each(
                f"{GPU}::test_pallas_gpu_forward_equals_the_reference_without_races[empty-rows]",
                *("lse", "max", "empty rows"),
            ),
            "value scales": Lacks("value scales"),
            "lse residual": f"{LARGE}_pallas_for_hopper[one key-1000000000.0]",
        },
    ),
    "C++ forward": Place(
        "lowering/kernels/cpp/forward.hpp",
        "cpp",
        {
            **_each(f"{NATIVE}[sinks]", "sinks", "lse", "max"),
            "dropout": f"{NATIVE}[dropout]",
            "value scales": f"{CPP}/test_native_stored.py::test_native_forward_reads_stored_keys_and_values[prefill]",
            "empty rows": f"{NATIVE}[empty-rows]",
            "lse residual": f"{CPP}/test_cpp_weights.py::test_native_backward_weights_are_those_of_the_forward[plain]",
        },
    ),
    "C++ decode": Place(
        "lowering/kernels/cpp/decode.hpp",
        "cpp",
        {
            **_each(f"{NATIVE}[many-parts]", "sinks", "lse", "max"),
            "dropout": f"{NATIVE}[dropout-many-parts]",
            "value scales": f"{CPP}/test_native_stored.py::test_native_forward_reads_stored_keys_and_values[decode]",
            "empty rows": f"{NATIVE}[one-query-nothing]",
            "lse residual": (
                f"{CPP}/test_cpp_weights.py::test_native_backward_weights_are_those_of_the_forward[few rows]"
            ),
        },
    ),
    "library calls of torch": Place(
        "lowering/aten/forward.py",
        "aten",
        {
            **{
                name: f"{CLAIMED}[torch-aten-{name}]"
                for name in ("sinks", "lse", "max", "dropout", "value scales", "empty rows")
            },
            "lse residual": (
                f"{ATTENTION}/test_large_scores.py::test_gradients_at_large_scores_are_near_float64[itself-aten]"
            ),
        },
    ),
    "library calls of JAX": Place(
        "lowering/xla/forward.py",
        "xla",
        {
            **_each(
                f"{LOWERING}/xla/test_xla.py::test_xla_sinks_dropout_and_largest_scores[empty-rows]",
                *("sinks", "lse", "max", "dropout", "empty rows"),
            ),
            "value scales": (
                f"{ATTENTION}/test_stored.py::test_stored_keys_mean_what_their_scales_and_pages_say[int8-jax]"
            ),
            "lse residual": f"{LARGE}_xla[one key-1e+30]",
        },
    ),
}


def nodes() -> set[str]:
    """The ids of every test that a cell names."""
    return {cell for place in PLACES.values() for cell in place.cells.values() if isinstance(cell, str)}
