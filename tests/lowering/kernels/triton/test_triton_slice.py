"""Some of every test of Triton's and Gluon's kernels, in as few processes as there are ways to run them. The rest is
`pytest -m exhaustive`: the files test_triton_*.py of this folder, and test_gluon_compiled.py."""

from pathlib import Path

from support.triton.process import run

TESTS = Path(__file__).parents[3]
INTERPRETED = {
    "lowering/kernels/triton/children/forward_interpreted.py": (
        "triton_cases_equal_the_reference[empty-rows]",
        "triton_cases_equal_the_reference[scaled]",
        "triton_cases_with_sinks_and_dropout[softcap]",
        "triton_cases_in_half_precision[documents-by-batch-bfloat16]",
        "triton_cases_with_closed_form_bounds[window-crop]",
        "tensors_of_any_head_size[40-float16]",
        "triton_operators_equal_the_reference",
    ),
    "lowering/kernels/triton/children/decode_interpreted.py": (
        "parts_of_packed_heads[4-17-2]",
        "keys_and_values_of_8_bits[bfloat16-70-float8_e5m2]",
        "decode_parts_follow_the_length_of_sequences[40-ends0]",
    ),
    "lowering/kernels/triton/children/latent_interpreted.py": (
        "latent_of_ragged_sequences[80-64-dtype1]",
        "latent_in_parts_by_length[16-3]",
    ),
    "lowering/kernels/triton/children/stored_interpreted.py": (
        "triton_decode_parts_read_stored_keys_and_values[no end]",
        "triton_forward_reads_stored_keys_and_values[as they are]",
    ),
    "lowering/kernels/triton/children/backward_interpreted.py": (
        "triton_gradient_cases_equal_the_reference[softcap]",
        "captured_in_half_precision[by column, gqa bfloat16]",
        "shapes_with_closed_form_bounds[place1]",
    ),
    "lowering/kernels/triton/children/captured_interpreted.py": (
        "captured_gradients_in_half_precision_are_near[scatter, crop-bfloat16]",
    ),
    "lowering/kernels/triton/children/scores_interpreted.py": (
        "triton_score_mods_equal_the_reference[softcap, alibi-bfloat16]",
        "triton_score_mods_equal_the_reference[a number alone-float16]",
        "triton_score_mods_equal_the_reference[a condition of the head-float16]",
        "error_of_the_instruction[float16]",
        "tables_by_distance[mask-float32]",
    ),
    "lowering/kernels/triton/children/weights_interpreted.py": (
        "triton_weights_in_half_precision[by column-bfloat16]",
        "triton_weights_equal_the_reference[of a head alone]",
        "triton_weights_of_few_queries[by head and query-3]",
        "products_in_16_bits_are_proved_to_fit",
    ),
    "runtime/backends/children/triton_jax_interpreted.py": (
        "jax_triton_cases_equal_the_reference[documents-by-batch]",
        "jax_triton_gradients_equal_the_reference[softcap]",
        "few_queries_of_all_heads_in_parts_of_the_keys[3]",
    ),
    "lowering/kernels/triton/children/bytes_interpreted.py": ("keys_and_values_are_loaded_once[1-0-int8-16]",),
    "lowering/kernels/triton/children/large_scores_interpreted.py": (
        "weights_in_torch[one key-1e+30]",
        "weights_in_torch[affine-100000.0]",
        "weights_in_jax[distance-100000.0]",
    ),
    "runtime/backends/children/triton_interpreted.py": (
        "eager_beside_the_interpreter[table and scalar]",
        "eager_beside_the_interpreter[sinks and dropout]",
    ),
    "runtime/backends/children/triton_rows_interpreted.py": (
        "long_rows_in_parts_equal_the_reference_and_repeat[BY_HEAD-longest-of-all-first]",
    ),
    "lowering/planner/children/triton_interpreted.py": (
        "triton_planner_equals_torch_on_written_masks[documents]",
        "triton_planner_reads_sorted_tables_that_end_early",
        "room_runs_out[33-2]",
    ),
}
LONG = {  # that take seconds: for mutants, and exhaustive with all others of their files
    "lowering/kernels/triton/children/forward_interpreted.py": ("triton_cases_equal_the_reference[gqa]",),
    "lowering/kernels/triton/children/decode_interpreted.py": ("parts_with_everything[gqa]",),
    "lowering/kernels/triton/children/stored_interpreted.py": (
        "stored_decode_parts_follow_the_length_of_sequences[int8 in pages of 16]",
    ),
    "lowering/kernels/triton/children/backward_interpreted.py": (
        "triton_captured_gradients_equal_the_reference[by row]",
        "sums_with_sinks_and_dropout[gqa-True-0.6]",
    ),
    "lowering/kernels/triton/children/scores_interpreted.py": (
        "triton_score_mods_equal_the_reference[decides-float16]",
        "float32_keeps_its_text",
        "triton_score_mod_gradients_equal_the_reference[crop-bfloat16]",
        "triton_score_mod_gradients_equal_the_reference[of rows alone-float16]",
        "tables_by_distance[gqa-bfloat16]",
        "gradients_by_distance[factor, NaN where hidden]",
    ),
    "runtime/backends/children/triton_rows_interpreted.py": ("gradients_of_long_rows[BY_HEAD-longest-of-all-first]",),
    "runtime/bench/test_numerics.py": (
        "errors_keep_their_bound[triton-scores of 100-bfloat16]",
        "errors_keep_their_bound[triton-scores past 65504-float16]",
        "numbers_that_are_not_finite[k-nan-triton]",
        "scores_of_minus_infinity_hide_their_keys[triton]",
    ),
    "runtime/backends/children/triton_interpreted.py": (
        "graph_of_a_checkpoint",
        "triton_calls_in_an_order_equal_plain_ones[causal & same(doc)]",
        "eager_beside_the_interpreter[shared heads]",
        "eager_beside_the_interpreter[window]",
        "eager_beside_the_interpreter[values of another size]",
    ),
    "lowering/kernels/triton/children/captured_interpreted.py": (
        "captured_tables_equal_the_reference[plane, of a head]",
    ),
    "lowering/planner/children/triton_interpreted.py": (
        "triton_planner_equals_torch_on_random_masks[1]",
        "steps_from_tables_to_gradients[causal & doc[b, q] == doc[b, k]-tables1]",
    ),
}
COMPILED = {
    "lowering/kernels/triton/children/kernels_compiled.py": (
        "default_tiles_do_not_spill[softcap, alibi-64]",
        "triton_backward_fits_when_compiled[learned softcap-bfloat16-live1]",
        "triton_operators_compile_in_32_and_64_bits[False]",
        "a_soft_cap_is_one_product_and_one_tanh[sm_90]",
        "a_table_by_distance_is_loaded_once_a_tile[sm_90]",
    ),
    "lowering/planner/children/triton_compiled.py": (
        "triton_planner_kernels_compile_for_each_architecture[documents-sm_90]",
    ),
    "lowering/kernels/triton/children/tiles_compiled.py": (
        "selected_triton_tiles_match_their_compiled_figures[gfx942-64-causal-whole]",
    ),
    "lowering/kernels/gluon/children/kernels_compiled.py": (
        "selected_gluon_kernels_match_their_compiled_figures[64-documents-sm_90]",
        "selected_gluon_kernels_match_their_compiled_figures[256-alibi-sm_100]",
    ),
}
LAUNCHED = {
    "runtime/plans/children/flat_device_launched.py": (
        "device_plans_read_no_value_on_the_host[causal & same(doc)]",
        "changed_lengths_compile_nothing",
    ),
    "runtime/backends/children/triton_launched.py": (
        "lengths_batches_and_heads_compile_nothing",
        "long_rows_are_launched_in_parts[True]",
        "windows_inside_a_class_compile_nothing",
        "prepared_launch_takes_the_kernel_of_triton",
        "a_warm_call_reads_nothing_back[documents]",
    ),
    "runtime/backends/children/serving_launched.py": ("a_step_is_two_launches_and_reads_nothing_back[int8-16-4]",),
}


def named(part):
    return [f"{TESTS / file}::test_{name}" for file, names in part.items() for name in names]


def test_slice_of_interpreted_triton_tests_passes():
    run(*named(INTERPRETED), TRITON_INTERPRET="1")


def test_compiled_and_launched_into_nothing():
    run(*named(COMPILED), *named(LAUNCHED))
