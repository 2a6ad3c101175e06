"""What a link says when a source of facts is missing, and the small questions that several links ask of the facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from draftproof.config.drafter import DrafterSpec, LayerSpec
from draftproof.config.finding import Finding
from draftproof.doctor import own
from draftproof.doctor.chain import cannot_tell
from draftproof.doctor.facts import Facts, InsideFacts, LayerInside

# What would bring each source.
GET: Final[Mapping[str, str]] = {
    "files": "run doctor on the machine that holds the checkpoints",
    "pair": "name both checkpoints, as the server reads them",
    "process": "run doctor on the server's machine, as a user who may read its process",
    "record": "start it with draftproof launch, which records what it sends and the hashes of the files",
    "log": "name the server's log, or start it with draftproof launch, which keeps it",
    "metrics": "let the server show its counters (vLLM: no --disable-log-stats; SGLang: --enable-metrics)",
    "probe": "let doctor send its prompts: the server has to answer completions",
    "inside": "start it with draftproof launch vllm --prove",
    "server_info": "start vLLM with VLLM_SERVER_DEV_MODE=1 on a closed machine; draftproof serve always shows it",
    "oracle": "let doctor run the pair itself on the server's text: both checkpoints here, and draftproof[engine]",
    "baseline": "name a server of the same target without the drafter: --baseline URL",
}


def lack(code: str, facts: Facts, *sources: str) -> Finding:
    """Cannot tell: none of these sources is there. Each is named with its reason, the first with the way to it."""
    reasons = [f"{source} ({reason})" if (reason := why(facts, source)) else source for source in sources]
    return cannot_tell(code, "nothing is known from " + " or ".join(reasons), ", ".join(sources), GET[sources[0]])


def why(facts: Facts, source: str) -> str:
    """Why a source gave nothing."""
    if source == "inside" and facts.inside is not None and facts.inside.refused:
        return facts.inside.refused
    return facts.missing.get(source, "")


def seen_inside(facts: Facts) -> InsideFacts | None:
    """What the plugin saw, None when it saw nothing."""
    return None if facts.inside is None or facts.inside.refused is not None else facts.inside


def drafter_of(facts: Facts) -> DrafterSpec | None:
    return None if facts.pair is None else facts.pair.drafter


def has_drafter(facts: Facts) -> bool:
    """False only where it is known that the target's own MTP head drafts."""
    return facts.pair is None or facts.pair.drafter is not None


def seen_layers_required(facts: Facts) -> bool:
    """Do links need to see the draft layers run? There are none without a drafter, and our own engine's would be
    compared with themselves."""
    return has_drafter(facts) and not own.is_own(facts)


def no_drafter(code: str) -> Finding:
    return cannot_tell(code, "the target's own MTP head drafts, which is not examined layer by layer", "pair")


def draft_layers(facts: Facts) -> tuple[tuple[LayerSpec, LayerInside], ...]:
    """(demanded, seen) layer by layer; empty where either is missing or their numbers differ."""
    drafter, inside = drafter_of(facts), seen_inside(facts)
    if drafter is None or inside is None or len(drafter.layers) != len(inside.layers):
        return ()
    return tuple(zip(drafter.layers, inside.layers, strict=True))


def lack_of_layers(code: str, facts: Facts) -> Finding:
    """Why `draft_layers` is empty."""
    if facts.pair is None:
        return lack(code, facts, "pair")
    drafter, inside = drafter_of(facts), seen_inside(facts)
    if drafter is None:
        return no_drafter(code)
    if inside is None:
        return not_seen_inside(code, facts)
    message = f"the plugin saw {len(inside.layers)} draft layers, the drafter has {len(drafter.layers)}"
    return cannot_tell(code, message, "inside: draft layers", "see whether the server loads another drafter")


def not_seen_inside(code: str, facts: Facts) -> Finding:
    if own.is_own(facts):
        return cannot_tell(code, own.SAME_CODE, "inside", own.JUDGED)
    return lack(code, facts, "inside")
