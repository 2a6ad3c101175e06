"""What engine releases do with a drafter's config, as dated data: the reader of engines.toml.

An entry says: in these releases, when these features hold, this link of the chain runs differently from what
the drafter demands. What a feature means is code (`check/features.py`); what a release does is only data here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from draftproof.config.finding import Severity


class Link(StrEnum):
    """One stage between a drafter's config and accepted tokens, in the order a value travels."""

    METHOD = "method"  # the release knows the method and the architecture
    RUNNER = "runner"  # the model runner the drafter needs is the one that runs
    LOAD = "load"  # checkpoint, shapes, shared embedding and head
    TAPS = "taps"
    WINDOWS = "windows"
    CAUSALITY = "causality"
    ROPE = "rope"
    MASK = "mask"
    BLOCK = "block"  # K against the block size
    BACKEND = "backend"  # attention backend and KV dtype
    CACHE = "prefix cache"
    PARALLEL = "parallel"
    OUTPUT = "output"  # what acceptance rule and state roll-back do to the text


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise ValueError(f"{text!r} is no version range such as '>=0.20,<0.25'") from error
    return text


Releases = Annotated[str, AfterValidator(_specifier)]
Text = Annotated[str, Field(min_length=8)]


class Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Effect(Data):
    """What the release runs instead of what the drafter demands; an absent field is as demanded."""

    starts: bool | None = None  # False: refuses, or crashes before the first token
    runner: Literal["v1", "v2"] | None = None  # the runner chosen when the user forces none
    window: Literal["none"] | None = None  # none: every draft layer attends to the whole context
    causal: Literal["all", "none", "unknown"] | None = None  # all layers causal inside the block, or none
    tap_shift: int | None = None  # layers by which every captured feature is off; -1: one too early
    rope: Literal["neox", "target"] | None = None  # the rotary pairing that is used whatever was trained


class Rule(Data):
    """`releases` is a PEP 440 range of `engine`. `when` names features that must all hold ("!" negates).
    `does`, `consequence` and `fix` are sentences for a person. Severity error: the drafter does not run as
    trained (or not at all); warning: speed, memory or a case that needs a look; note: worth knowing."""

    code: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)+$")]
    releases: Releases = ""
    when: tuple[str, ...] = ()
    link: Link
    key: str  # the config key, flag or variable the rule is about
    severity: Severity
    effect: Effect = Effect()
    does: Text
    consequence: Text
    fix: Text
    evidence: tuple[str, ...] = Field(min_length=1)


class Engine(Data):
    """`known` is the range the rules were written for; outside it they are only the nearest known ones.
    `complete_for` lists links for which the rules hold everything there is to say about those releases: there
    the absence of a rule proves a link; elsewhere it proves nothing. `drafts_are` says what the engine's count
    of speculative tokens means; `tap_offset` is what the engine's own layer index adds to "after layer i"."""

    name: str
    as_of: str
    known: Releases
    newest: str
    releases: tuple[str, ...]  # the releases a comparison table shows, oldest first
    complete_for: tuple[Link, ...]
    drafts_are: Literal["block_size - 1", "block_size"]
    tap_offset: int
    rules: tuple[Rule, ...] = ()


class Table(Data):
    engine: tuple[Engine, ...]


@cache
def engines() -> Mapping[str, Engine]:
    """engines.toml, parsed and validated once, by engine name."""
    raw = tomllib.loads(files("draftproof.config").joinpath("engines.toml").read_text(encoding="utf-8"))
    return {engine.name: engine for engine in Table.model_validate(raw).engine}


def covers(releases: str, release: str) -> bool:
    """Does a range hold this release? A pre-release (0.33.0rc1) counts as what it becomes; local labels (+cpu) are
    dropped."""
    return SpecifierSet(releases).contains(Version(release).base_version)
