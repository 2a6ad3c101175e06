"""The kind of each of a target's layers, from the half-dozen ways in which configs spell it."""

from __future__ import annotations

from typing import Any, Final

from draftproof.config.reading import Fields, an_int, ints, strings

NAMES: Final = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "sliding_window_attention": "sliding",
    "linear_attention": "linear",
}
HYBRID_LETTERS: Final = {"*": "full", "M": "mamba", "-": "mlp", "E": "moe"}
ALTERNATING: Final = ("gemma2",)  # model types whose class slides every second layer without saying so
GEMMA3_PATTERN: Final = 6
ALL_SLIDING: Final = ("mistral", "mixtral", "phi3", "starcoder2")  # a window, if set, holds for every layer


def read_kinds(fields: Fields, body: str, count: int, model_type: str) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window (None when no layer slides) and `count` kinds."""
    window = fields.get("sliding_window", [body + "sliding_window"], an_int(), None, "not stated")
    kinds = _listed(fields, body) or _by_rule(fields, body, count, model_type, window)
    if len(kinds) != count:
        raise fields.bad(body + "num_hidden_layers", f"is {count} but the layer list has {len(kinds)} entries")
    return (window if "sliding" in kinds else None), kinds


def _listed(fields: Fields, body: str) -> tuple[str, ...] | None:
    keys = [body + "layer_types", body + "layers_block_type"]
    listed = fields.get("layer_kinds", keys, strings, None)
    if listed is not None:
        return tuple(NAMES.get(name, name) for name in listed)
    letters = fields.raw_value(body + "hybrid_override_pattern")
    if isinstance(letters, str) and letters:
        fields.sources["layer_kinds"] = f"{fields.file}: {body}hybrid_override_pattern"
        return tuple(HYBRID_LETTERS.get(letter, letter) for letter in letters)
    return None


def _by_rule(fields: Fields, body: str, count: int, model_type: str, window: int | None) -> tuple[str, ...]:
    def every(key: str, others: str) -> tuple[str, ...] | None:
        """Each n-th layer is full, n under `key`."""
        step = fields.get("layer_kinds", [body + key], an_int(), None)
        return None if step is None else _every(step, others, count)

    for key, others in (
        ("full_attention_interval", "linear"),
        ("sliding_window_pattern", "sliding"),
        ("_sliding_window_pattern", "sliding"),
    ):
        if kinds := every(key, others):
            return kinds
    linear = fields.raw_value(body + "linear_attn_config")
    if isinstance(linear, dict) and "full_attn_layers" in linear:
        return _kimi(fields, body, count)
    return _by_model_type(fields, body, count, model_type, window)


def _every(step: int, others: str, count: int) -> tuple[str, ...]:
    return tuple("full" if (i + 1) % step == 0 else others for i in range(count))


def _kimi(fields: Fields, body: str, count: int) -> tuple[str, ...]:
    """Kimi Linear lists its full layers, counted from 1."""
    key = f"{body}linear_attn_config.full_attn_layers"
    full = fields.get("layer_kinds", [key], ints(1))
    return tuple("full" if i + 1 in full else "linear" for i in range(count))


def _by_model_type(fields: Fields, body: str, count: int, model_type: str, window: int | None) -> tuple[str, ...]:
    use = fields.raw_value(body + "use_sliding_window")
    first: Any = fields.raw_value(body + "max_window_layers")
    if window and use is True and isinstance(first, int):
        fields.sources["layer_kinds"] = f"{fields.file}: {body}use_sliding_window, {body}max_window_layers"
        return tuple("sliding" if i >= first else "full" for i in range(count))
    if window and model_type.startswith(("gemma3", *ALTERNATING)):
        step = 2 if model_type.startswith(ALTERNATING) else GEMMA3_PATTERN
        fields.sources["layer_kinds"] = f"default: every {step}. layer full, the rule of {model_type}"
        return _every(step, "sliding", count)
    if window and use is None and model_type in ALL_SLIDING:
        fields.sources["layer_kinds"] = f"{fields.file}: {body}sliding_window, the rule of {model_type}"
        return ("sliding",) * count
    fields.sources["layer_kinds"] = "default: full, no key names a layer kind"
    return ("full",) * count
