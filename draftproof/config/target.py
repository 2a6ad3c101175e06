"""The only reader of a target's config: any Hugging Face config.json, wrapped or plain, becomes one
TargetSpec.

Multimodal wrappers keep the language model in `text_config`; layer kinds are spelt in half a dozen ways. A
kind this file does not know keeps its own name, so that the engine can refuse it by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.config.keys import HARMLESS, TARGET, near_misses
from draftproof.config.kinds import read_kinds
from draftproof.config.linear import LinearSpec, read_weight_shape
from draftproof.config.reading import MISSING, Fields, a_bool, a_number, an_int, load_config, strings
from draftproof.config.rope import read_partial, rope_places
from draftproof.errors import UserError

WRAPPERS: Final = ("text_config", "llm_config", "language_config", "thinker_config.text_config")
DESCRIBES: Final = (
    "hidden_size",
    "n_embd",
    "num_hidden_layers",
    "architectures",
    "thinker_config",
    *WRAPPERS,
)
OTHER_SENSES: Final = ("vision_config", "audio_config", "thinker_config")
MTP: Final = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers")

# transformers writes no value that equals its class default, and published Gemma 3 configs rely on that.
CLASS_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
    }
}
TIED_BY_DEFAULT: Final = ("gemma", "gpt2", "cohere")


@dataclass(frozen=True)
class TargetSpec:
    """What a target's config says. `layer_kinds` holds "full", "sliding", "linear" or a foreign kind's own
    name, one a layer; `rope_base` is that of the full layers; `mtp_layers` counts the model's own
    multi-token-prediction layers."""

    path: str
    architecture: str
    model_type: str
    multimodal: bool
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    layer_kinds: tuple[str, ...]
    sliding_window: int | None
    rope_base: float | None
    partial_rotary_factor: float
    max_positions: int | None
    tie_word_embeddings: bool
    mtp_layers: int
    intermediate_size: int | None
    experts: int | None
    linear: LinearSpec | None
    quantized: bool
    sources: Mapping[str, str]
    findings: tuple[Finding, ...]


def read_target(path: str | Path) -> TargetSpec:
    """Read a folder with a config.json, or that file. UserError: not-found, not-a-model, bad-json,
    bad-config."""
    folder, file, raw = load_config(path)
    _refuse_other(raw, f"{folder}/{file}")
    fields = Fields(raw, file)
    body = _body_prefix(fields)
    shape = _shape(fields, body)
    layers = shape["num_layers"]
    model_type = str(fields.raw_value(body + "model_type") or "")
    window, kinds = read_kinds(fields, body, layers, model_type)
    _note_misspelt(fields, body)
    return TargetSpec(
        path=str(folder),
        architecture=_architecture(fields),
        model_type=str(raw.get("model_type") or model_type),
        multimodal=bool(body) and any(name in raw for name in OTHER_SENSES),
        layer_kinds=kinds,
        sliding_window=window,
        **shape,
        **_rope(fields, body, model_type),
        tie_word_embeddings=_tied(fields, body, model_type),
        mtp_layers=fields.get("mtp_layers", [body + key for key in MTP], an_int(0), 0, "none stated"),
        **read_weight_shape(fields, body),
        sources=fields.sources,
        findings=tuple(fields.findings),
    )


def _refuse_other(raw: Mapping[str, Any], where: str) -> None:
    if any(key in raw for key in ("dflash_config", "speculators_model_type", "speculators_config")):
        raise UserError(
            "not-a-model",
            f"{where} is a drafter's config, not a target's",
            "give the drafter first, then --target",
        )
    if not any(key in raw for key in DESCRIBES):
        raise UserError("not-a-model", f"{where} describes no model", "name the folder of the target's checkpoint")


def _body_prefix(fields: Fields) -> str:
    for wrapper in WRAPPERS:
        if isinstance(fields.raw_value(wrapper.split(".")[0]), Mapping) and isinstance(
            fields.raw_value(wrapper), Mapping
        ):
            return wrapper + "."
    return ""


def _shape(fields: Fields, body: str) -> dict[str, Any]:
    defaults = CLASS_DEFAULTS.get(str(fields.raw_value(body + "model_type")), {})

    def get(name: str, *keys: str) -> int:
        default = defaults.get(keys[0], MISSING)
        return fields.get(name, [body + key for key in keys], an_int(), default, f"{default}, the model class's own")

    hidden = get("hidden_size", "hidden_size", "n_embd")
    heads = get("num_heads", "num_attention_heads", "n_head")
    kv_heads = fields.get("num_kv_heads", [body + "num_key_value_heads"], an_int(), defaults.get("num_key_value_heads"))
    if kv_heads is None:
        fields.sources["num_kv_heads"] = "derived: num_attention_heads"
    head_dim = fields.get("head_dim", [body + "head_dim"], an_int(), defaults.get("head_dim"))
    if head_dim is None:
        if hidden % heads:
            raise fields.bad(body + "head_dim", "is missing and hidden_size is no multiple of num_attention_heads")
        fields.sources["head_dim"] = "derived: hidden_size / num_attention_heads"
    return {
        "hidden_size": hidden,
        "num_layers": get("num_layers", "num_hidden_layers", "n_layer"),
        "num_heads": heads,
        "num_kv_heads": kv_heads or heads,
        "head_dim": head_dim or hidden // heads,
        "vocab_size": get("vocab_size", "vocab_size"),
    }


def _rope(fields: Fields, body: str, model_type: str) -> dict[str, Any]:
    defaults = CLASS_DEFAULTS.get(model_type, {})
    # Gemma keeps one base a layer kind; the full layers' comes first.
    places = rope_places(fields, body)[:1]
    bases = [body + "rope_theta", *(f"{place}.rope_theta" for place in places)]
    positions = [body + "max_position_embeddings", body + "n_positions"]
    default_base = defaults.get("rope_theta")
    default_positions = defaults.get("max_position_embeddings")
    return {
        "rope_base": fields.get(
            "rope_base",
            bases,
            a_number(),
            default_base,
            "the model class's own" if default_base else "not stated",
        ),
        "partial_rotary_factor": read_partial(fields, body, places, "partial_rotary_factor", (body + "rotary_pct",)),
        "max_positions": fields.get(
            "max_positions",
            positions,
            an_int(),
            default_positions,
            "the model class's own" if default_positions else "not stated",
        ),
    }


def _tied(fields: Fields, body: str, model_type: str) -> bool:
    usual = model_type.startswith(TIED_BY_DEFAULT)
    keys = dict.fromkeys([body + "tie_word_embeddings", "tie_word_embeddings"])
    values = [key for key in keys if fields.raw_value(key) is not None][:1]
    return fields.get("tie_word_embeddings", values or keys, a_bool, usual, f"{usual}, usual for {model_type}")


def _architecture(fields: Fields) -> str:
    names = fields.get("architecture", ["architectures"], strings, ())
    return names[0] if names else ""


def _note_misspelt(fields: Fields, body: str) -> None:
    """Only a warning: model classes have keys of their own, which may look like a near miss."""
    level = fields.raw_value(body[:-1]) if body else fields.raw
    for key, meant in near_misses(level, TARGET, HARMLESS):
        fields.findings.append(
            Finding(
                code="unknown-key",
                severity=Severity.WARNING,
                verdict=Verdict.CANNOT_TELL,
                message=f"{body}{key} looks like a misspelt {body}{meant}; it is not read",
                expected=meant,
                seen=key,
                where=f"{fields.file}: {body}{key}",
                fix=f"rename it if {meant} was meant",
            )
        )
