"""Did the server resolve speculation as it was asked to? Aliases, defaults and lost options show here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.deployed import Spec, asked, drafts_unit, resolved
from draftproof.doctor.evidence import drafter_of, lack
from draftproof.doctor.facts import Facts

CODE = "doctor-config"
TITLE = "speculation is resolved as asked"
EXPLAINS = (
    "doctor-taps", "doctor-windows", "doctor-causality", "doctor-rope", "doctor-heads", "doctor-block",
    "doctor-acceptance", "doctor-speed",
)  # fmt: skip
NEEDS = ("process", "inside", "log", "server_info")
PROVES = "Method and number of drafts that the server reports (inside, log or /server_info) are those asked for."
REFUTES = "The server reports another method, number of drafts, drafter or runner than its arguments ask for."
FIX = "say method, model and number in the speculative config itself; draftproof launch writes all of them"


@dataclass(frozen=True)
class Compared:
    name: str
    want: str
    got: str
    where: str


def required(facts: Facts) -> bool:
    return True


def judge(facts: Facts) -> Finding:
    wanted, told = asked(facts), resolved(facts)
    if wanted is None:
        return lack(CODE, facts, "process")
    if not told:
        return lack(CODE, facts, "inside", "log", "server_info")
    if wanted.method is None and facts.pair is not None:  # vLLM infers the method from the drafter
        wanted = replace(wanted, method="dflash" if facts.pair.drafter else "mtp")
    compared = [one for spec in told for one in _compare(wanted, spec, drafts_unit(facts))]
    wrong = next((one for one in compared if one.want != one.got), None)
    if wrong is not None:
        message = f"the server resolved another {wrong.name} than it was asked for"
        return refuted(CODE, message, wrong.want, wrong.got, wrong.where, FIX)
    needed = {"method", "number"} if wanted.drafts is not None else {"method"}
    unseen = needed - {one.name for one in compared}
    if unseen:
        message = f"not compared: {', '.join(sorted(unseen))}"
        return cannot_tell(CODE, message, ", ".join(spec.where for spec in told), FIX)
    if other := _other_drafter(facts, wanted):
        message = "the server drafts with another folder than the one examined"
        return cannot_tell(CODE, message, other, "examine that folder")
    seen = ", ".join(dict.fromkeys(f"{one.name} {one.got}" for one in compared))
    return proved(CODE, "speculation is resolved as asked", "as asked", seen, ", ".join(spec.where for spec in told))


def _compare(wanted: Spec, told: Spec, unit: int) -> Iterator[Compared]:
    """What both sides state."""
    if wanted.method and told.method:
        yield Compared("method", wanted.method, told.method, told.where)
    if wanted.drafts is not None and told.drafts is not None:
        yield Compared("number", str(wanted.drafts + unit), str(told.drafts + unit), told.where)
    if wanted.model and told.model:
        yield Compared("drafter", wanted.model, told.model, told.where)
    if wanted.budget and told.budget:
        yield Compared("budget", wanted.budget, told.budget, told.where)
    if wanted.runner and told.runner:
        yield Compared("runner", wanted.runner, told.runner, told.where)


def _other_drafter(facts: Facts, wanted: Spec) -> str:
    """The server's drafter folder when it is surely not the one whose config was read, or a copy of it by that name."""
    drafter = drafter_of(facts)
    if drafter is None or wanted.model is None:
        return ""
    ours, theirs = Path(drafter.path), Path(wanted.model)
    return str(theirs) if ours.is_absolute() and theirs.is_absolute() and ours.name != theirs.name else ""
