"""The only reader of a drafter's config: every packaging in the wild becomes one frozen DrafterSpec.

Each value keeps its source. A field that decides correctness has no computed default: without a mask id,
target layers, a block size or a rope base the config is refused with a word on where to find it. Reading
never imports or runs anything a checkpoint names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from draftproof.config.dialects import Dialect, find_dialect
from draftproof.config.families import find_family, missing_parts
from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.config.keys import FAMILY, HARMLESS, TOP, refuse_misspelt
from draftproof.config.layers import LayerSpec, read_layers
from draftproof.config.reading import (
    Fields,
    a_bool,
    a_number,
    a_string,
    an_int,
    an_object,
    ints,
    load_config,
    strings,
)
from draftproof.config.rope import RopeSpec, read_rope
from draftproof.errors import UserError

__all__ = ["DrafterSpec", "LayerSpec", "RopeSpec", "read_drafter"]

# Objects that are read by their parts, and labels.
STRUCTURE: Final = frozenset(
    {"dflash_config", "transformer_layer_config", "model_type", "rope_parameters", "rope_scaling"}
    | {"speculators_config", "speculators_version", "speculators_model_type"}
)
# speculators' config class; transformers leaves a value equal to its default out of the saved file.
SPECULATORS_DRAFT_VOCAB: Final = 32000
HEAD_DIM_QWEN3: Final = 128


@dataclass(frozen=True)
class DrafterSpec:
    """What one drafter checkpoint says. `taps` counts as z-lab does: the residual stream after decoder
    layer i, from 0, in the order of `fc`'s columns. `block_size` counts the anchor. `extras` holds what
    only relatives of DFlash or reports need, by key. `findings` are remarks of the reading itself."""

    path: str
    dialect: str
    family: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    rope: RopeSpec
    max_positions: int | None
    layers: tuple[LayerSpec, ...]
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    tie_word_embeddings: bool
    draft_vocab_size: int | None
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    sources: Mapping[str, str]
    findings: tuple[Finding, ...]
    extras: Mapping[str, Any] = field(default_factory=dict)

    def missing_parts(self) -> list[str]:
        """What the plain DFlash engine lacks to run this checkpoint as trained."""
        return missing_parts(self.family, self.extras, self.rope, self.hidden_act, self.taps, self.draft_vocab_size)

    def require_runnable(self) -> None:
        """UserError family-not-runnable, naming every missing part."""
        missing = self.missing_parts()
        if missing:
            raise UserError(
                "family-not-runnable",
                f"{self.path} is a {self.family} drafter ({self.architecture}); running it needs " + "; ".join(missing),
                "run a plain DFlash drafter here, or this one in an engine that supports its family",
            )


def read_drafter(path: str | Path) -> DrafterSpec:
    """Read a folder with a config.json, or that file; weights are not needed.

    UserError: not-found, not-a-model, bad-json, dialect-unknown, unknown-key, bad-config, mask-id-missing,
    taps-missing, block-size-missing, rope-missing.
    """
    folder, file, raw = load_config(path)
    refuse_misspelt(raw, file)
    dialect = find_dialect(raw, file, str(folder))
    fields = Fields(raw, file)
    own = _own(fields, dialect)
    body = _body(fields, dialect)
    extras = _extras(fields, dialect)
    architecture = _architecture(fields, dialect)
    target_hidden_size = _target_hidden_size(fields, body["hidden_size"])
    draft_vocab_size = _draft_vocab(fields, dialect, body["vocab_size"])
    _note_remote_code(fields)
    _note_unread(fields, dialect)
    return DrafterSpec(
        path=str(folder),
        dialect=dialect.name,
        family=find_family(architecture, extras, str(raw.get("speculators_model_type", ""))),
        architecture=architecture,
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        **body,
        **own,
        sources=fields.sources,
        findings=tuple(fields.findings),
        extras=extras,
    )


def _own(fields: Fields, dialect: Dialect) -> dict[str, Any]:
    """What makes the checkpoint a drafter."""
    keys = dialect.keys
    softcap = fields.get(
        "final_logit_softcapping", keys("final_logit_softcapping"), a_number(zero=True), None, "no soft cap"
    )
    return {
        "mask_token_id": _mask_token_id(fields, dialect),
        "taps": _taps(fields, dialect),
        "block_size": _block_size(fields, dialect),
        "num_target_layers": fields.get(
            "num_target_layers",
            ["num_target_layers", "target_num_hidden_layers"],
            an_int(),
            None,
            "not stated",
        ),
        "input_embedding_scale": fields.get(
            "input_embedding_scale", keys("input_embedding_scale"), a_number(), 1.0, "1, raw embeddings"
        ),
        "output_multiplier": fields.get("output_multiplier", keys("output_multiplier"), a_number(), 1.0, "1"),
        "final_logit_softcapping": softcap or None,
    }


def _mask_token_id(fields: Fields, dialect: Dialect) -> int:
    found = fields.get("mask_token_id", dialect.keys("mask_token_id"), an_int(0), None, decisive=True)
    if found is None:
        token = fields.raw_value("dflash_config.mask_token")
        hint = f"look up the id of {token!r} in the target's tokenizer, or " if token else ""
        raise UserError(
            "mask-id-missing",
            f"{fields.file} names no mask token id ({dialect.keys('mask_token_id')[0]})",
            f"{hint}copy it from the config.json of the drafter's own repository or from its training "
            "config; it cannot be guessed, drafters of one target differ in it",
        )
    fields.raw_value("dflash_config.mask_token")
    return found


def _taps(fields: Fields, dialect: Dialect) -> tuple[int, ...]:
    embedding_allowed = dialect.tap_shift == 0 and "dspark" in str(fields.raw).lower()
    listed = fields.get("taps", dialect.taps, ints(-1 if embedding_allowed else 0), None, decisive=True)
    engine = fields.raw_value("eagle_aux_hidden_state_layer_ids")
    if listed is None:
        other = "layer_ids" if fields.raw_value("layer_ids") is not None else ""
        other = "eagle_aux_hidden_state_layer_ids" if engine is not None else other
        seen = f"; {other} is there, but readers count it differently" if other else ""
        raise UserError(
            "taps-missing",
            f"{fields.file} names no target layer ids ({dialect.taps[0]}){seen}",
            "copy the list from the config.json of the drafter's own repository or from its training config; "
            "published lists do not all follow a formula",
        )
    taps = tuple(tap - dialect.tap_shift for tap in listed)
    if dialect.tap_shift:
        fields.sources["taps"] += f" minus {dialect.tap_shift}"
    if isinstance(engine, list) and engine != [tap + 1 for tap in taps]:
        fields.contradiction(
            dialect.taps[0], list(listed), "eagle_aux_hidden_state_layer_ids (counts from 1)", engine, True
        )
    return taps


def _block_size(fields: Fields, dialect: Dialect) -> int:
    found = fields.get("block_size", dialect.keys("block_size"), an_int(), None, decisive=True)
    if found is None:
        raise UserError(
            "block-size-missing",
            f"{fields.file} names no block size ({' or '.join(dialect.keys('block_size'))})",
            "copy block_size from the drafter's own repository or training config; it counts the anchor, "
            "so it is one more than the drafts of a pass",
        )
    return found


def _body(fields: Fields, dialect: Dialect) -> dict[str, Any]:
    """The transformer's own shape."""
    body = dialect.body
    one = an_int()

    def get(name: str, key: str) -> int:
        return fields.get(name, [body + key], one)

    shape = {
        "hidden_size": get("hidden_size", "hidden_size"),
        "intermediate_size": get("intermediate_size", "intermediate_size"),
        "num_layers": get("num_layers", "num_hidden_layers"),
        "num_heads": get("num_heads", "num_attention_heads"),
        "num_kv_heads": get("num_kv_heads", "num_key_value_heads"),
        "vocab_size": get("vocab_size", "vocab_size"),
    }
    if shape["num_heads"] % shape["num_kv_heads"]:
        raise fields.bad(body + "num_attention_heads", "is not a multiple of num_key_value_heads")
    head_dim = _head_dim(fields, body, shape["hidden_size"], shape["num_heads"])
    layers = read_layers(fields, body, shape["num_layers"])
    used = tuple({"sliding_attention" if layer.sliding else "full_attention": 0 for layer in layers})
    return shape | {
        "head_dim": head_dim,
        "layers": layers,
        "rope": read_rope(fields, body, head_dim, used),
        **_details(fields, body),
    }


