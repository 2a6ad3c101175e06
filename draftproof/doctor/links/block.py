"""Is the drafted block the trained one? Rows past it were never trained; a shorter one was not trained either."""

from __future__ import annotations

from collections.abc import Iterator

from draftproof.config.finding import Finding
from draftproof.doctor import own
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.deployed import drafts_unit, resolved
from draftproof.doctor.evidence import drafter_of, has_drafter, lack, no_drafter, seen_inside
from draftproof.doctor.facts import Facts

CODE = "doctor-block"
TITLE = "the drafted block is the trained one"
EXPLAINS = ("doctor-acceptance", "doctor-speed")
NEEDS = ("pair", "inside", "log", "server_info", "metrics")
PROVES = "The number of drafts a pass that the server reports or counts is the drafter's block less the anchor."
REFUTES = "It drafts more than the block holds, or fills the block with another mask token than the trained one."


def required(facts: Facts) -> bool:
    return has_drafter(facts)


def judge(facts: Facts) -> Finding:
    drafter = drafter_of(facts)
    if drafter is None:
        return lack(CODE, facts, "pair") if facts.pair is None else no_drafter(CODE)
    masks = dict(_masks(facts))
    for where, mask in masks.items():
        if mask != drafter.mask_token_id:
            message = "the block is filled with another mask token than the trained one"
            fix = "write the trained mask_token_id into the drafter's config"
            return refuted(CODE, message, drafter.mask_token_id, mask, where, fix)
    told = list(_seen(facts))
    if not told:
        return lack(CODE, facts, "inside", "log", "server_info", "metrics")
    fits, unit = drafter.block_size - 1, drafts_unit(facts)
    expected = f"{fits + unit} for a block of {drafter.block_size}"
    where, drafts = next((one for one in told if one[1] > fits), next((one for one in told if one[1] < fits), told[0]))
    if drafts > fits:
        message = f"{drafts - fits} of {drafts} drafts a pass are rows that the drafter was never trained on"
        return refuted(CODE, message, expected, drafts + unit, where, f"set the number to {fits + unit}")
    if drafts < fits:
        message = f"the block is shorter than trained: {drafts + unit} where {expected} was trained"
        return cannot_tell(CODE, message, where, f"set the number to {fits + unit}, or compare acceptance at both")
    about = "the mask token agrees" if masks else "the mask token was not seen"
    return proved(CODE, f"the whole block is drafted; {about}", expected, drafts + unit, where)


def _masks(facts: Facts) -> Iterator[tuple[str, int]]:
    inside = seen_inside(facts)
    if inside is not None and inside.mask_id is not None:
        yield "inside: mask_token_id", inside.mask_id
    told = (facts.log.speculative or {}) if facts.log else {}
    if isinstance(mask := told.get("mask_token_id"), int):
        yield "log: mask_token_id", mask
    if (server := own.told(facts.server_info)) is not None and server.mask_token_id is not None:
        yield "server_info: mask_token_id", server.mask_token_id


def _seen(facts: Facts) -> Iterator[tuple[str, int]]:
    """(evidence, drafts a pass). Counters count only where no draft was cut off, so that they divide evenly; those of
    our own engine hold trees too, but one counter a position."""
    for spec in resolved(facts):
        if spec.drafts is not None:
            yield spec.where, spec.drafts
    delta = facts.metrics.delta if facts.metrics else None
    if own.is_own(facts):
        if delta is not None and delta.per_position:
            yield "metrics: counters by position", len(delta.per_position)
        return
    if delta is not None and delta.drafts and delta.draft_tokens:
        drafts = delta.draft_tokens / delta.drafts
        if drafts == round(drafts):
            yield "metrics: draft tokens / drafts", round(drafts)
