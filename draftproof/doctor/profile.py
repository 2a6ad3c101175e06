"""A stored profile: what every hypothesis predicts on given texts, made where the weights are.

`consult_profile` then needs no weights. It compares the hashes of the checkpoints with the server's, and uses of each
answer what is equal to the profile's own text: behind the first other token the profile knows nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.doctor.facts import Answer, OracleFacts
from draftproof.doctor.oracle import Say, all_anchors, oracle_facts
from draftproof.doctor.rank import Prediction
from draftproof.doctor.told import Sums, first_anchor
from draftproof.errors import UserError
from draftproof.fetch import sha256_of
from draftproof.provenance import provenance

if TYPE_CHECKING:
    from draftproof.models.dflash import DFlashDrafter
    from draftproof.models.target import Target

SCHEMA = 1
HASHED = ("config.json", "*.safetensors")
Hashes = Mapping[str, Mapping[str, str]]  # "target", "drafter" -> file name -> sha256


@dataclass(frozen=True)
class Profile:
    """`prompts` and `outputs` are token ids; `tables[name][i]` are accepted drafts at anchors of text i, in order."""

    hashes: Hashes
    depths: Mapping[str, int]
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    tables: Mapping[str, tuple[tuple[int, ...], ...]]
    random: tuple[str, ...]
    provenance: Mapping[str, Any]


def checkpoint_hashes(folder: Path) -> dict[str, str]:
    """Of the config and the weights."""
    return {file.name: sha256_of(file) for pattern in HASHED for file in sorted(folder.glob(pattern))}


def make_profile(
    target: Target, drafter: DFlashDrafter, answers: Sequence[Answer], hashes: Hashes, say: Say = lambda _line: None
) -> Profile:
    """Every anchor of every text for every hypothesis that has a number for it."""
    predictions = all_anchors(target, drafter, answers, say)
    return Profile(
        hashes=hashes,
        depths={p.name: p.depth for p in predictions},
        prompts=tuple(a.prompt_ids for a in answers),
        outputs=tuple(a.output_ids for a in answers),
        tables={p.name: tuple(tuple(at.values()) for at in p.at) for p in predictions},
        random=tuple(p.name for p in predictions if p.random),
        provenance=provenance(str(target.device), str(target.dtype).removeprefix("torch.")),
    )


def save_profile(profile: Profile, path: Path) -> None:
    """UserError disk-full."""
    try:
        path.write_text(json.dumps({"schema": SCHEMA, **profile.__dict__}) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError("disk-full", f"{path} could not be written: {error}", "name a file that can be") from None


def load_profile(path: Path) -> Profile:
    """UserError: not-found, bad-json."""
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("not-found", f"{path} does not exist", "make one with `draftproof profile`") from None
    except (OSError, ValueError) as error:
        raise UserError("bad-json", f"{path} is not a readable JSON file: {error}", "make the profile again") from None
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        seen = raw.get("schema") if isinstance(raw, dict) else "none"
        raise UserError("bad-json", f"{path} is no profile of schema {SCHEMA} ({seen})", "make the profile again")
    try:
        return _profile(raw)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError("bad-json", f"{path} lacks a part of a profile ({error})", "make the profile again") from None


def consult_profile(
    profile: Profile, answers: Sequence[Answer], hashes: Hashes, sums: Sums | None = None
) -> OracleFacts:
    """As `consult`, from stored numbers. `hashes` are of the checkpoints that the server runs. `sums` count the whole
    probe, so they are used only if all of its text is the profile's. UserError: checksum-mismatch, bad-texts."""
    require_same(profile.hashes, hashes)
    stored = {prompt: i for i, prompt in enumerate(profile.prompts)}
    used = [
        (shared, stored[answer.prompt_ids])
        for answer in answers
        if answer.prompt_ids in stored
        if (shared := shared_part(answer, profile.outputs[stored[answer.prompt_ids]])) is not None
    ]
    if not used:
        fix = "probe with the profile's prompts, or make a profile of these"
        raise UserError("bad-texts", "no answer of the server begins like the profile's text", fix)
    whole = [answer for answer, _ in used] == list(answers)
    predictions = [
        Prediction(name, profile.depths[name], _tables(profile, name, used), name in profile.random)
        for name in profile.tables
    ]
    return oracle_facts([answer for answer, _ in used], predictions, sums if whole else None)


def require_same(recorded: Hashes, seen: Hashes) -> None:
    """Every file that both name must be the same, and both must name some of the target and of the drafter."""
    for role in ("target", "drafter"):
        ours, theirs = recorded.get(role, {}), seen.get(role, {})
        both = sorted(ours.keys() & theirs.keys())
        other = [name for name in both if ours[name] != theirs[name]]
        if other or not both:
            what = f"{', '.join(other)} of the {role} differ" if other else f"no file of the {role} can be compared"
            fix = "make a profile from the checkpoints that the server runs"
            raise UserError("checksum-mismatch", f"the profile is of other checkpoints: {what}", fix)


def shared_part(answer: Answer, text: Sequence[int]) -> Answer | None:
    """The answer up to its first token that is not the profile's, None below two tokens. Steps per token are cut with
    it, totals are lost."""
    same = next((i for i, (a, b) in enumerate(zip(answer.output_ids, text, strict=False)) if a != b), None)
    length = min(len(answer.output_ids), len(text)) if same is None else same
    if length < 2:
        return None
    if length == len(answer.output_ids):
        return answer
    steps, emitted = list[int](), 1
    for accepted in answer.per_step or ():
        if emitted >= length:
            break
        steps.append(accepted)
        emitted += accepted + 1
    told = None if answer.per_step is None else tuple(steps)
    ids = answer.output_ids[:length]
    return replace(answer, output_ids=ids, finish=None, per_step=told, steps=None, accepted=None, drafted=None)


def _tables(profile: Profile, name: str, used: Sequence[tuple[Answer, int]]) -> tuple[dict[int, int], ...]:
    found = []
    for answer, i in used:
        numbers = profile.tables[name][i][: len(answer.output_ids) - 1]
        found.append({first_anchor(answer) + k: accepted for k, accepted in enumerate(numbers)})
    return tuple(found)


def _profile(raw: Mapping[str, Any]) -> Profile:
    return Profile(
        hashes=raw["hashes"],
        depths=raw["depths"],
        prompts=tuple(tuple(ids) for ids in raw["prompts"]),
        outputs=tuple(tuple(ids) for ids in raw["outputs"]),
        tables={name: tuple(tuple(at) for at in table) for name, table in raw["tables"].items()},
        random=tuple(raw["random"]),
        provenance=raw["provenance"],
    )
