"""Relatives of DFlash: told apart by architecture name and by keys, described, and refused where plain
DFlash would run them wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from draftproof.config.rope import RopeSpec

# In order: the first family whose mark is in the architecture name (lower case) wins.
BY_ARCHITECTURE: Final = (
    ("dflash2", "dflash2"),
    ("dspark", "dspark"),
    ("domino", "domino"),
    ("laguna", "laguna"),
    ("mimo", "mimo"),
    ("muse", "muse"),
    ("nemotron", "nemotron"),
    ("xpress", "xpress"),
    ("lilicorr", "lilicorr"),
)
BY_KEY: Final = (
    ("dflash2", ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")),
    ("domino", ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")),
    ("dspark", ("markov_rank", "markov_head_type", "use_confidence_head")),
    ("mimo", ("backbone_rotary_base", "attention_value_scale", "attention_sink_bias")),
)
MISSING: Final = {
    "dflash2": "the in-block dynamic convolutions and the candidate selector of DFlash2",
    "dspark": "DSpark's Markov head, its confidence head and drafting from the anchor row",
    "domino": "Domino's recurrent correction head",
    "laguna": "Laguna's attention gates, per-tap norms and normed context",
    "mimo": "MiMo's second rope base for context, value scale, attention sinks and separate mask embedding",
    "nemotron": "Nemotron's attention sinks, own embedding and quantised weights",
    "xpress": "the XPress head",
    "lilicorr": "the LiLiCorr head",
}
RUNNABLE: Final = ("dflash", "muse")


def find_family(architecture: str, extras: Mapping[str, Any], speculators_type: str = "") -> str:
    """A family's name; "dflash" when nothing marks the checkpoint as one of its relatives. A projector_type
    that is not known is its own family, so that it is refused by name."""
    for text in (architecture, speculators_type):
        for mark, family in BY_ARCHITECTURE:
            if mark in text.lower():
                return family
    for family, keys in BY_KEY:
        if any(extras.get(key) not in (None, False, 0) for key in keys):
            return family
    projector = str(extras.get("projector_type") or "dflash").lower()
    return "dflash" if projector in ("dflash", "linear") else projector


def missing_parts(
    family: str,
    extras: Mapping[str, Any],
    rope: RopeSpec,
    hidden_act: str,
    taps: tuple[int, ...],
    reduced_vocab: int | None,
) -> list[str]:
    """What plain DFlash lacks to run this checkpoint as it was trained; empty when it can."""
    missing = []
    if family not in RUNNABLE:
        missing.append(MISSING.get(family, f"the {family!r} projector"))
    if extras.get("sample_from_anchor") and family != "dspark":
        missing.append("drafting from the anchor row (sample_from_anchor)")
    if rope.scaling is not None:
        kind = rope.scaling.get("rope_type", rope.scaling.get("type"))
        missing.append(f"rope scaling of type {kind!r}")
    if extras.get("is_neox_style") is False:
        missing.append("interleaved rotary pairing (is_neox_style false)")
    if extras.get("quantization_config"):
        missing.append("quantised weights (quantization_config)")
    if extras.get("logit_scale") not in (None, 1, 1.0):
        missing.append("logit_scale")
    if hidden_act != "silu":
        missing.append(f"activation {hidden_act!r}")
    if reduced_vocab is not None:
        missing.append(f"an own head over {reduced_vocab} tokens (draft_vocab_size)")
    if -1 in taps:
        missing.append("a tap on the embedding output (tap -1)")
    return missing
