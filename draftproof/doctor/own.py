"""A server of our own: what `draftproof serve` was asked for, and what its /server_info says that it runs.

The doctor and this engine are one code base, which limits what a comparison is worth. What the server loaded can be
compared (files, taps, block, method, budget), and so can what it did (acceptance, step by step). How a layer runs
cannot: the engine builds it from the same reading of the config that the doctor would compare it with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from draftproof.check.flags import FLAGS, read_flags
from draftproof.doctor.facts import Facts
from draftproof.errors import UserError

NAME: Final = "draftproof"
METHOD: Final = "ddtree"  # what `draftproof serve` does where nothing is said
BUDGETS: Final = {"ddtree": "auto", "dflash": "chain"}
BY_DRAFTER: Final = ("dflash", "ddtree")
SAME_CODE: Final = (
    "draftproof's own engine builds this from the same reading of the config as the doctor: a comparison would prove "
    "nothing"
)
JUDGED: Final = "acceptance is judged below; `make test-real` compares the engine with the drafter authors' own code"


@dataclass(frozen=True)
class Own:
    """Of /server_info; None where it does not say. `budget` as on the command line, `drafts` those of a pass."""

    method: str | None = None
    budget: str | None = None
    target: str | None = None
    drafter: str | None = None
    drafts: int | None = None
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None


def is_own(facts: Facts) -> bool:
    return facts.engine == NAME


def told(info: Mapping[str, Any] | None) -> Own | None:
    """None for another engine's /server_info, or none at all. A value of the wrong type counts as not said."""
    if info is None or info.get("engine") != NAME:
        return None
    taps, budget = info.get("taps"), info.get("budget")
    return Own(
        method=_text(info.get("method")),
        budget=None if budget is None else str(budget),
        target=_text(info.get("target")),
        drafter=_text(info.get("drafter")),
        drafts=_whole(info.get("num_speculative_tokens")),
        taps=tuple(taps) if isinstance(taps, list) and all(isinstance(tap, int) for tap in taps) else None,
        mask_token_id=_whole(info.get("mask_token_id")),
    )


def asked_of(facts: Facts) -> Own | None:
    """By the process's arguments and what stands for those that are not there; None without them."""
    if facts.process is None:
        return None
    try:
        flags = {field: value for field, (_, value) in read_flags(FLAGS[NAME], facts.process.argv).items()}
    except UserError:
        return None
    method = flags.get("spec_method", METHOD)
    return Own(
        method,
        budget=flags.get("budget", BUDGETS.get(method)),
        drafter=flags.get("spec_model"),
        drafts=flags.get("drafts"),
    )


def probe_fields(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a probe asks for beyond other engines: its steps one by one, and chains, since the number of accepted
    drafts of a tree depends on its shape and the oracle predicts a chain's."""
    server = told(info)
    if server is None or server.method in (None, "none"):
        return {}
    chains = {"speculation": {"budget": "chain"}} if server.method in BY_DRAFTER else {}
    return {"spec_decode_metrics": "detailed", **chains}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
