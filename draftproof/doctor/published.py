"""Where an engine does what a config says, and the config is not the published drafter's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.doctor.facts import Facts

# The config keys each link is about.
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "doctor-taps": ("target_layer_ids", "num_target_layers"),
    "doctor-windows": ("layer_types", "sliding_window"),
    "doctor-causality": ("is_causal",),
    "doctor-rope": ("rope_theta", "partial_rotary_factor", "rope_scaling"),
    "doctor-block": ("mask_token_id", "block_size"),
}


def unlike_published(code: str, facts: Facts) -> Finding | None:
    """A proved link only says that the engine follows the config; this is the finding that the config itself is not
    what was published under its name (refuted), or of its shape (cannot tell)."""
    for finding in facts.pair.findings if facts.pair else ():
        if finding.code != "published-difference" or finding.severity is not Severity.ERROR:
            continue
        if finding.message.split(" ")[0] in KEYS.get(code, ()):
            verdict = Verdict.REFUTED if finding.verdict is Verdict.REFUTED else Verdict.CANNOT_TELL
            severity = Severity.ERROR if verdict is Verdict.REFUTED else Severity.WARNING
            message = f"the engine does what the config says, but {finding.message}"
            return Finding(code, severity, verdict, message, finding.expected, finding.seen, finding.where, finding.fix)
    return None
