"""Tiny configurations of any model type of transformers: its defaults with every size made small, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

VOCABULARY, LENGTH, HIDDEN, HEADS, WINDOW = 99, 24, 32, 4, 8

# the first line with a pattern that is the whole name decides; None leaves the default
LINES: list[tuple[Any, str]] = [
    (None, "model_type .*_layer_id chunk_size_feed_forward pretraining_tp .*kernel.* .*stride.* num_channels .*cost"),
    (None, ".*coefficient type_vocab_size index_kv_stride"),
    (4, ".*index_n_heads index_heads .*linear_num_(key|value)?_?heads"),
    (16, ".*index_head_dim"),
    (6, "index_topk"),
    (4, "index_block_size sparse_block_size"),
    (2, "index_topk_blocks .*topk_blocks"),
    (2, ".*num_key_value_heads .*num_kv_heads .*n_kv_heads .*kv_heads multi_query_group_num"),
    (HEADS, ".*attention_heads .*num_heads .*n_heads? nhead heads"),
    (12, "qk_head_dim"),
    (8, "qk_nope_head_dim v_head_dim"),
    (4, "qk_rope_head_dim rotary_dim"),
    (16, ".*lora_rank"),
    (HIDDEN // HEADS, ".*head_dim .*kv_channels .*d_kv .*dim_head .*head_size .*d_head"),
    (None, "first_k_dense_replace num_hash_layers num_nextn_predict_layers num_kv_shared_layers max_window_layers"),
    (None, ".*layer_idx .*num_feat_extract_layers .*hybrid_layer_ids"),
    (
        2,
        ".*num_hidden_layers .*num_layers .*n_layers? .*encoder_layers .*decoder_layers .*num_blocks .*depth .*_layers",
    ),
    (64, ".*codebook_size"),
    (VOCABULARY, ".*vocab_size.* .*_vocab n_words num_codevectors_per_group"),
    (2, ".*num_experts_per_tok(en)? moe_topk moe_top_k moe_k top_k_experts experts_per_token"),
    (1, "n_group topk_group n_groups"),
    (4, ".*num_experts n_routed_experts num_local_experts num_routed_experts"),
    (128, ".*max_position_embeddings n_positions .*max_seq_len .*max_source_positions .*max_target_positions"),
    (128, ".*num_positions .*seq_length n_ctx max_sequence_length"),
    (WINDOW, "sliding_window local_attention attention_window attention_chunk_size local_attention_window_len"),
    (WINDOW, "window_length .*sliding_window_size"),
    (32, "(.*_)?image_size pretrain_image_size input_resolution"),
    (8, "(.*_)?patch_size"),
    (64, "hidden_size_global"),
    (48, ".*intermediate_size .*ffn_dim .*dim_feedforward .*d_ff .*n_inner .*ffn_hidden_size .*mlp_dim .*d_inner"),
    (HIDDEN, ".*hidden_size .*d_model .*n_embd .*hidden_dim .*dim .*embedding_size .*feature_size"),
]
RULES = [(re.compile(pattern), value) for value, patterns in LINES for pattern in patterns.split()]
STAGES = {"out_features", "out_indices", "stage_names", "_out_features", "_out_indices"}  # they follow from the depth
TOKEN = re.compile(r".*(token_id|token_index|_idx|_ids?)$")


# what names do not tell
SPECIAL: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "autoformer": {"prediction_length": 4},
    "bamba": {"attn_layer_indices": [1]},
    "blt_global_transformer": {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": HEADS},
    "esm": {"vocab_size": VOCABULARY},
    "esmc": {"num_key_value_heads": HEADS},
    "gemma3n_text": {"intermediate_size": 48, "activation_sparsity_pattern": [0.0, 0.0], "num_kv_shared_layers": 0},
    "glm5_next_text": {"num_key_value_heads": HEADS, "index_topk": 8, "index_kpool": 2},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
        "window_size": 8,
    },
    "mamba2": {"head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2},
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": HEADS, "swa_num_key_value_heads": HEADS},
    {"num_key_value_heads": HEADS, "head_dim": 4},  # the part of a head that is rotated
    {"mrope_section": [2, 1, 1]},
    {"mrope_section": [1, 1, 0]},
    {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_headdim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16},
    {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": HEADS},
]


def smaller(name: str, value: Any) -> Any:
    """A value of a configuration, made small."""
    if isinstance(value, dict):
        if name in ("rope_parameters", "id2label", "per_layer_config"):
            return value
        return {k: smaller(k, v) for k, v in value.items() if k not in STAGES}
    if isinstance(value, bool) or value is None:
        return value
    if "dropout" in name or "drop_path" in name or name == "layerdrop":
        return 0.0 if isinstance(value, float) else value
    if isinstance(value, list | tuple):
        if value and all(isinstance(x, int) and not isinstance(x, bool) for x in value):
            found = rule(name)
            if found is not None and ("size" in name or "dim" in name) and "hidden" not in name:
                return [min(x, found) for x in value]
        return value
    if not isinstance(value, int):
        return value
    if TOKEN.match(name) and value > 5:
        return 90 + sum(map(ord, name)) % 9  # inside the vocabulary, and seldom the same for two names
    found = rule(name)
    return value if found is None or (0 <= value <= found and "vocab" not in name) else found


def rule(name: str) -> Any:
    return next((value for pattern, value in RULES if pattern.fullmatch(name)), None)


def layers(given: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry for each layer, cut: one of each kind, and two at least."""
    kinds = given.get("layer_types")
    known = next((given[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(given.get(n), int)), 2)
    if isinstance(given.get("per_layer_config"), dict):  # what the first layer with a configuration of its own has
        own = list(given["per_layer_config"].values())[:1]
        given = {**given, "per_layer_config": {str(known - 1): smaller("", x) for x in own}}
    if isinstance(kinds, list) and kinds:
        chosen = list(dict.fromkeys(kinds))
        chosen = (chosen * 2)[: max(2, len(chosen))]
        given = {**given, "layer_types": chosen}
        for n in ("num_hidden_layers", "n_layer", "num_layers"):
            if isinstance(given.get(n), int):
                given[n] = len(chosen)
        known = len(chosen)
    for n in (
        "mlp_layer_types",
        "indexer_types",
        "no_rope_layers",
        "layers_block_type",
        "mlp_types",
        "layer_rope_theta",
    ):
        if isinstance(given.get(n), list):
            some = list(given[n])
            ends = some[:1] + some[-(known - 1) :] if known > 1 else some[:1]
            given = {**given, n: (ends * known)[:known]}
    return {k: layers(v) if isinstance(v, dict) and k != "rope_parameters" else v for k, v in given.items()}


def configs(kind: str, more: dict[str, Any] | None = None) -> Iterator[Any]:
    """Tiny configurations of a model type, the likeliest to work first."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    default = made().to_dict()
    for unwanted in ("transformers_version", "_name_or_path", "architectures", "id2label", "label2id", "dtype"):
        default.pop(unwanted, None)
    small = {**smaller("", default), **SPECIAL.get(kind, {})}
    for part in small.values():
        if isinstance(part, dict) and part.get("model_type") in SPECIAL:
            part.update(SPECIAL[part["model_type"]])
    for tokens in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if isinstance(default.get(tokens), int) or tokens in default:
            small[tokens] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}[
                tokens
            ]
    first: Exception | None = None
    some = False
    for change in VARIANTS:
        try:
            made_config = made.from_dict(layers({**changed(small, change), **(more or {})}))
        except Exception as e:  # whatever a configuration checks
            first = first or e
        else:
            some = True
            yield made_config
    if first is not None and not some:
        raise first


def changed(given: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Other sizes, wherever a configuration has them."""
    return {k: changed(v, change) if isinstance(v, dict) else change.get(k, v) for k, v in given.items()}
