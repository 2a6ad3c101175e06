"""Which context a drafter's layers see, and in which direction: one explicit LayerSpec a layer.

Public readers agree while the config states causality and differ when it is silent, so silence is resolved
by one rule (the newest z-lab code and vLLM: a sliding layer is causal inside the block, a full one
bidirectional) and is reported as a finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from draftproof.config.finding import Finding, warning
from draftproof.config.reading import Fields, a_bool, an_int, strings

KINDS: Final = {"full_attention": False, "sliding_attention": True}
READERS: Final = (
    "z-lab of April 2026: bidirectional in every layer; newest z-lab, vLLM and SGLang: sliding layers "
    "causal, full layers bidirectional; speculators: the same, but vLLM's adapter for speculators "
    "configs takes an absent key as non-causal and applies one flag to all layers; ModelOpt trains "
    "sliding layers bidirectional and says so"
)


@dataclass(frozen=True)
class LayerSpec:
    """One layer's view. With the anchor at position P, block row j sees context rows t > P + j - `window`
    (all t < P in a full layer, whose `window` is None) and, of the block, rows <= j if `causal`, else every
    row."""

    sliding: bool
    window: int | None
    causal: bool


def read_layers(fields: Fields, body: str, count: int) -> tuple[LayerSpec, ...]:
    """`count` layers from the keys under `body` ("" or "transformer_layer_config.") and their DFlash
    spellings."""
    sliding, forced = _sliding(fields, body, count)
    window = _window(fields, body, any(sliding), forced)
    causal = _causal(fields, sliding, bidirectional_default=forced)
    if window is not None and not forced and fields.raw_value(body + "use_sliding_window") is False:
        fields.findings.append(
            warning(
                "use-sliding-window-false",
                "layer_types names sliding layers but use_sliding_window is false: transformers then "
                "drops the window, vLLM before 0.25 ran full attention, later ones refuse; here the "
                "layers slide",
                "true",
                "false",
                f"{fields.file}: {body}use_sliding_window",
                "set use_sliding_window to true",
            )
        )
    return tuple(
        LayerSpec(slides, window if slides else None, flag) for slides, flag in zip(sliding, causal, strict=True)
    )


def _sliding(fields: Fields, body: str, count: int) -> tuple[list[bool], bool]:
    """Which layers slide, and whether `use_swa` alone made them (then the block is bidirectional by
    default)."""
    fields.raw_value(body + "max_window_layers")  # asked, so not reported: no DFlash reader uses it
    kinds = fields.get("layers", [body + "layer_types"], strings, None, "full_attention, layer_types is absent")
    use_swa = fields.get("use_swa", ["dflash_config.use_swa"], a_bool, False)
    fields.sources.pop("use_swa")
    if kinds is None:
        _note_ambiguous_window(fields, body, use_swa)
        kinds = ("full_attention",) * count
    if len(kinds) != count:
        raise fields.bad(body + "layer_types", f"has {len(kinds)} entries for {count} layers")
    for kind in kinds:
        if kind not in KINDS:
            raise fields.bad(body + "layer_types", f"names {kind!r}; known are {', '.join(KINDS)}")
    sliding = [KINDS[kind] for kind in kinds]
    if use_swa and not any(sliding):
        fields.sources["layers"] = f"{fields.file}: dflash_config.use_swa"
        return [True] * count, True
    if use_swa and not all(sliding):
        fields.contradiction("layer_types", list(kinds), "dflash_config.use_swa", "true", decisive=True)
    return sliding, False


def _note_ambiguous_window(fields: Fields, body: str, use_swa: bool) -> None:
    if use_swa or fields.raw_value(body + "use_sliding_window") is not True:
        return
    fields.findings.append(
        warning(
            "layers-ambiguous",
            "use_sliding_window is true but layer_types is absent: transformers derives sliding layers "
            "from max_window_layers, DFlash readers take every layer as full; full is taken here",
            "layer_types with one entry a layer",
            "absent",
            f"{fields.file}: {body}layer_types",
            "state layer_types as the drafter was trained",
        )
    )


def _window(fields: Fields, body: str, wanted: bool, forced: bool) -> int | None:
    keys = ["dflash_config.swa_window_size", "dflash_swa_window_size", body + "sliding_window"]
    window = fields.get("window", keys, an_int(1), None, "no layer slides", decisive=wanted)
    if wanted and window is None:
        raise fields.bad(keys[0 if forced else 2], "is missing, but there are sliding layers")
    return window if wanted else None


def _causal(fields: Fields, sliding: list[bool], bidirectional_default: bool) -> list[bool]:
    stated = fields.get(
        "causality", ["is_causal", "dflash_config.causal"], a_bool, None, "per-layer rule", decisive=True
    )
    if stated is not None:
        return [stated] * len(sliding)
    if "speculators_model_type" in fields.raw or "transformer_layer_config" in fields.raw:
        return _speculators_causal(fields, sliding)
    rule = [False] * len(sliding) if bidirectional_default else list(sliding)
    if any(sliding):
        taken = "bidirectional, as use_swa without layer types" if bidirectional_default else "sliding layers causal"
        fields.sources["causality"] = f"default: {taken}"
        fields.findings.append(_disagreement(fields.file, "is_causal", taken, mixed=not all(sliding)))
    return rule


def _speculators_causal(fields: Fields, sliding: list[bool]) -> list[bool]:
    key = "sliding_window_non_causal"
    why = "sliding layers causal, full ones bidirectional, as speculators trains"
    stated = fields.get("causality", [key], a_bool, None, why)
    if stated is None and any(sliding):
        fields.findings.append(_disagreement(fields.file, key, "sliding layers causal", mixed=False))
    if stated is False and not all(sliding):
        fields.findings.append(
            warning(
                "causality-disagreement",
                "speculators trains full layers bidirectional whatever this key says; vLLM's adapter "
                "applies it to every layer and so runs the full layers causal",
                "full layers bidirectional",
                "false",
                f"{fields.file}: {key}",
                "compare the acceptance in the engine with `draftproof replay`",
            )
        )
    return [slides and not stated for slides in sliding]


def _disagreement(file: str, key: str, taken: str, mixed: bool) -> Finding:
    fix = "state it as the drafter was trained; `draftproof replay` with either value shows which one accepts more"
    if mixed:  # one flag cannot say "sliding layers causal, full layers bidirectional"
        fix = "if it was trained bidirectional, write is_causal: false; if by the rule taken here, leave it out: the "
        fix += "key holds for all layers. `draftproof replay` with and without it shows which one accepts more"
    return warning(
        "causality-disagreement",
        "the config does not say whether a block is causal and has sliding layers. Readers differ: "
        f"{READERS}. Taken here: {taken}",
        f"{key}: true or false",
        "absent",
        f"{file}: {key}",
        fix,
    )
