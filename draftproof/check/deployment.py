"""A pair on an engine release with its options: the one value that check and launch reason about."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from draftproof.check.options import Options
from draftproof.config.drafter import DrafterSpec
from draftproof.config.engines import Engine, engines
from draftproof.config.target import TargetSpec
from draftproof.errors import UserError

ALIASES = {
    "llamacpp": "llama.cpp",
    "llama-cpp": "llama.cpp",
    "ik_llama": "ik_llama.cpp",
    "ik-llama.cpp": "ik_llama.cpp",
}


@dataclass(frozen=True)
class Deployment:
    """`drafter` is None for drafting by the target's own MTP head. `release` is None when the engine has no
    release numbers the rules are dated by, or when it is not known."""

    engine: Engine
    release: str | None
    drafter: DrafterSpec | None
    target: TargetSpec
    options: Options


def parse_engine(text: str) -> tuple[Engine, str | None]:
    """`vllm==0.24` or `vllm` -> the engine's data and the release asked for (None: not named).

    UserError engine-unknown for a name that is not in the data, bad-option for a malformed version.
    """
    name, separator, release = (part.strip() for part in re.sub(r"==|=", "==", text, count=1).partition("=="))
    known = engines()
    key = ALIASES.get(name.lower(), name.lower())
    if key not in known:
        raise UserError("engine-unknown", f"engine {name!r} is not known", f"use one of {', '.join(known)}")
    if not separator:
        return known[key], None
    try:
        Version(release.lower().removeprefix("v").removeprefix("b"))
    except InvalidVersion as error:
        raise UserError(
            "bad-option", f"{release!r} is no version of {key}", f"write {key}=={known[key].newest}"
        ) from error
    return known[key], release.lower().removeprefix("v").removeprefix("b")