def _details(fields: Fields, body: str) -> dict[str, Any]:
    tied = [body + "tie_word_embeddings", "tie_word_embeddings"]
    return {
        "rms_norm_eps": fields.get("rms_norm_eps", [body + "rms_norm_eps"], a_number(), 1e-6, "1e-06, as Qwen3"),
        "hidden_act": fields.get("hidden_act", [body + "hidden_act"], a_string, "silu", "silu, as Qwen3"),
        "attention_bias": fields.get("attention_bias", [body + "attention_bias"], a_bool, False, "no bias"),
        "max_positions": fields.get("max_positions", [body + "max_position_embeddings"], an_int(), None, "not stated"),
        "tie_word_embeddings": fields.get(
            "tie_word_embeddings", tied if body else tied[:1], a_bool, False, "false; both are the target's"
        ),
    }


def _head_dim(fields: Fields, body: str, hidden: int, heads: int) -> int:
    stated = fields.get("head_dim", [body + "head_dim"], an_int(), None)
    if stated is not None:
        return stated
    if hidden % heads == 0 and hidden // heads == HEAD_DIM_QWEN3:
        fields.sources["head_dim"] = "derived: hidden_size / num_attention_heads, which is also Qwen3's default"
        return HEAD_DIM_QWEN3
    raise fields.bad(body + "head_dim", "is missing; Qwen3's default and hidden_size / num_attention_heads differ")


