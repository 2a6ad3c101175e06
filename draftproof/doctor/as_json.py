"""`draftproof doctor --json`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Final

from draftproof.doctor.chain import Diagnosis, LinkResult
from draftproof.doctor.facts import Facts
from draftproof.doctor.report import best_fault, per_position

SCHEMA: Final = "draftproof.doctor/1"


def report_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """JSON-ready. `schema` changes when a key changes its meaning or goes away. Arguments, environment and answers
    stay out: they may hold secrets."""
    facts = diagnosis.facts
    pair = facts.pair
    return {
        "schema": SCHEMA,
        "url": facts.url,
        "engine": facts.engine,
        "release": facts.release,
        "drafter": pair.drafter.path if pair and pair.drafter else None,
        "target": pair.target.path if pair else None,
        "links": [_link(link) for link in diagnosis.links],
        "acceptance": _acceptance(facts),
        "bisect": None if facts.bisect is None else asdict(facts.bisect),
        "missing": dict(facts.missing),
        "exit_code": diagnosis.exit_code,
    }


def _link(link: LinkResult) -> dict[str, Any]:
    about = {"title": link.title, "required": link.required, "explained_by": link.explained_by}
    return about | link.finding.as_dict()


def _acceptance(facts: Facts) -> dict[str, Any] | None:
    oracle = facts.oracle
    if oracle is None:
        return None
    fault = best_fault(oracle)
    rows = [dict(zip(("position", "observed", "expected", "fault"), row, strict=True)) for row in per_position(oracle)]
    told = asdict(oracle) | {"best_fault": fault.name if fault else None, "positions": rows}
    cleaned: dict[str, Any] = _finite(told)
    return cleaned


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
