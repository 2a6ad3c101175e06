"""Verdicts of a deployment's links, from what its configs say and from the rules that hold for the release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from draftproof.check.deployment import Deployment
from draftproof.check.layers import LayerView, show_causal, show_windows, tap_indices
from draftproof.check.rules import Applied
from draftproof.config.drafter import DrafterSpec
from draftproof.config.engines import Link
from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.config.published import Match

# Links that fail silently and that configs and release data can settle: each must be proved.
REQUIRED: Final = (
    Link.METHOD, Link.RUNNER, Link.TAPS, Link.WINDOWS, Link.CAUSALITY, Link.ROPE, Link.MASK, Link.BLOCK,
)  # fmt: skip
OF_MTP: Final = (Link.METHOD, Link.RUNNER, Link.BLOCK)
# Weights and hardware decide these, mostly loudly: shown, and refuted where a rule says so. The links that are left
# speak of speed, of memory or of a feature somebody asked for, and are shown only when refuted.
SHOWN: Final = (Link.LOAD, Link.BACKEND)
# The link that a finding about the configs leaves open. Findings that are not here bear on no single link.
LINK_OF: Final[Mapping[str, Link]] = {
    "target-width": Link.LOAD, "drafter-width": Link.LOAD, "vocabulary": Link.LOAD, "draft-vocabulary": Link.LOAD,
    "embedding-scale": Link.LOAD, "config-contradicts-itself": Link.LOAD, "family-not-runnable": Link.LOAD,
    "num-target-layers": Link.TAPS, "taps-out-of-range": Link.TAPS, "taps-late": Link.TAPS,
    "taps-unusual": Link.TAPS, "taps-not-ascending": Link.TAPS, "window-unused": Link.WINDOWS,
    "window-below-block": Link.WINDOWS, "layers-ambiguous": Link.WINDOWS, "use-sliding-window-false": Link.WINDOWS,
    "causality-disagreement": Link.CAUSALITY, "rope-base": Link.ROPE, "partial-rotary": Link.ROPE,
    "mask-id-out-of-range": Link.MASK, "mask-id-in-use": Link.MASK, "block-too-small": Link.BLOCK,
    "k-not-block": Link.BLOCK, "mtp-absent": Link.METHOD,
}  # fmt: skip
# Fields of published.toml whose agreement, under the very name, settles what the configs alone leave open.
PUBLISHED: Final[Mapping[Link, tuple[str, ...]]] = {
    Link.TAPS: ("taps",),
    Link.WINDOWS: ("layers", "window"),
    Link.CAUSALITY: ("causal",),
    Link.ROPE: ("rope_base",),
    Link.MASK: ("mask_token_id",),
    Link.BLOCK: ("block_size",),
    Link.LOAD: ("vocab_size",),
}


@dataclass(frozen=True)
class LinkVerdict:
    """`demands` and `runs` in a few words; `codes` are the findings behind the verdict."""

    link: Link
    required: bool
    verdict: Verdict
    demands: str
    runs: str
    codes: tuple[str, ...] = ()


def judge_links(
    deployment: Deployment,
    applied: Applied,
    layers: Sequence[LayerView],
    about_pair: Sequence[Finding],
    published: Match | None,
) -> tuple[LinkVerdict, ...]:
    """Verdicts of all required and shown links, and of any other that a rule refutes."""
    required = REQUIRED if deployment.drafter is not None else OF_MTP
    refuted = {rule.link for rule in applied.rules if rule.severity is Severity.ERROR}
    words = _words(deployment, applied, layers)
    verdicts = []
    for link in Link:
        if link in required or link in SHOWN or link in refuted:
            verdict, codes = _judge(link, deployment, applied, layers, about_pair, published)
            demands, runs = words.get(link, ("", ""))
            verdicts.append(LinkVerdict(link, link in required, verdict, demands, runs, codes))
    return tuple(verdicts)


def _judge(
    link: Link,
    deployment: Deployment,
    applied: Applied,
    layers: Sequence[LayerView],
    about_pair: Sequence[Finding],
    published: Match | None,
) -> tuple[Verdict, tuple[str, ...]]:
    """The worst of: what the rules say of the release, what runs against what is demanded, what the configs show."""
    rules = [rule for rule in applied.rules if rule.link is link and rule.severity is not Severity.NOTE]
    about = [f for f in about_pair if _link(f, published) is link and f.severity is not Severity.NOTE]
    codes = tuple(dict.fromkeys([r.code for r in rules] + [f.code for f in about]))
    wrong = [rule for rule in rules if rule.severity is Severity.ERROR]
    if any(f.severity is Severity.ERROR for f in about) or (applied.verified and (wrong or _differs(link, layers))):
        return Verdict.REFUTED, codes
    settled = published is not None and _settles(link, published)
    if wrong or rules or (about and not settled) or not _complete(link, deployment, applied):
        return Verdict.CANNOT_TELL, codes
    if link is Link.CAUSALITY and any(view.runs_causal is None for view in layers):
        return Verdict.CANNOT_TELL, codes
    if not applied.starts:  # nothing of what comes after a refusal runs
        return Verdict.CANNOT_TELL, codes
    return Verdict.PROVED, ()


def open_links(findings: Sequence[Finding], published: Match | None) -> list[Link]:
    """Links that findings about the configs alone leave open, published values having settled what they can."""
    doubts = [f for f in findings if f.severity is Severity.WARNING]
    links = {link for f in doubts if (link := _link(f, published)) is not None}
    return [link for link in Link if link in links and not (published and _settles(link, published))]


def _differs(link: Link, layers: Sequence[LayerView]) -> bool:
    if link is Link.WINDOWS:
        return not all(view.window_agrees for view in layers)
    return link is Link.CAUSALITY and any(view.runs_causal not in (None, view.causal) for view in layers)


def _complete(link: Link, deployment: Deployment, applied: Applied) -> bool:
    return applied.verified and link in deployment.engine.complete_for


def _link(finding: Finding, published: Match | None) -> Link | None:
    if finding.code in ("published-difference", "published-ambiguous"):
        return published_link(finding)
    return LINK_OF.get(finding.code)


# Published differences name the config key, not the field.
KEYS: Final[Mapping[Link, tuple[str, ...]]] = {
    Link.TAPS: ("target_layer_ids", "num_target_layers"),
    Link.WINDOWS: ("layer_types", "sliding_window"),
    Link.CAUSALITY: ("is_causal",),
    Link.ROPE: ("rope_theta", "partial_rotary_factor", "rope_scaling"),
    Link.MASK: ("mask_token_id",),
    Link.BLOCK: ("block_size",),
}


def published_link(finding: Finding) -> Link | None:
    """The link that a difference from a published drafter is about: its message begins with the config key."""
    return next((link for link, keys in KEYS.items() if finding.message.split(" ")[0] in keys), None)


def _settles(link: Link, published: Match) -> bool:
    fields = PUBLISHED.get(link, ())
    return (
        published.exact
        and bool(fields)
        and all(name in published.entry and name not in published.differences for name in fields)
    )


def _words(deployment: Deployment, applied: Applied, layers: Sequence[LayerView]) -> Mapping[Link, tuple[str, str]]:
    """(what the drafter demands, what the release runs) by link."""
    runner = applied.runner or "not known"
    told: dict[Link, tuple[str, str]] = {Link.RUNNER: ("", runner)}
    drafter = deployment.drafter
    if drafter is None:
        return told
    runs = " ".join(map(str, tap_indices(deployment, applied)))
    rope = {"neox": "NeoX pairing", "target": "the target's pairing"}.get(applied.effect("rope"), _pairing(drafter))
    return told | {
        Link.TAPS: ("after layers " + " ".join(map(str, drafter.taps)), f"engine indices {runs}"),
        Link.WINDOWS: (
            show_windows([view.window for view in layers]),
            show_windows([view.runs_window for view in layers]),
        ),
        Link.CAUSALITY: (
            show_causal([view.causal for view in layers]),
            show_causal([view.runs_causal for view in layers]),
        ),
        Link.ROPE: (f"base {drafter.rope.base:g}, {_pairing(drafter)}", f"base {drafter.rope.base:g}, {rope}"),
        Link.MASK: (str(drafter.mask_token_id), str(drafter.mask_token_id)),
        Link.BLOCK: (f"block {drafter.block_size}", engine_count(deployment)),
    }


def _pairing(drafter: DrafterSpec) -> str:
    return "interleaved pairing" if drafter.extras.get("is_neox_style") is False else "NeoX pairing"


def engine_count(deployment: Deployment) -> str:
    """The number of speculative tokens in the engine's own unit."""
    drafter, options = deployment.drafter, deployment.options
    drafts = options.drafts if options.drafts is not None else (drafter.block_size - 1 if drafter else 1)
    if deployment.engine.drafts_are == "block_size":
        return f"{drafts + 1} draft tokens, the anchor counted"
    return f"K = {drafts}"
