"""The closed sets of config keys: which are read, which are known and harmless, and which are misspelt.

A misspelt key is the worst kind of setting: present in the file, absent from the run. A key that is close
to one we read, and is no key of its own, is therefore refused with the name of its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import Any, Final

from draftproof.errors import UserError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHAPE: Final = _words(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "vocab_size rms_norm_eps hidden_act attention_bias rope_theta rope_parameters rope_scaling "
    "partial_rotary_factor max_position_embeddings layer_types sliding_window use_sliding_window "
    "max_window_layers tie_word_embeddings is_neox_style model_type"
)
SCALES: Final = _words("input_embedding_scale output_multiplier final_logit_softcapping")
FAMILY: Final = _words(
    "projector_type sample_from_anchor use_aux_hidden_state conv_kernel_size conv_group_size "
    "selector_rank selector_top_k backbone_rotary_base attention_value_scale attention_sink_bias "
    "markov_rank markov_head_type use_confidence_head shift_label emb_dim gru_hidden_dim "
    "pure_draft_prefix_len logit_scale"
)
DFLASH: Final = (
    SCALES
    | FAMILY
    | _words(
        "mask_token_id mask_token target_layer_ids block_size use_swa swa_window_size causal partial_rotary_factor"
    )
)
OWN: Final = _words(
    "mask_token_id target_layer_ids block_size num_target_layers target_num_hidden_layers "
    "target_hidden_size is_causal draft_vocab_size dflash_config auto_map architectures "
    "quantization_config layer_ids mask_token eagle_aux_hidden_state_layer_ids dflash_block_size "
    "dflash_mask_token_id dflash_swa_window_size dflash_architecture_config"
)
SPECULATORS: Final = _words(
    "speculators_model_type speculators_config speculators_version transformer_layer_config "
    "aux_hidden_state_layer_ids sliding_window_non_causal sample_from_anchor"
)
TOP: Final = SHAPE | SCALES | FAMILY | OWN | SPECULATORS
TARGET: Final = SHAPE | _words(
    "n_embd n_head n_layer n_positions rotary_pct full_attention_interval sliding_window_pattern "
    "layers_block_type hybrid_override_pattern linear_attn_config mtp_num_hidden_layers "
    "num_nextn_predict_layers architectures text_config"
)

# Written by transformers into almost every config; none of them changes what a drafter computes.
HARMLESS: Final = _words(
    "_name_or_path _attn_implementation _attn_implementation_autoset dtype torch_dtype "
    "transformers_version use_cache attention_dropout initializer_range bos_token_id eos_token_id "
    "pad_token_id unk_token_id sep_token_id decoder_start_token_id return_dict output_hidden_states "
    "output_attentions use_return_dict id2label label2id is_encoder_decoder is_decoder torchscript "
    "pruned_heads problem_type finetuning_task chunk_size_feed_forward cross_attention_hidden_size "
    "add_cross_attention tie_encoder_decoder tokenizer_class prefix task_specific_params use_bfloat16 "
    "pretraining_tp mlp_bias hidden_dropout embd_pdrop resid_pdrop layer_norm_eps layer_norm_epsilon "
    "num_layers num_heads hidden_activation attn_bias use_bias head_size num_experts "
    "num_experts_per_tok num_local_experts moe_intermediate_size output_router_logits "
    "router_aux_loss_coef norm_topk_prob decoder_sparse_step mlp_only_layers sliding_window_pattern "
    "sliding_window_size attention_window window_size rotary_pct rope_type rope_local_base_freq "
    "num_kv_heads attn_logit_softcapping final_logit_softcap max_seq_len max_sequence_length "
    "n_positions full_attention_interval attention_multiplier embedding_multiplier residual_multiplier "
    "logits_scaling query_pre_attn_scalar torch_compile text_config vision_config audio_config "
    "hidden_sizes block_sizes embed_dim hidden_dim v_head_dim qk_head_dim norm_eps intermediate_size_mlp "
    "mlp_layer_types mtp_layer_types moe_hidden_size swa_num_attention_heads swa_num_key_value_heads "
    "swa_head_dim ffn_hidden_size attention_out_bias max_logit_scale use_attention_bias"
)
CLOSE: Final = 0.8  # difflib's ratio below which two names are not worth comparing letter by letter
EDITS: Final = 4  # letters added or removed; one replaced or two swapped letters count as two


def refuse_misspelt(raw: Mapping[str, Any], file: str) -> None:
    """UserError unknown-key for the first key, at any level we read, that is a near miss of a key we read."""
    for prefix, known in (("", TOP), ("dflash_config.", DFLASH), ("transformer_layer_config.", SHAPE)):
        level = raw.get(prefix[:-1]) if prefix else raw
        if isinstance(level, Mapping):
            for key, meant in misspelt(level, known):
                raise UserError(
                    "unknown-key",
                    f"{file}: {prefix}{key} is not a known key; the nearest is {prefix}{meant}",
                    f"rename {prefix}{key} to {prefix}{meant}, or remove it if it is meant to do nothing",
                )


def misspelt(level: Iterable[str], known: frozenset[str]) -> list[tuple[str, str]]:
    """Pairs (key as written, key that was probably meant) at one level of a drafter's config."""
    return near_misses(level, known, HARMLESS | TOP)


def near_misses(level: Iterable[str], known: frozenset[str], quiet: frozenset[str]) -> list[tuple[str, str]]:
    """The same for any level: keys within a few letters of a known one, unless known themselves or in
    `quiet`."""
    pairs = []
    for key in level:
        if key in known or key in quiet:
            continue
        written = key.lower()
        for near in get_close_matches(written, sorted(known), n=1, cutoff=CLOSE):
            if _edits(written, near) <= (EDITS if len(near) > 10 else EDITS // 2):
                pairs.append((key, near))
    return pairs


def _edits(one: str, other: str) -> int:
    matched = sum(block.size for block in SequenceMatcher(None, one, other, False).get_matching_blocks())
    return len(one) + len(other) - 2 * matched
