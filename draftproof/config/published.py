"""A drafter's config beside what was published, field by field.

The entry is found by repository name, or, in a renamed folder, by the target's shape. A name proves which
checkpoint was meant; a shape only suggests it, so a difference found by shape cannot be called refuted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from draftproof.config.drafter import DrafterSpec, LayerSpec
from draftproof.config.finding import Finding, Severity, Verdict, note
from draftproof.config.target import TargetSpec

# What each field is called in a config, and how bad a difference is.
FIELDS: Final[Mapping[str, tuple[str, Severity]]] = {
    "family": ("family", Severity.ERROR),
    "mask_token_id": ("mask_token_id", Severity.ERROR),
    "taps": ("target_layer_ids", Severity.ERROR),
    "layers": ("layer_types", Severity.ERROR),
    "window": ("sliding_window", Severity.ERROR),
    "causal": ("is_causal", Severity.ERROR),
    "block_size": ("block_size", Severity.ERROR),
    "num_target_layers": ("num_target_layers", Severity.ERROR),
    "hidden_size": ("hidden_size", Severity.ERROR),
    "intermediate_size": ("intermediate_size", Severity.ERROR),
    "num_layers": ("num_hidden_layers", Severity.ERROR),
    "num_heads": ("num_attention_heads", Severity.ERROR),
    "num_kv_heads": ("num_key_value_heads", Severity.ERROR),
    "head_dim": ("head_dim", Severity.ERROR),
    "vocab_size": ("vocab_size", Severity.ERROR),
    "rope_base": ("rope_theta", Severity.ERROR),
    "rotary_dim": ("partial_rotary_factor", Severity.ERROR),
    "rope_scaling": ("rope_scaling", Severity.ERROR),
    "rms_norm_eps": ("rms_norm_eps", Severity.WARNING),
    "max_positions": ("max_position_embeddings", Severity.WARNING),
    "output_multiplier": ("output_multiplier", Severity.WARNING),
    "final_logit_softcapping": ("final_logit_softcapping", Severity.WARNING),
    "tie_word_embeddings": ("tie_word_embeddings", Severity.NOTE),
    "conv_kernel_size": ("conv_kernel_size", Severity.ERROR),
    "conv_group_size": ("conv_group_size", Severity.ERROR),
    "selector_rank": ("selector_rank", Severity.ERROR),
    "selector_top_k": ("selector_top_k", Severity.ERROR),
}
# Two drafters with the same values here can load each other's weights.
BODY: Final = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True)
class Match:
    """An entry, how it was found (`exact`: under the very name; `by_name`: at least its beginning), and
    every field whose published value the config does not have."""

    entry: Mapping[str, Any]
    how: str
    exact: bool
    by_name: bool
    differences: tuple[str, ...]

    @property
    def title(self) -> str:
        variant = f" ({self.entry['variant']})" if "variant" in self.entry else ""
        return f"{self.entry['publisher']}/{self.entry['name']}{variant}"


@cache
def table() -> Mapping[str, Any]:
    """published.toml, parsed once."""
    return tomllib.loads(files("draftproof.config").joinpath("published.toml").read_text(encoding="utf-8"))


def compare_published(drafter: DrafterSpec, target: TargetSpec | None = None) -> list[Finding]:
    """A note on which entry matched and how, or that none did; then one finding a differing field, with
    both values."""
    matches = find_matches(drafter, target)
    if not matches:
        message = "no published drafter matches by name or by target shape; nothing to compare with"
        return [note("published-unknown", message, seen=_name(drafter), where=f"published.toml, {table()['as_of']}")]
    best = matches[0]
    message = f"compared with {best.title}, matched by {best.how}"
    message += f"; {len(best.differences)} of its values differ" if best.differences else "; every known value agrees"
    findings = [note("published-match", message, where=f"published.toml, {table()['as_of']}")]
    findings += [_difference(drafter, best, field) for field in best.differences]
    if best.differences and not best.by_name:
        findings += _others_disagree(drafter, best, matches[1:])
    return findings


def find_matches(drafter: DrafterSpec, target: TargetSpec | None = None) -> list[Match]:
    """Entries that may be this checkpoint, nearest first."""
    name = _name(drafter)
    entries: list[Mapping[str, Any]] = table()["drafter"]
    if named := [entry for entry in entries if _same_name(name, str(entry["name"]))]:
        return _ranked(drafter, named, f"repository name {name!r}", exact=True)
    if named := [entry for entry in entries if _begins(name, str(entry["name"]))]:
        return _ranked(drafter, named, f"the beginning of the name {name!r}", by_name=True)
    shaped = [entry for entry in entries if _same_shape(entry, drafter, target)]
    family = [entry for entry in shaped if entry.get("family", "dflash") == drafter.family]
    asked = _base(target.path) if target else ""
    called = [entry for entry in family if any(_same_name(asked, t) for t in entry["target_names"])]
    how = f"target shape and the target's name {asked!r}" if called else "target shape"
    return _ranked(drafter, called or family, how)


def values(drafter: DrafterSpec) -> dict[str, Any]:
    """The drafter's values under the names of published.toml."""
    windows = {layer.window for layer in drafter.layers if layer.window is not None}
    flags = {layer.causal for layer in drafter.layers}
    scaling = drafter.rope.scaling or {}
    named = {field: getattr(drafter, field) for field in FIELDS if hasattr(drafter, field)}
    extras = {field: drafter.extras[field] for field in FIELDS if field in drafter.extras}
    unused = None if drafter.extras.get("use_sliding_window") is False else drafter.extras.get("sliding_window")
    return {
        **extras,
        **named,
        "taps": list(drafter.taps),
        "layers": pattern(drafter.layers),
        # A window left over in a config without sliding layers still tells which checkpoint it came from.
        "window": min(windows) if windows else unused,
        "causal": flags.pop() if len(flags) == 1 else "by layer",
        "rope_base": drafter.rope.base,
        "rotary_dim": drafter.rope.rotary_dim,
        "rope_scaling": scaling.get("rope_type", scaling.get("type")),
    }


