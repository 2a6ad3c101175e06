"""Taking a flag of known meaning out of an argument list, its value with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftproof.check.flags import Flag


def without_flags(known: Mapping[str, Flag], field: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments without every flag that sets `field`; all others stay as they were, byte for byte."""
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, separator, _ = argument.partition("=")
        flag = known.get(name)
        if flag is None or flag.field != field:
            kept.append(argument)
        elif flag.parse is not None and not separator and rest:
            rest.pop(0)
    return tuple(kept)
