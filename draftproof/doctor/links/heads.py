"""Does the drafter use the target's embedding and head, and is every weight of its own really loaded?"""

from __future__ import annotations

from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.evidence import (
    drafter_of,
    lack,
    no_drafter,
    not_seen_inside,
    seen_inside,
    seen_layers_required,
)
from draftproof.doctor.facts import Facts, InsideFacts

CODE = "doctor-heads"
TITLE = "embedding, head and weights are the right ones"
EXPLAINS = ("doctor-acceptance", "doctor-speed")
NEEDS = ("pair", "inside", "files")
PROVES = (
    "Embedding and head are the target's own, by pointer, or the checkpoint ships its own; no loaded parameter is all "
    "zero and no tensor of the checkpoint was left out."
)
REFUTES = "A parameter is all zero, a tensor was skipped, or a matrix that no checkpoint ships is not the target's."
FIX = "use a release that shares them for this target's class (vLLM 0.26 or newer), and fetch the drafter again"
TENSORS = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}


def required(facts: Facts) -> bool:
    return seen_layers_required(facts)


def judge(facts: Facts) -> Finding:
    inside = seen_inside(facts)
    if facts.pair is None:
        return lack(CODE, facts, "pair")
    if drafter_of(facts) is None:
        return no_drafter(CODE)
    if inside is None:
        return not_seen_inside(CODE, facts)
    if inside.zero_weights:
        names = _some(inside.zero_weights)
        return refuted(CODE, "parameters are all zero after loading", "loaded", names, "inside: parameters", FIX)
    if inside.skipped_weights:
        names = _some(inside.skipped_weights)
        return refuted(CODE, "tensors of the checkpoint were not loaded", "all taken", names, "inside: loading", FIX)
    return _shared(facts, inside)


def _shared(facts: Facts, inside: InsideFacts) -> Finding:
    told = {"embedding": inside.shares_embedding, "head": inside.shares_head}
    for name, shared in told.items():
        owns = _ships(facts, name)
        if shared is False and owns is False:
            message = f"the {name} is not the target's, and the drafter's checkpoint ships none"
            return refuted(CODE, message, "the target's, by pointer", "a matrix of its own", f"inside: {name}", FIX)
        if shared is None or (shared is False and owns is None):
            message = f"whether the {name} that is used is the right one was not seen"
            fix = "let doctor read the drafter's checkpoint: are the tensors its own?"
            return cannot_tell(CODE, message, f"inside: {name}", fix)
    words = ", ".join(f"{name} {'shared' if shared else 'its own'}" for name, shared in told.items())
    return proved(CODE, "the matrices are the right ones and every weight is loaded", "no zero, none skipped", words,
                  "inside: data_ptr, parameters")  # fmt: skip


def _ships(facts: Facts, name: str) -> bool | None:
    """Does the drafter's checkpoint hold its own? None: its tensors are not known."""
    if facts.files is None or facts.files.drafter_tensors is None:
        return None
    return any(tensor.endswith(TENSORS[name]) for tensor in facts.files.drafter_tensors)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
