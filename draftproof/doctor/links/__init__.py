"""The links in the order a value travels. Each module has CODE, TITLE, EXPLAINS (later codes that its break accounts
for), NEEDS (sources it reads), PROVES and REFUTES (for docs/links.md), `required(facts)` and `judge(facts)`."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from draftproof.doctor.links import (
    acceptance,
    argv,
    block,
    cache,
    causality,
    config,
    current,
    files,
    heads,
    output,
    pair,
    release,
    rope,
    speed,
    taps,
    windows,
)

LINKS: Final[tuple[ModuleType, ...]] = (
    files, current, pair, argv, release, config, taps, windows, causality, rope, heads, block, acceptance, cache,
    output, speed,
)  # fmt: skip
