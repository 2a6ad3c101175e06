"""Which rules of engines.toml hold for a deployment, and what the engine runs by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version

from draftproof.check.deployment import Deployment
from draftproof.check.features import features
from draftproof.config.engines import Engine, Rule, covers

Runner = Literal["v1", "v2"]


@dataclass(frozen=True)
class Applied:
    """`release` is the one the rules were looked up for: the deployment's own if the data covers it (`verified`),
    else the nearest known one, or None when the engine's rules are undated. `rules` are those that hold."""

    release: str | None
    verified: bool
    runner: Runner | None
    rules: tuple[Rule, ...]

    def effect(self, name: str) -> Any:
        """What the last rule with this effect says; None: as the drafter demands."""
        values = [getattr(rule.effect, name) for rule in self.rules]
        return next((value for value in reversed(values) if value is not None), None)

    @property
    def starts(self) -> bool:
        return self.effect("starts") is not False


def apply_rules(deployment: Deployment) -> Applied:
    """The runner is settled first (a user's choice, else the last runner rule that holds); every other rule may
    ask for it."""
    release, verified = lookup_release(deployment.engine, deployment.release)
    known = features(deployment)
    candidates = [rule for rule in deployment.engine.rules if _in_range(rule, release)]
    chosen = [rule.effect.runner for rule in candidates if rule.effect.runner and _holds(rule, known)]
    runner = deployment.options.runner or (chosen[-1] if chosen else None)
    if runner:
        known |= {f"runner:{runner}"}
    rules = tuple(rule for rule in candidates if _holds(rule, known))
    return Applied(release, verified, runner, rules)


def lookup_release(engine: Engine, release: str | None) -> tuple[str | None, bool]:
    """(release to look rules up for, whether the data covers the one asked for)."""
    if release is None:
        return None, False
    if engine.known and covers(engine.known, release):
        return release, True
    if not engine.releases:
        return release, False
    oldest, newest = engine.releases[0], engine.newest
    return (newest if Version(release) > Version(newest) else oldest), False


def _in_range(rule: Rule, release: str | None) -> bool:
    return not rule.releases or (release is not None and covers(rule.releases, release))


def _holds(rule: Rule, known: frozenset[str]) -> bool:
    return all((name[1:] not in known) if name.startswith("!") else (name in known) for name in rule.when)
