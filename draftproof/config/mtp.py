"""Checks of a target that drafts with its own multi-token-prediction head: what its config promises and, where the
weights are at hand, what their headers hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from draftproof.config.finding import Finding, error, note
from draftproof.config.target import TargetSpec

PREFIX: Final = "mtp."
Headers = Mapping[str, tuple[str, tuple[int, ...]]]  # tensor name -> (dtype, shape)


def check_mtp(target: TargetSpec, headers: Headers | None = None) -> Iterator[Finding]:
    """mtp-absent, mtp-head-missing, mtp-head-width; a note about the head where its tensors are seen."""
    where = target.sources.get("mtp_layers", "config.json")
    if not target.mtp_layers:
        yield error(
            "mtp-absent",
            "the target's config names no multi-token-prediction layer, so there is no head to draft with",
            "at least 1",
            0,
            where,
            "use a DFlash drafter, or a checkpoint that carries its MTP head",
        )
    elif headers is not None:
        yield from _head(target, {name: shape for name, (_, shape) in headers.items() if name.startswith(PREFIX)})


def _head(target: TargetSpec, tensors: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    wanted, seen = (target.hidden_size, 2 * target.hidden_size), tensors.get(f"{PREFIX}fc.weight")
    if seen is None:
        yield error(
            "mtp-head-missing",
            f"the config promises {target.mtp_layers} MTP layers, the weights have no {PREFIX}fc.weight",
            f"{PREFIX}fc.weight",
            f"{len(tensors)} tensors named {PREFIX}*",
            target.path,
            "take a checkpoint whose export kept the head, or a DFlash drafter",
        )
    elif seen != wanted:
        fix = "use the head that was trained for this target"
        message = "the MTP head has another width than the target"
        yield error("mtp-head-width", message, list(wanted), list(seen), f"{PREFIX}fc.weight", fix)
    else:
        message = f"the target drafts with its own head: {target.mtp_layers} layers, {len(tensors)} tensors"
        yield note("mtp-head", message, list(wanted), list(seen), f"{PREFIX}fc.weight")
