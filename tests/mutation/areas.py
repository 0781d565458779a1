"""What is mutated, by area, and the tests that are to notice it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lowering.kernels.triton.test_triton_slice import INTERPRETED, LONG

from .mutants import Mutant, mutants_of


@dataclass(frozen=True)
class Group:
    """Files, and the tests that are to notice a mutant in one of them; packages to import first, variables, and which
    of the tests run."""

    files: tuple[str, ...]
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    marked: str = "not slow and not exhaustive and not outside"


SIMPLIFY = tuple(
    f"tests/lowering/simplify/test_{n}.py"
    for n in ("rows", "rules_whole", "simplify", "canonical", "proofs", "rules_reach")
)
ANALYSIS = tuple(
    f"tests/lowering/analysis/test_{n}.py"
    for n in ("questions", "transfer", "tightness", "layout_exact", "library_settled")
)
# those that run planners, not whole calls
PLANNED = (
    "triton_planner_equals_torch_on_written_masks",
    "triton_planner_equals_torch_on_random_masks",
    "room_runs_out",
    "long_tables_are_searched_in_blocks",
    "ranges_of_rows",
    "triton_planner_reads_sorted_tables_that_end_early",
    "operators_of_floats",
    "triton_planner_ranges_of_nearly_all_entries",
    "positions_outside_of_all_pieces_belong_to_the_nearest",
    "triton_planner_boxes_of_tables_equal_torch",
    "triton_planner_takes_tables_of_any_integer_dtype",
    "triton_planner_launches_replay_on_new_tables",
)
# beside those of the slice
MORE = {
    "lowering/kernels/triton/children/forward_interpreted.py": (
        "triton_cases_equal_the_reference[holes]",
        "triton_cases_with_closed_form_bounds[window-crop]",
    ),
    "lowering/kernels/triton/children/decode_interpreted.py": (
        "parts_of_every_case[full]",
        "decode_parts_follow_the_length_of_sequences",
        "a_long_sequence_has_parts_of_its_own",
        "parts_by_head_where_the_mask_tells_heads_apart",
        "parts_of_some_heads_of_a_large_group",
    ),
    "lowering/kernels/triton/children/stored_interpreted.py": (
        "triton_forward_reads_stored_keys_and_values[many queries, small pages]",
    ),
    "lowering/kernels/triton/children/captured_interpreted.py": ("opposite_shares_of_an_entry_have_a_sum_of_zero",),
    "lowering/kernels/triton/children/backward_interpreted.py": (
        "whole_tiles_alone",
        "triton_gradient_cases_equal_the_reference[gqa]",
        "triton_gradient_cases_equal_the_reference[empty-rows]",
    ),
}
# on a JAX that interprets these kernels, 0.11 or later
FORWARD = (
    "products_of_a_gpu",
    "texts_are_their_expressions",
    "a_ragged_causal_kernel",
    "pallas_gpu_forward_equals_the_reference_without_races[holes]",
    "pallas_gpu_forward_equals_the_reference_without_races[relative-bias]",
    "pallas_gpu_forward_with_sinks_and_dropout",
    "lowers_for_a_gpu",
    "pallas_gpu_walk_visits_exactly_the_visible_tiles",
    "tiles_that_there_are_not",
    "default_tiles_fit",
    "more_batch_entries_than_a_grid_has",
    "a_call_without_keys",
)
BACKWARD = (
    "pallas_gpu_gradients_multiply_visible_tiles_alone",
    "layouts_read_no_tile_but_the_visible",
    "spans_may_be_traced",
    "dropout_scales_what_survives",
    "pallas_gpu_splits_dk_and_dv_that_exceed_registers",
)
# those that compile for seconds, not for minutes
DERIVED = (
    "sinks_groups_and_dropout_pass_check_grads[xla]",
    "parts_of_a_problem_pass_check_grads",
    "score_mods_pass_check_grads[alibi]",
    *(f"jax_transforms_of_transforms_equal_dense_attention[{name}-1]"
      for name in ("jvp", "grad(grad)", "vmap(jvp)", "linear_transpose(vmap)")),
    "a_tangent_that_instances_share_transposes_to_a_sum",
    "jax_tangents_of_a_table_and_of_sinks_are_differences",
    "jax_derivatives_of_narrow_dtypes_are_near_float64[bfloat16]",
    "jax_rows_without_keys_and_hidden_inf_have_zeros",
    "traced_spans_have_derivatives",
    "rows_of_few_keys_stand_beside_few_keys",
    "jax_first_gradients_launch_no_more_kernels",
    "attention_over_devices_refuses_what_it_has_not",
)  # fmt: skip
NATIVE_WEIGHTS = (
    "native_weighted_forward_equals_the_reference",
    "native_weighted_gradients_equal_the_reference",
    "native_weights_of_hidden_pairs_do_not_matter",
    "terms_of_bfloat16_hold_no_weights_of_any_size",
)
SUMS = (
    "jax_merged_sums_and_gradients_are_dense_ones",
    "sums_of_narrow_dtypes_are_near_dense_rows",
    "chunks_longer_than_a_ring_are_sums_of_two_parts[jax]",
)
INTERPRET = {"TRITON_INTERPRET": "1"}
KERNELS = "tests/lowering/kernels"
WEIGHTS = "tests/runtime/weights"
AREAS = {
    "rules": [Group(("lowering/simplify/rules_*.py",), SIMPLIFY, ("z3", "hypothesis"))],
    "transfer": [
        Group(("lowering/analysis/intervals.py", "lowering/analysis/questions.py"), ANALYSIS),
    ],
    "planner": [
        Group(
            (*(f"lowering/planner/{name}.py" for name in ("planner", "arrays")),
             *(f"lowering/planner/skeletons/{name}.tpl" for name in ("arrays", "headers", "reading"))),
            ("tests/lowering/planner/test_intervals.py", "tests/lowering/planner/test_flat_planner.py"),
            ("torch", "jax"),
        ),
        Group(
            ("lowering/planner/cpp*.py", "lowering/planner/*.hpp"),
            ("tests/lowering/planner/test_planner_cpp.py",), ("torch",),
        ),
        Group(
            ("lowering/planner/triton.py", *(f"lowering/planner/skeletons/{n}.tpl" for n in ("functions", "tables"))),
            tuple(f"tests/lowering/planner/children/triton_interpreted.py::test_{name}" for name in PLANNED),
            ("torch", "triton"), INTERPRET,
        ),
    ],
    "derivatives": [
        Group(
            ("runtime/torch/differentiable.py",),
            ("tests/runtime/torch/test_derivatives.py", f"{WEIGHTS}/test_weighted_torch.py"), ("torch",),
        ),
        Group(
            ("lowering/xla/differentiable.py", "runtime/jax/derivatives.py"),
            (*(f"tests/runtime/jax/test_derivatives_jax.py::test_{name}" for name in DERIVED),
             f"{WEIGHTS}/test_weighted_jax.py", "tests/runtime/jax/test_jax_explicit.py"), ("jax",),
        ),
    ],
    "weights": [
        Group(
            ("runtime/torch/weighted.py", "runtime/attention/weighted.py"),
            (f"{WEIGHTS}/test_weighted_torch.py", f"{WEIGHTS}/test_sums.py"), ("torch", "jax"),
        ),
        Group(
            ("lowering/xla/weighted.py",),
            (f"{WEIGHTS}/test_weighted_jax.py", *(f"{WEIGHTS}/test_sums.py::test_{name}" for name in SUMS),
             f"{WEIGHTS}/test_weighted_torch.py::test_nan_cotangents_of_visible_rows_reach_their_keys[xla]",
             f"{WEIGHTS}/test_weighted_torch.py::test_a_divisor_may_read_a_table_in_two_places[xla]"), ("torch", "jax"),
        ),
        Group(
            ("lowering/kernels/cpp/weighted.hpp",),
            tuple(f"{KERNELS}/cpp/test_cpp_weighted.py::test_{name}" for name in NATIVE_WEIGHTS), ("torch",),
            marked="not slow and not outside",  # terms of bfloat16 are exhaustive
        ),
    ],
    "statistics": [
        Group(
            ("runtime/attention/statistics.py", "runtime/torch/statistics.py", "runtime/jax/statistics.py",
             "lowering/xla/statistics.py"),
            (f"{WEIGHTS}/test_statistics.py", f"{KERNELS}/cpp/test_cpp_columns.py"), ("torch", "jax"),
        ),
        Group(
            ("lowering/kernels/cpp/columns.hpp", "lowering/kernels/cpp/columns.py"),
            (f"{KERNELS}/cpp/test_cpp_columns.py",
             f"{KERNELS}/cpp/test_out_of_memory.py::test_column_sums_report_each_failed_allocation"), ("torch",),
            marked="not slow and not outside",  # most lengths and dtypes are exhaustive
        ),
    ],
    "selection": [
        Group(
            ("runtime/select/blocks.py",),
            ("tests/runtime/select/test_select_blocks.py", "tests/runtime/select/test_select_papers.py"),
            ("torch", "jax"),
        ),
        Group(("runtime/select/papers.py",), ("tests/runtime/select/test_select_papers.py",), ("torch", "jax")),
    ],
    "skeletons": [
        Group(
            ("lowering/kernels/cpp/integers.hpp", "lowering/kernels/cpp/functions.hpp"),
            (f"{KERNELS}/cpp/test_cpp_operators.py", f"{KERNELS}/cpp/test_cpp_remainders.py"), ("torch",),
        ),
        Group(
            ("lowering/kernels/gluon/skeletons/*.tpl",),
            (f"{KERNELS}/gluon/test_gluon_interpreted.py", f"{KERNELS}/gluon/test_gluon_faults.py",
             f"{KERNELS}/gluon/test_gluon_library.py", f"{KERNELS}/gluon/test_exp2_polynomial.py",
             *(f"{KERNELS}/gluon/children/kernels_compiled.py::test_selected_gluon_kernels_match_their_compiled_figures"
               f"[128-causal-{arch}]" for arch in ("sm_90", "sm_100"))), ("torch", "triton"),
            marked="not slow and not outside",  # most of those for Blackwell are exhaustive
        ),
        Group(
            ("lowering/kernels/pallas_tpu/skeletons/*.tpl",),
            (f"{KERNELS}/pallas/test_pallas_tpu.py", f"{KERNELS}/pallas/test_pallas_tpu_backward.py",
             f"{KERNELS}/pallas/test_pallas_tpu_stored.py", f"{KERNELS}/pallas/test_pallas_walk.py"), ("jax",),
        ),
        Group(
            ("lowering/kernels/triton/skeletons/*.tpl",),
            (f"{KERNELS}/triton/test_emit_triton.py::test_words_hold_the_bits_of_intervals",
             *(f"tests/{file}::test_{name}"
               for part in (INTERPRETED, LONG, MORE) for file, names in part.items() for name in names
               if not file.startswith("lowering/planner") and "jax" not in file)),
            ("torch", "triton"), INTERPRET,
            marked="not slow and not outside",  # each is named, whatever its tier
        ),
        Group(
            ("lowering/kernels/pallas_gpu/skeletons/*.tpl",),
            (*(f"{KERNELS}/pallas/test_pallas_gpu.py::test_{name}" for name in FORWARD),
             *(f"{KERNELS}/pallas/test_pallas_gpu_backward.py::test_{name}" for name in BACKWARD)), ("jax",),
            marked="not slow and not outside",  # most of the interpreted ones are exhaustive
        ),
        Group(
            ("lowering/kernels/cpp/backward*.hpp",),
            (f"{KERNELS}/cpp/test_cpp_backward.py", f"{KERNELS}/cpp/test_native_holes.py",
             f"{KERNELS}/cpp/test_cpp_weights.py",
             f"{KERNELS}/cpp/test_out_of_memory.py::test_sums_of_parts_take_no_more_than_256_mebibytes"), ("torch",),
            marked="not slow and not outside",
        ),
        Group(
            ("lowering/kernels/cpp/forward*.hpp", "lowering/kernels/cpp/decode.hpp", "lowering/kernels/cpp/gemm.hpp",
             "lowering/kernels/cpp/scores.hpp", "lowering/kernels/cpp/vectors.hpp"),
            (f"{KERNELS}/cpp/test_native_holes.py", f"{KERNELS}/cpp/test_cpp_forward.py",
             f"{KERNELS}/cpp/test_native_stored.py::test_native_forward_reads_stored_keys_and_values",
             "tests/runtime/backends/test_native_distance.py",
             f"{KERNELS}/cpp/test_native_variants.py::test_half_precision_without_its_instructions",
             f"{KERNELS}/cpp/test_cpp_weights.py"), ("torch",),
            marked="not slow and not outside",
        ),
    ],
}  # fmt: skip


def mutants(root: Path, group: Group) -> list[Mutant]:
    files = sorted({p.relative_to(root).as_posix() for pattern in group.files for p in root.glob(pattern)})
    return [m for file in files for m in mutants_of(root, file)]
