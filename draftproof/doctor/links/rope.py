"""Do the draft layers rotate positions as in training: base, pairing, rotated width, a table that is long enough?"""

from __future__ import annotations

from collections.abc import Iterator

from draftproof.config.drafter import DrafterSpec
from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.evidence import draft_layers, drafter_of, lack_of_layers, seen_inside, seen_layers_required
from draftproof.doctor.facts import Facts, LayerInside

CODE = "doctor-rope"
TITLE = "positions are rotated as trained"
EXPLAINS = ("doctor-acceptance", "doctor-speed")
NEEDS = ("pair", "inside")
PROVES = "Base and pairing of every layer's rotary embedding, seen from inside, are the drafter's."
REFUTES = "A base, a pairing or a rotated width differs, or the table of positions ends before the server's context."
FIX = "state rope_theta (and is_neox_style where the pairing is interleaved) in the drafter's config"


def required(facts: Facts) -> bool:
    return seen_layers_required(facts)


def judge(facts: Facts) -> Finding:
    drafter, inside, layers = drafter_of(facts), seen_inside(facts), draft_layers(facts)
    if not layers or drafter is None or inside is None:
        return lack_of_layers(CODE, facts)
    wrong = next((one for _, layer in layers for one in _differences(drafter, layer)), None)
    if wrong is not None:
        what, want, got, name = wrong
        return refuted(CODE, f"the rotary {what} is another than trained", want, got, f"inside: {name}", FIX)
    if inside.position_rows and inside.max_model_len and inside.position_rows < inside.max_model_len:
        message = "the drafter's table of positions ends before the server's context does"
        fix = f"serve with --max-model-len {inside.position_rows}"
        return refuted(CODE, message, inside.max_model_len, inside.position_rows, "inside: rotary table", fix)
    if missing := _unseen(drafter, [layer for _, layer in layers]):
        fix = "draftproof doctor compares acceptance too, which shows a wrong rotation"
        return cannot_tell(CODE, f"not seen from inside: {missing}", "inside: rotary_emb", fix)
    words = f"base {drafter.rope.base:g}, {_pairing(_neox(drafter))}"
    return proved(CODE, "base and pairing are those of the training", words, words, "inside: rotary_emb")


def _differences(drafter: DrafterSpec, layer: LayerInside) -> Iterator[tuple[str, str, str, str]]:
    if layer.rope_base is not None and layer.rope_base != drafter.rope.base:
        yield "base", f"{drafter.rope.base:g}", f"{layer.rope_base:g}", layer.name
    if layer.neox is not None and layer.neox != _neox(drafter):
        yield "pairing", _pairing(_neox(drafter)), _pairing(layer.neox), layer.name
    if layer.rotary_dim is not None and layer.rotary_dim != drafter.rope.rotary_dim:
        yield "width", str(drafter.rope.rotary_dim), str(layer.rotary_dim), layer.name


def _unseen(drafter: DrafterSpec, layers: list[LayerInside]) -> str:
    """A drafter that rotates only a part of each head, or scales, needs that to be seen as well."""
    parts = ["base"] if any(layer.rope_base is None for layer in layers) else []
    parts += ["pairing"] if any(layer.neox is None for layer in layers) else []
    partial = drafter.rope.rotary_dim != drafter.head_dim
    parts += ["rotated width"] if partial and any(layer.rotary_dim is None for layer in layers) else []
    parts += ["scaling"] if drafter.rope.scaling else []
    return ", ".join(parts)


def _neox(drafter: DrafterSpec) -> bool:
    return drafter.extras.get("is_neox_style") is not False


def _pairing(neox: bool) -> str:
    return "half-split (NeoX) pairing" if neox else "interleaved pairing"
