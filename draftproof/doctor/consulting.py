"""Which oracle judges: the pair itself, run here, or a stored profile. Torch is imported when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from draftproof.doctor.facts import Answer, BisectFacts, Facts, OracleFacts
from draftproof.doctor.told import Sums
from draftproof.launch.names import Checkpoint

Say = Callable[[str], None]
Oracle = Callable[[Facts, Checkpoint, Checkpoint], OracleFacts]


def oracle_of(profile: Path | None, device: str, say: Say) -> Oracle:
    """From a stored profile when one is named, else from the weights, which have to be here."""

    def from_weights(facts: Facts, target: Checkpoint, drafter: Checkpoint) -> OracleFacts:
        from draftproof.doctor.oracle import consult

        assert facts.probe is not None
        folders = str(target.configs), str(drafter.configs)
        return consult(*folders, facts.probe.answers, say=say, device=device, sums=counted(facts))

    def from_profile(facts: Facts, target: Checkpoint, drafter: Checkpoint) -> OracleFacts:
        from draftproof.doctor.profile import checkpoint_hashes, consult_profile, load_profile

        assert profile is not None and facts.probe is not None
        hashes = {"target": checkpoint_hashes(target.configs), "drafter": checkpoint_hashes(drafter.configs)}
        return consult_profile(load_profile(profile), facts.probe.answers, hashes, counted(facts))

    return from_profile if profile else from_weights


def counted(facts: Facts) -> Sums | None:
    """The server's counters over the probe, if nobody else was counted."""
    metrics = facts.metrics
    if metrics is None or metrics.delta is None or metrics.foreign:
        return None
    delta = metrics.delta
    if delta.drafts is None or delta.accepted is None:
        return None
    return Sums(int(delta.drafts), int(delta.accepted), delta.per_position)


def bisection_of(device: str) -> Callable[[Sequence[bytes], Answer, Checkpoint, Checkpoint], BisectFacts]:
    """Compare the engine's tensors with the oracle's own, in float32."""

    def bisection(dumps: Sequence[bytes], answer: Answer, target: Checkpoint, drafter: Checkpoint) -> BisectFacts:
        from draftproof.doctor.bisect import compare, read_dump
        from draftproof.engine.pair import load_pair
        from draftproof.models.dflash import DFlashDrafter

        pair = load_pair(str(target.configs), str(drafter.configs), dtype="float32", device=device, plain=True)
        assert isinstance(pair.drafter, DFlashDrafter)
        ids = [*answer.prompt_ids, *answer.output_ids]
        return compare([read_dump(data) for data in dumps], ids, pair.target, pair.drafter, "float32")

    return bisection
