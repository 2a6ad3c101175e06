"""Pieces of grammars for xgrammar: EBNF, and regular expressions in its dialect.

A string is written by an `Alphabet`: which characters stand for themselves, which are spelled as an escape. So one
regular expression serves in a JSON text, where a quote is `\\"`, and between XML-like tags, where it is a quote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftproof.errors import UserError

Ranges = list[tuple[int, int]]  # code points, both ends included

TOP = 0x10FFFF
MOST_REPEATS = 10_000  # of an item of an array, or a character of a string


def refuse(message: str, fix: str = "leave it out, or say it in the prompt") -> UserError:
    return UserError("bad-schema", message, fix)


@dataclass(frozen=True)
class Alphabet:
    """plain: characters that stand for themselves; escapes: code point -> how it is spelled; any: one character,
    however it is spelled, as a regular expression. counted: the class of characters of a string with a length, in
    EBNF: xgrammar counts one class that excludes some of ASCII fast, and nothing else."""

    plain: tuple[tuple[int, int], ...]
    escapes: Mapping[int, str]
    any: str
    counted: str


def literal(text: str) -> str:
    """A regular expression of xgrammar's that only this text matches."""
    return "".join(c if c.isascii() and c.isalnum() else _code(ord(c)) for c in text)


def quote(text: str) -> str:
    """An EBNF literal."""
    return '"' + "".join(c if c.isascii() and c.isalnum() else _ebnf(ord(c)) for c in text) + '"'


def regex(expression: str) -> str:
    """A regular expression of xgrammar's as EBNF. It becomes one automaton, whose masks are made when it is compiled;
    the same text from rules that call each other costs a look at the whole vocabulary in every step."""
    return 'Regex("' + expression.replace("\\", "\\\\").replace('"', '\\"') + '")'


def _code(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\u{{{code:x}}}"


def charset(ranges: Ranges) -> str:
    """A class of characters in a regular expression. xgrammar takes some bytes for them that are no UTF-8; in the text
    they are replacement characters."""
    return "[" + "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in ranges) + "]"


def characters(ranges: Sequence[tuple[int, int]]) -> str:
    """A class of characters in EBNF, where ranges are exact."""
    return "[" + "".join(f"{_ebnf(a)}-{_ebnf(b)}" for a, b in ranges) + "]"


def _ebnf(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def spell(ranges: Ranges, alphabet: Alphabet) -> str | None:
    """One character of `ranges` as it is written, as a regular expression; None when there is none."""
    plain = [(max(a, c), min(b, d)) for a, b in ranges for c, d in alphabet.plain if max(a, c) <= min(b, d)]
    parts = [charset(plain)] if plain else []
    parts += [literal(e) for code, e in alphabet.escapes.items() if any(a <= code <= b for a, b in ranges)]
    return any_of(parts) if parts else None


def any_of(parts: list[str]) -> str:
    """Alternatives in a regular expression."""
    return parts[0] if len(parts) == 1 else "(" + "|".join(parts) + ")"


def one_of(parts: list[str]) -> str:
    """Alternatives in EBNF."""
    return parts[0] if len(parts) == 1 else "(" + " | ".join(parts) + ")"


def repeated(item: str, least: int, most: int | None) -> str:
    """In EBNF, and in a regular expression."""
    return '""' if most == 0 else f"({item}){{{least},{'' if most is None else most}}}"


_ESCAPES = {code: f"\\u{code:04x}" for code in range(0x20)}
_ESCAPES |= {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 0x22: '\\"', 0x5C: "\\\\"}
_HEX = "[0-9A-Fa-f]"
_SURROGATES = f"[Dd][89ABab]{_HEX}{_HEX}\\\\u[Dd][C-Fc-f]{_HEX}{_HEX}"
_UNICODE = f"u([0-9A-CEFa-cef]{_HEX}{_HEX}{_HEX}|[Dd][0-7]{_HEX}{_HEX}|{_SURROGATES})"


def _json(plain: tuple[tuple[int, int], ...], escapes: Mapping[int, str], counted: str) -> Alphabet:
    return Alphabet(plain, escapes, f'({charset(list(plain))}|\\\\(["\\\\/bfnrt]|{_UNICODE}))', counted)


_REST = ((0x5D, 0xD7FF), (0xE000, TOP))  # surrogates are no characters
JSON = _json(((0x20, 0x21), (0x23, 0x5B), *_REST), _ESCAPES, '[^"\\\\\\x00-\\x1f]')
# Between tags a `<` could begin the closing one.
TAGGED_JSON = _json(
    ((0x20, 0x21), (0x23, 0x3B), (0x3D, 0x5B), *_REST), _ESCAPES | {0x3C: "\\u003c"}, '[^<"\\\\\\x00-\\x1f]'
)
_TEXT = ((9, 10), (0x20, 0x3B), (0x3D, 0xD7FF), (0xE000, TOP))
TAGGED_TEXT = Alphabet(_TEXT, {}, charset(list(_TEXT)), "[^<\\x00-\\x08\\x0b-\\x1f]")


def without(ranges: Ranges) -> Ranges:
    """The other code points."""
    left, at = [], 0
    for a, b in sorted(ranges):
        if a > at:
            left.append((at, a - 1))
        at = max(at, b + 1)
    return left + ([(at, TOP)] if at <= TOP else [])
