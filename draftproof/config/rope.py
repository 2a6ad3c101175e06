"""Rotary embedding settings, in the three places where configs keep them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from draftproof.config.reading import Fields, a_number, an_object
from draftproof.errors import UserError

PLAIN: Final = (
    "default",
    "mrope",
)  # a drafter uses plain text positions, so an M-RoPE target's type changes nothing
PER_LAYER_KIND: Final = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RopeSpec:
    """`rotary_dim` of each head's dims rotate, half-split ("neox") pairing, at absolute positions.

    `scaling` is the config's yarn, linear, llama3 ... dict, None for plain rotary embeddings."""

    base: float
    rotary_dim: int
    scaling: Mapping[str, Any] | None = None


def read_rope(fields: Fields, body: str, head_dim: int, used: tuple[str, ...] = PER_LAYER_KIND) -> RopeSpec:
    """`used` are the layer kinds the model has. UserError rope-missing when no base is stated: engines fill
    in different ones, silently."""
    places = rope_places(fields, body, used)
    keys = [body + "rope_theta", *(f"{place}.rope_theta" for place in places)]
    base = fields.get("rope.base", keys, a_number(), None, decisive=True)
    if base is None:
        raise UserError(
            "rope-missing",
            f"{fields.file} names no rope base ({keys[0]} or {keys[1]})",
            "take it from the checkpoint's own repository; it usually equals the target's, but is not derived here",
        )
    factor = read_partial(
        fields, body, places, "rope.rotary_dim", (f"{body or 'dflash_config.'}partial_rotary_factor",)
    )
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.bad(body + "partial_rotary_factor", f"leaves {rotary_dim} of {head_dim} dims to rotate")
    return RopeSpec(base, rotary_dim, read_scaling(fields, body, places))


def rope_places(fields: Fields, body: str, used: tuple[str, ...] = PER_LAYER_KIND) -> list[str]:
    """Dotted keys of the dicts that may hold the base: rope_parameters, or one such dict per layer kind."""
    outer = body + "rope_parameters"
    nested = fields.raw_value(outer)
    if isinstance(nested, Mapping):
        kinds = [kind for kind in PER_LAYER_KIND if kind in used and isinstance(nested.get(kind), Mapping)]
        if kinds:
            return [f"{outer}.{kind}" for kind in kinds]
    return [outer, body + "rope_scaling"]


def read_partial(fields: Fields, body: str, places: list[str], field: str, more: tuple[str, ...] = ()) -> float:
    """partial_rotary_factor, in (0, 1]; 1 when absent."""
    keys = [*(f"{place}.partial_rotary_factor" for place in places), body + "partial_rotary_factor", *more]
    factor = fields.get(field, list(dict.fromkeys(keys)), a_number(), 1.0, "every dim of a head rotates")
    if factor > 1:
        raise fields.bad(body + "partial_rotary_factor", f"must be at most 1, not {factor:g}")
    return factor


def read_scaling(fields: Fields, body: str, places: list[str]) -> dict[str, Any] | None:
    """The first dict that names a type other than the plain one, as written."""
    for place in dict.fromkeys([*places, body + "rope_scaling"]):
        if fields.raw_value(place) is None:
            continue
        scaling = fields.check(place, an_object)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in PLAIN:
            fields.sources["rope.scaling"] = f"{fields.file}: {place}"
            return scaling
    return None
