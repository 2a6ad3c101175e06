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
MOST_STATES = 512  # characters of a regular expression, its counts written out: each costs a look at the vocabulary
LONGEST_PATTERN, DEEPEST_GROUP = 1000, 16  # characters; groups in each other


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


# ---- regular expressions

_DIGIT: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [(9, 13), (0x20, 0x20)]  # those that every dialect of regular expressions agrees on
_SPACES: Ranges = [
    *_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_NO_LINE_END = without([(10, 10), (13, 13), (0x2028, 0x2029)])
_CLASSES = {
    "d": _DIGIT, "D": without(_DIGIT), "w": _WORD, "W": without(_WORD), "s": _SPACE, "S": without(_SPACES),
}  # fmt: skip
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


def pattern(ecma: str, alphabet: Alphabet) -> str:
    """Strings in which a regular expression (ECMA 262) is found, as they are written: a regular expression that the
    whole of them matches. UserError bad-schema for what is no such expression, and for look-around, back references
    and anchors inside."""
    return _Regex(ecma, alphabet).search()


class _Regex:
    """Recursive descent; what reads a part gives it in xgrammar's form, and how many characters it unrolls to."""

    def __init__(self, ecma: str, alphabet: Alphabet) -> None:
        self._regex, self._alphabet, self._at, self._depth = ecma, alphabet, 0, 0
        if len(ecma) > LONGEST_PATTERN:
            raise refuse(f"a pattern of {len(ecma):,} characters; {LONGEST_PATTERN:,} is the most")

    def search(self) -> str:
        parts = [self._anchored()]
        while self._take("|"):
            parts.append(self._anchored())
        if self._at < len(self._regex):
            raise self._wrong("an unbalanced )")
        return any_of(parts)

    def _anchored(self) -> str:
        other = f"{self._alphabet.any}*"
        before = "" if self._take("^") else other
        inner, _ = self._sequence()
        return before + inner + ("" if self._take("$") else other)

    def _alternatives(self) -> tuple[str, int]:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return any_of([inner for inner, _ in parts]), max(times for _, times in parts)

    def _sequence(self) -> tuple[str, int]:
        items = []
        while self._at < len(self._regex) and self._regex[self._at] not in "|)$":
            items.append(self._item())
        size = sum(size for _, size in items)
        if size > MOST_STATES:
            raise self._wrong(f"more than {MOST_STATES} characters once its counts are written out")
        return "".join(item for item, _ in items), size

    def _item(self) -> tuple[str, int]:
        item, inside = self._atom()
        least, most = self._count()
        counted = item if (least, most) == (1, 1) else "" if most == 0 else repeated(item, least, most)
        return counted, inside * max(1, least, most or 0)

    def _atom(self) -> tuple[str, int]:
        char = self._next()
        if char == "(":
            return self._group()
        if char in "^$*+?{}])":
            raise self._wrong(f"{char} where it has no meaning")
        ranges = _NO_LINE_END if char == "." else self._set() if char == "[" else self._escaped(char)
        spelled = spell(ranges, self._alphabet)
        if spelled is None:
            raise self._wrong("a character that cannot stand there")
        return spelled, 1

    def _group(self) -> tuple[str, int]:
        self._depth += 1
        if self._depth > DEEPEST_GROUP:
            raise self._wrong(f"more than {DEEPEST_GROUP} groups in each other")
        if self._take("?") and not self._take(":"):
            raise self._wrong("a group (?...) other than (?:...)")
        inner, times = self._alternatives()
        if not self._take(")"):
            raise self._wrong("an anchor inside a group, or a group that does not end")
        self._depth -= 1
        return f"({inner})", max(times, 1)

    def _set(self) -> Ranges:
        negated, ranges = self._take("^"), list[tuple[int, int]]()
        while not self._take("]"):
            low = self._escaped(self._next())
            single = len(low) == 1 and low[0][0] == low[0][1]
            if single and self._regex[self._at : self._at + 1] == "-" and self._regex[self._at + 1 :][:1] != "]":
                self._at += 1
                high = self._escaped(self._next())
                if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise self._wrong("an impossible range of characters")
                low = [(low[0][0], high[0][0])]
            ranges += low
        return without(ranges) if negated else ranges

    def _escaped(self, char: str) -> Ranges:
        """The characters that `char`, with what follows a backslash, stands for."""
        if char != "\\":
            return [(ord(char), ord(char))]
        char = self._next()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS:
            return [(_CONTROLS[char],) * 2]
        if char in "xu":
            size = 2 if char == "x" else 4
            digits = self._regex[self._at : self._at + size]
            if len(digits) < size or not all(d in "0123456789abcdefABCDEF" for d in digits):
                raise self._wrong(f"\\{char} without {size} hexadecimal digits")
            self._at += size
            return [(int(digits, 16),) * 2]
        if char.isalnum():
            raise self._wrong(f"\\{char}")
        return [(ord(char), ord(char))]

    def _count(self) -> tuple[int, int | None]:
        counts: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        char = self._regex[self._at : self._at + 1]
        if char in counts:
            self._at += 1
            count = counts[char]
        elif char == "{":
            count = self._braces()
        else:
            return 1, 1
        self._take("?")  # lazy or greedy: the same strings
        return count

    def _braces(self) -> tuple[int, int | None]:
        end = self._regex.find("}", self._at)
        low, comma, high = self._regex[self._at + 1 : max(end, 0)].partition(",")
        known = low.isascii() and low.isdigit() and (not high or (high.isascii() and high.isdigit()))
        if not known or len(low + high) > 12 or (high and int(high) < int(low)):
            raise self._wrong("a count {...} that is none")
        self._at = end + 1
        return int(low), (int(high) if high else None) if comma else int(low)

    def _take(self, char: str) -> bool:
        taken = self._regex[self._at : self._at + 1] == char
        self._at += taken
        return taken

    def _next(self) -> str:
        if self._at == len(self._regex):
            raise self._wrong("an unfinished expression")
        self._at += 1
        return self._regex[self._at - 1]

    def _wrong(self, what: str) -> UserError:
        return refuse(f"pattern {self._regex[:80]!r} has {what} (before character {self._at + 1})", "simplify it")
