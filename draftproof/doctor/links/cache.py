"""Does the prefix cache still hit with the drafter on, and does acceptance survive a hit?"""

from __future__ import annotations

from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.deployed import options
from draftproof.doctor.evidence import lack
from draftproof.doctor.facts import Facts, ProbeFacts
from draftproof.doctor.observed import of_answers

CODE = "doctor-cache"
TITLE = "the prefix cache hits, and drafting survives it"
EXPLAINS = ("doctor-speed",)
NEEDS = ("probe",)
PROVES = "The same prompts sent again hit the cache, and the second pass accepts as much as the first."
REFUTES = "Prompts longer than a cache block hit nothing the second time, or acceptance falls by over a tenth there."
ENOUGH = 64  # tokens of a prompt that must hit in blocks of 16, the last one dropped
ENOUGH_HYBRID = 4608  # where a linear target's state makes blocks of up to 2304 tokens
KEPT = 0.9
NO_HIT_FIX = "use a release that keeps the last block for DFlash (vLLM 0.33), or longer shared prefixes"
DROP_FIX = "switch prefix caching off until a release keeps the drafter's rows of a reused prefix, and report it"


def required(facts: Facts) -> bool:
    """Nothing is asked of a cache that was switched off."""
    chosen = options(facts)
    return chosen is None or chosen.prefix_caching


def judge(facts: Facts) -> Finding:
    if not required(facts):
        return cannot_tell(CODE, "prefix caching is off", "process: arguments", "nothing, if that is intended")
    if facts.probe is None or not facts.probe.again:
        return lack(CODE, facts, "probe")
    counts = [one.cached_tokens for one in facts.probe.again if one.cached_tokens is not None]
    hits, where = sum(counts), "probe: cached tokens of the second pass"
    if not counts:
        fix = "let the server show its counters, or --enable-prompt-tokens-details (vLLM)"
        return cannot_tell(CODE, "neither answers nor counters tell of cache hits", where, fix)
    if not hits:
        return _no_hit(facts, facts.probe, where)
    before, after = of_answers(facts.probe.answers), of_answers(facts.probe.again)
    if before is None or after is None:
        message = f"{hits} tokens were taken from the cache; acceptance after a hit is not told by request"
        return cannot_tell(CODE, message, where, "vLLM 0.29 or newer: --per-request-spec-decode-metrics detailed")
    expected, seen = f"{before.tau:.2f} tokens a step", f"{after.tau:.2f} after {hits} cached tokens"
    if after.tau - 1 < KEPT * (before.tau - 1):
        return refuted(CODE, "acceptance falls on a reused prefix", expected, seen, where, DROP_FIX)
    return proved(CODE, "the cache hits and acceptance stays", expected, seen, where)


def _no_hit(facts: Facts, probe: ProbeFacts, where: str) -> Finding:
    longest = max(len(one.prompt_ids) for one in probe.again)
    linear = facts.pair is None or "linear" in facts.pair.target.layer_kinds
    enough = ENOUGH_HYBRID if linear else ENOUGH
    if longest < enough:
        message = f"no prompt of {enough} tokens was sent, so no hit was due (the longest has {longest})"
        return cannot_tell(CODE, message, where, "probe with longer prompts")
    seen = f"0, the longest prompt {longest} tokens"
    return refuted(CODE, "the same prompts hit nothing the second time", "hits", seen, where, NO_HIT_FIX)
