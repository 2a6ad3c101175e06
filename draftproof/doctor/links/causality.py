"""Inside the block, does each draft layer look in the trained direction?"""

from __future__ import annotations

from draftproof.check.layers import show_causal
from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.evidence import draft_layers, lack_of_layers, seen_inside, seen_layers_required
from draftproof.doctor.facts import Facts, InsideFacts, LayerInside

CODE = "doctor-causality"
TITLE = "each draft layer looks in the trained direction"
EXPLAINS = ("doctor-acceptance", "doctor-speed")
NEEDS = ("pair", "inside")
PROVES = "The causality that each layer's attention call was seen to run with is the trained one."
REFUTES = (
    "A call ran with the other causality than trained, whatever the module declares; or, where no call was seen, the "
    "module declares the other one."
)
ONE_GROUP = (
    "vLLM's V2 runner keeps one causality for each KV cache group, and here causal and bidirectional draft layers "
    "share one: the last layer of the group decided for all"
)
KEEP_MANAGER = (
    "keep the hybrid KV cache manager on: no --disable-hybrid-kv-cache-manager, and no connector that needs it off"
)
STATE_IT = (
    "state causality in the drafter's config (dflash_config.causal, or layer_types with windows); use a newer release"
)


def required(facts: Facts) -> bool:
    return seen_layers_required(facts)


def judge(facts: Facts) -> Finding:
    layers, inside = draft_layers(facts), seen_inside(facts)
    if not layers or inside is None:
        return lack_of_layers(CODE, facts)
    expected = show_causal([demand.causal for demand, _ in layers])
    seen = show_causal([_causal(layer) for _, layer in layers])
    wrong = [layer for demand, layer in layers if _causal(layer) not in (None, demand.causal)]
    if wrong:
        shared = _share_a_group(inside, {layer.name: demand.causal for demand, layer in layers})
        message = f"{len(wrong)} of {len(layers)} draft layers {_how(wrong[0])}"
        message += f"; {ONE_GROUP}" if shared else ""
        where = f"inside: {wrong[0].name} ({wrong[0].when})"
        return refuted(CODE, message, expected, seen, where, KEEP_MANAGER if shared else STATE_IT)
    unseen = [layer.name for _, layer in layers if layer.when == "not observed" or layer.executed_causal is None]
    if unseen:
        message = f"no module declares otherwise, but no attention call of {len(unseen)} layers told its causality"
        return cannot_tell(CODE, message, f"inside: {unseen[0]}", "let the probe run after the start, with --prove")
    when = ", ".join(sorted({layer.when for _, layer in layers}))
    return proved(CODE, "every layer ran in its direction", expected, seen, f"inside: attention calls ({when})")


def _causal(layer: LayerInside) -> bool | None:
    return layer.causal if layer.when == "not observed" else layer.executed_causal


def _how(layer: LayerInside) -> str:
    if layer.when == "not observed":
        return "declare the other direction than trained"
    if layer.causal is not None and layer.causal != layer.executed_causal:
        return "declare the trained direction and ran the other one"
    return "ran in the other direction than trained"


def _share_a_group(inside: InsideFacts, demanded: dict[str, bool]) -> bool:
    """Do layers of both kinds stand in one KV cache group?"""
    return any(len({demanded[name] for name in group if name in demanded}) > 1 for group in inside.kv_groups)