def _target_hidden_size(fields: Fields, hidden: int) -> int:
    stated = fields.get("target_hidden_size", ["target_hidden_size"], an_int(), None)
    if stated is None:
        fields.sources["target_hidden_size"] = "derived: hidden_size"
    return stated or hidden


def _draft_vocab(fields: Fields, dialect: Dialect, vocab: int) -> int | None:
    stated = fields.get("draft_vocab_size", ["draft_vocab_size"], an_int(), None, "the target's vocabulary")
    if stated is None and dialect.name == "speculators":
        fields.sources["draft_vocab_size"] = f"default: {SPECULATORS_DRAFT_VOCAB}, speculators' class default"
        stated = SPECULATORS_DRAFT_VOCAB
    return None if stated == vocab else stated


def _architecture(fields: Fields, dialect: Dialect) -> str:
    names = fields.get("architecture", ["architectures"], strings, ())
    if names:
        return names[0]
    fields.sources["architecture"] = f"default: not stated, taken from the {dialect.name} keys"
    return "DFlashDraftModel"


def _extras(fields: Fields, dialect: Dialect) -> dict[str, Any]:
    """Keys of relatives of DFlash and of reports, as written; null and absent are the same."""
    prefixes = dialect.own[:2]
    found: dict[str, Any] = {}
    for name in sorted(FAMILY | {"quantization_config", "is_neox_style", "eagle_aux_hidden_state_layer_ids"}):
        for key in (*(prefix + name for prefix in prefixes), dialect.body + name):
            value = fields.raw_value(key)
            if value is not None and name not in found:
                found[name] = value
    if isinstance(window := fields.raw_value(dialect.body + "sliding_window"), int):
        found["sliding_window"] = window
        found["use_sliding_window"] = fields.raw_value(dialect.body + "use_sliding_window")
    if isinstance(origin := fields.raw.get("_name_or_path"), str) and origin:
        found["name_or_path"] = origin
    return found


def _note_remote_code(fields: Fields) -> None:
    mapping = fields.raw_value("auto_map")
    if mapping is None:
        return
    names = ", ".join(str(value) for value in fields.check("auto_map", an_object).values())
    fields.findings.append(
        Finding(
            code="remote-code",
            severity=Severity.NOTE,
            verdict=Verdict.PROVED,
            message="the config asks loaders to run Python shipped with the checkpoint; it is never run here",
            seen=names,
            where=f"{fields.file}: auto_map",
            fix="keep trust_remote_code off elsewhere too",
        )
    )


def _note_unread(fields: Fields, dialect: Dialect) -> None:
    """A key that nobody reads has no effect; say so rather than ignore it."""
    for name in ("model_type", "hidden_act", "max_window_layers", "use_sliding_window"):
        fields.raw_value(dialect.body + name)
    levels = {"": HARMLESS | STRUCTURE, "dflash_config.": frozenset[str]()}
    if dialect.body:
        levels[dialect.body] = HARMLESS
    for prefix, quiet in levels.items():
        for name in (fields.raw_value(prefix[:-1]) or {}) if prefix else fields.raw:
            if prefix + name not in fields.asked and name not in quiet:
                fields.findings.append(_unread(fields.file, prefix + name, bool(prefix) or name in TOP))


def _unread(file: str, key: str, suspicious: bool) -> Finding:
    return Finding(
        code="key-not-read",
        severity=Severity.WARNING if suspicious else Severity.NOTE,
        verdict=Verdict.CANNOT_TELL,
        message=f"{key} is not read at this place of this packaging, so it changes nothing here",
        where=f"{file}: {key}",
        fix="move it to where it is read, or remove it" if suspicious else "",
    )