def pattern(layers: tuple[LayerSpec, ...]) -> str:
    """Runs of layer kinds: "4S+1F" is four sliding layers, then a full one."""
    runs = groupby("S" if layer.sliding else "F" for layer in layers)
    return "+".join(f"{len(list(run))}{kind}" for kind, run in runs)


def _ranked(
    drafter: DrafterSpec,
    entries: list[Mapping[str, Any]],
    how: str,
    *,
    exact: bool = False,
    by_name: bool = False,
) -> list[Match]:
    ours = values(drafter)
    matches = [Match(entry, how, exact, exact or by_name, _differing(ours, entry)) for entry in entries]

    def distance(match: Match) -> tuple[int, int]:
        agreeing = sum(field in match.entry for field in FIELDS) - len(match.differences)
        return len(match.differences), -agreeing

    return sorted(matches, key=distance)


def _differing(ours: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[str, ...]:
    differing = []
    for field in FIELDS:
        published = _published(entry, field)
        seen = ours.get(field)
        absent_is_fine = field in ("num_target_layers", "max_positions") and seen is None
        if published is not None and not absent_is_fine and not _equal(published, seen):
            differing.append(field)
    return tuple(differing)


def _published(entry: Mapping[str, Any], field: str) -> Any:
    if field == "family":
        return entry.get("family", "dflash")
    # A drafter without a window has published none: a window is then a difference of its own.
    if field == "window" and "layers" in entry and "S" not in entry["layers"]:
        return "none"
    return entry.get(field)


def _equal(published: Any, seen: Any) -> bool:
    if published == "none":
        return seen is None
    if isinstance(published, float) and isinstance(seen, int | float):
        return abs(published - seen) <= 1e-6 * abs(published)
    return bool(published == seen)


def _difference(drafter: DrafterSpec, match: Match, field: str) -> Finding:
    key, severity = FIELDS[field]
    same_body = all(part not in match.differences for part in BODY)
    if field in match.entry.get("uncertain", ()) or not (match.by_name or same_body):
        severity = min(severity, Severity.WARNING, key=list(reversed(Severity)).index)
    certain = match.exact and severity is Severity.ERROR
    condition = "" if match.exact else ", if these weights are the published ones"
    return Finding(
        code="published-difference",
        severity=severity,
        verdict=Verdict.REFUTED if certain else Verdict.CANNOT_TELL,
        message=f"{key} differs from {match.title}{condition}",
        expected=_show(_published(match.entry, field)),
        seen=_show(values(drafter).get(field)),
        where=_source(drafter, field),
        fix=f"set {key} to {_show(_published(match.entry, field))}, or fetch config.json again from {match.title}",
    )


def _others_disagree(drafter: DrafterSpec, best: Match, others: list[Match]) -> list[Finding]:
    """With two candidates of one shape, a field that agrees with the nearest may still be wrong for the
    other."""
    ours = values(drafter)
    findings = []
    slides = any(layer.sliding for layer in drafter.layers)
    for field in ("mask_token_id", "taps", "layers", "window", "causal", "block_size"):
        if field == "window" and not slides:
            continue
        rivals = [m for m in others if field in m.differences and field not in best.differences]
        if rivals:
            told = ", ".join(f"{m.title}: {_show(_published(m.entry, field))}" for m in rivals)
            findings.append(
                Finding(
                    code="published-ambiguous",
                    severity=Severity.WARNING,
                    verdict=Verdict.CANNOT_TELL,
                    message=f"{FIELDS[field][0]} agrees with {best.title}, but drafters of the same shape differ",
                    expected=told,
                    seen=_show(ours.get(field)),
                    where=_source(drafter, field),
                    fix="name the target, or give the folder its repository's name, so that one of them is compared",
                )
            )
    return findings


def _source(drafter: DrafterSpec, field: str) -> str:
    alias = {"causal": "causality", "rope_base": "rope.base", "rotary_dim": "rope.rotary_dim"}.get(field, field)
    return drafter.sources.get(alias, f"config.json: {FIELDS[field][0]}")


def _show(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _same_shape(entry: Mapping[str, Any], drafter: DrafterSpec, target: TargetSpec | None) -> bool:
    """Layers, width, heads and vocabulary, as far as the entry and the config know them; width must be
    known."""
    depth = drafter.num_target_layers or (target.num_layers if target else None)
    asked = {
        "num_target_layers": depth,
        "hidden_size": drafter.hidden_size,
        "num_heads": drafter.num_heads,
        "num_kv_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "vocab_size": drafter.vocab_size,
    }
    known = {key: value for key, value in asked.items() if key in entry and value is not None}
    return {"hidden_size", "vocab_size"} <= set(known) and all(entry[key] == value for key, value in known.items())


def _name(drafter: DrafterSpec) -> str:
    """The folder's name, or what the config calls its origin when only that is an entry's name."""
    folder = _base(drafter.path)
    origin = _base(str(drafter.extras.get("name_or_path", "")))
    entries = [str(entry["name"]) for entry in table()["drafter"]]
    known = any(_same_name(folder, name) or _begins(folder, name) for name in entries)
    return folder if known or not origin else origin


def _base(path: str) -> str:
    """A repository's name from a path: the last part, or that of a hub cache's
    models--owner--name/snapshots/id."""
    parts = Path(path).absolute().parts if path else ()
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.split("--")[-1]
    return parts[-1] if parts else ""


def _same_name(one: str, other: str) -> bool:
    return one.lower() == other.lower()


def _begins(name: str, entry: str) -> bool:
    """A copy's name often adds a suffix: -FP8, -local, _v2. A further word character is another name."""
    return re.match(re.escape(entry.lower()) + r"[-_.@ ]", name.lower()) is not None
