"""`draftproof explain`: what a code means, why it matters and how to mend it.

Finding codes have their text in findings.toml, engine rules in engines.toml, error codes in errors.py.
docs/findings.md is generated from the first two.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from importlib.resources import files
from textwrap import TextWrapper
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter

from draftproof.config.engines import Data, Engine, Rule, Text, engines
from draftproof.errors import CODES, UserError

SCHEMA: Final = "draftproof.explain/1"
STOPS: Final = "The command stops with exit code 2 and one message."
AS_TOLD: Final = "Do what the message names as the next step: it knows the file and the value."


class Area(StrEnum):
    """What a finding is about, in the order of docs/findings.md."""

    DRAFTER = "drafter config"
    PAIR = "pair"
    PUBLISHED = "published values"
    DEPLOYMENT = "deployment"
    INSTALLATION = "installation"
    MEMORY = "memory"
    DOCTOR = "doctor"


class FindingText(Data):
    """One table of findings.toml. `see` names public reports, repository and number."""

    area: Area
    means: Text
    why: Text
    fix: Text
    see: tuple[Annotated[str, Field(pattern=r"^[\w./ -]+#\d+$")], ...] = ()


@dataclass(frozen=True)
class Explained:
    """`facts` are further lines by label; what they are depends on `kind`."""

    code: str
    kind: Literal["finding", "engine rule", "error"]
    means: str
    why: str
    fix: str
    facts: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready. `schema` changes when a key changes its meaning or goes away."""
        return {"schema": SCHEMA, **asdict(self)}


@cache
def finding_texts() -> Mapping[str, FindingText]:
    """findings.toml, parsed and validated once, in the order of the file."""
    raw = tomllib.loads(files("draftproof.config").joinpath("findings.toml").read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, FindingText]).validate_python(raw)


def all_codes() -> tuple[str, ...]:
    """Findings, then engine rules, then errors; a code of two kinds stands once."""
    rules = (rule.code for engine in engines().values() for rule in engine.rules)
    return tuple(dict.fromkeys([*finding_texts(), *rules, *CODES]))


def explain(code: str) -> Explained:
    """The text of a code as any command prints it, brackets allowed. UserError code-unknown, with close codes."""
    name = code.strip("[] ").lower()
    if name in finding_texts():
        return _finding(name, finding_texts()[name])
    rules = [(engine, rule) for engine in engines().values() for rule in engine.rules if rule.code == name]
    if rules:
        return _rule(*rules[0])
    if name in CODES:
        return Explained(name, "error", CODES[name], STOPS, AS_TOLD, {})
    near = get_close_matches(name, all_codes(), n=3)
    raise UserError(
        "code-unknown",
        f"{code!r} is no code of a finding, an engine rule or an error",
        f"the nearest: {', '.join(near)}" if near else "copy the code from the brackets of a message",
    )


def render_explained(explained: Explained, width: int = 100) -> str:
    """Plain text: the code, then one labelled, wrapped paragraph a field."""
    fields = {"means": explained.means, "why": explained.why, "fix": explained.fix, **explained.facts}
    indent = max(map(len, fields)) + 2
    wrap = TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
    lines = [wrap.fill(label.ljust(indent) + text) for label, text in fields.items()]
    return "\n".join([f"{explained.code} ({explained.kind})", "", *lines])


def rule_facts(engine: Engine, rule: Rule) -> dict[str, str]:
    """Where a rule holds and what it rests on."""
    facts = {
        "engine": engine.name,
        "releases": rule.releases or "all known",
        "when": _listed(rule.when),
        "link": rule.link.value,
        "key": rule.key,
        "severity": rule.severity.value,
        "evidence": _listed(rule.evidence),
        "as of": engine.as_of,
    }
    return {label: text for label, text in facts.items() if text}


def _finding(code: str, text: FindingText) -> Explained:
    facts = {"about": text.area.value}
    if text.see:
        facts["see"] = _listed(text.see)
    if code in CODES:
        facts["as error"] = f"{CODES[code]}. {STOPS}"
    return Explained(code, "finding", text.means, text.why, text.fix, facts)


def _rule(engine: Engine, rule: Rule) -> Explained:
    return Explained(rule.code, "engine rule", rule.does, rule.consequence, rule.fix, rule_facts(engine, rule))


def _listed(items: Iterable[str]) -> str:
    return ", ".join(items)
