"""Is acceptance what this very pair gives on this very text?"""

from __future__ import annotations

from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.deployed import options
from draftproof.doctor.evidence import GET, drafter_of, lack, why
from draftproof.doctor.facts import Facts, OracleFacts
from draftproof.doctor.hypotheses import hypotheses
from draftproof.doctor.observed import observed
from draftproof.doctor.rank import HEALTHY, NONE
from draftproof.doctor.shapes import is_dead, shape

CODE = "doctor-acceptance"
TITLE = "acceptance is what this pair gives"
EXPLAINS = ("doctor-speed",)
NEEDS = ("oracle", "probe", "metrics", "log")
PROVES = (
    "On the server's own text the healthy pair, run by draftproof, reproduces the observed steps but for rounding, and "
    "the observed mean length is within the interval."
)
REFUTES = (
    "A known fault reproduces the steps and the healthy pair does not (from totals: and acceptance is lower); or "
    "nothing reproduces them and acceptance is below the interval; or no draft at all is accepted over many steps."
)
FEW = 50  # steps below which nothing is said
FIX = "mend the link that is refuted above; where none is, look at the likely cause named here"


def required(facts: Facts) -> bool:
    return True


def judge(facts: Facts) -> Finding:
    if doubt := untrusted(facts):
        return cannot_tell(CODE, doubt, "metrics, process", "remove the cause and run doctor again on a quiet server")
    if facts.oracle is not None:
        return _against_oracle(facts, facts.oracle)
    seen = observed(facts)
    if seen is None:
        return lack(CODE, facts, "oracle", "probe", "metrics", "log")
    drafter = drafter_of(facts)
    hint = shape(seen.rates, drafter.block_size if drafter else None)
    if is_dead(seen.rates, seen.steps):
        fix = "see the links on heads, taps and the attention backend"
        return refuted(CODE, hint, "some", f"0 of {seen.steps:.0f} steps accept a draft", seen.where, fix)
    reason = why(facts, "oracle")
    message = f"observed {seen.tau:.2f} tokens a step; what to expect on this text is not known"
    message += (f" ({reason})" if reason else "") + (f". The shape suggests: {hint}" if hint else "")
    return cannot_tell(CODE, message, seen.where, GET["oracle"])


def untrusted(facts: Facts) -> str:
    """Why the numbers say nothing of the drafter; empty if they do."""
    chosen = options(facts)
    told = (facts.log.speculative or {}) if facts.log else {}
    rule = str(told.get("rejection_sample_method") or (chosen.rejection if chosen else "standard"))
    lines = facts.log.warnings if facts.log else ()
    if any("synthetic_acceptance" in text for text in (*told, *lines)):
        return "the log speaks of synthetic_acceptance: acceptance is made up"
    if rule in ("synthetic", "fly"):
        return f"rejection_sample_method is {rule}: acceptance is not that of the drafter"
    if facts.process is not None and any(name.startswith("SGLANG_SIMULATE_ACC") for name in facts.process.env):
        return "SGLANG_SIMULATE_ACC_LEN is set: acceptance is simulated"
    if facts.metrics is None or not _from_counters(facts):
        return ""
    if facts.metrics.delta is None:
        return "the counters were reset while the probe ran, and nothing else tells the steps of each request"
    if facts.metrics.foreign:
        return f"{facts.metrics.foreign} requests of others ran meanwhile, and the counters hold theirs too"
    return ""


def _from_counters(facts: Facts) -> bool:
    if facts.oracle is not None:
        return facts.oracle.kind == "rates"
    seen = observed(facts)
    return seen is None or seen.where.startswith("metrics")


def _against_oracle(facts: Facts, oracle: OracleFacts) -> Finding:
    where = f"oracle: {oracle.kind} of {oracle.observed_steps} observed steps, {oracle.expected_steps} expected"
    if not oracle.leaders or min(oracle.observed_steps, oracle.expected_steps) < FEW:
        message = f"fewer than {FEW} steps could be compared, too few to judge"
        return cannot_tell(CODE, message, where, "probe with more or longer prompts")
    expected, seen = _expected(oracle), f"{oracle.observed:.2f}"
    low, high = oracle.interval or (oracle.expected, oracle.expected)
    if HEALTHY in oracle.leaders:
        if oracle.interval is not None and not low <= oracle.observed <= high:
            message = f"the steps are those of the healthy pair, yet {seen} is outside {expected}"
            return cannot_tell(CODE, message, where, "probe with more prompts, greedy and one at a time")
        others = [name for name in oracle.leaders if name != HEALTHY]
        open_ = f"; this text does not tell it from {', '.join(others)}" if others else ""
        return proved(CODE, f"acceptance is that of the healthy pair{open_}", expected, seen, where)
    nothing = NONE in oracle.leaders
    if oracle.observed < (low if nothing else oracle.expected):
        message = f"acceptance is below what the healthy pair gives; {_cause(facts, oracle)}"
        return refuted(CODE, message, expected, seen, where, FIX)
    if oracle.kind == "steps" and not nothing:  # on this text it costs nothing; step by step it is there all the same
        message = f"the steps are not those of the healthy pair; {_cause(facts, oracle)}"
        return refuted(CODE, message, expected, seen, where, FIX)
    message = f"observed {seen}, expected {expected}, but the steps are not those of the healthy pair; "
    fix = "probe with more text, greedy and one at a time; a quantised target writes steps of its own"
    return cannot_tell(CODE, message + _cause(facts, oracle), where, fix)


def _cause(facts: Facts, oracle: OracleFacts) -> str:
    """The faults that explain the steps, in words, and the first stage that bisection found to differ."""
    pair = facts.pair
    listed = hypotheses(pair.drafter, pair.target.num_layers) if pair and pair.drafter else []
    words = {one.name: f"{one.name} ({one.sentence})" for one in listed}
    causes = [words.get(name, name) for name in oracle.leaders if name != NONE]
    told = f"likely cause: {', or '.join(causes)}" if causes else "no known fault explains the steps"
    stage = facts.bisect.first if facts.bisect else None
    return told + (f"; the first stage that differs: {stage.stage}" if stage else "")


def _expected(oracle: OracleFacts) -> str:
    if oracle.interval is None:
        return f"{oracle.expected:.2f}"
    low, high = oracle.interval
    return f"{oracle.expected:.2f} ({low:.2f} to {high:.2f})"
