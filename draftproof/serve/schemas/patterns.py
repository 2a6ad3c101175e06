"""Regular expressions of JSON schemas (ECMA 262) as regular expressions of xgrammar's.

Both are read alike for the most part; what xgrammar would leave out without a word (look-around, anchors inside) is
refused, and every character is spelled as its alphabet wants it.
"""

from __future__ import annotations

from draftproof.errors import UserError
from draftproof.serve.schemas.ebnf import Alphabet, Ranges, any_of, refuse, repeated, spell, without

MOST_STATES = 256  # cost of a regular expression, its counts written out: a state is a look at the vocabulary
NARROW, WIDE = 1, 4  # the cost of a character of few, or of many: then most tokens go on
LONGEST_PATTERN, DEEPEST_GROUP, DEEPEST_STARS = 1000, 16, 3  # characters; groups, and stars, in each other

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


def pattern(ecma: str, alphabet: Alphabet) -> tuple[str, int]:
    """Strings in which a regular expression (ECMA 262) is found, as they are written: a regular expression that the
    whole of them matches, and what it costs. UserError bad-schema for what is no such expression, and for look-around,
    back references and anchors inside."""
    reader = _Regex(ecma, alphabet)
    return reader.search(), reader.size


class _Regex:
    """Recursive descent; what reads a part gives it in xgrammar's form, and how many characters it unrolls to."""

    def __init__(self, ecma: str, alphabet: Alphabet) -> None:
        self._regex, self._alphabet, self._at, self._depth = ecma, alphabet, 0, 0
        self._stars = 0  # unbounded repetitions in each other, of what was read last
        self.size = 0
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
        inner, size = self._sequence()
        self.size += size + 2 * WIDE
        return before + inner + ("" if self._take("$") else other)

    def _alternatives(self) -> tuple[str, int]:
        parts = [self._sequence()]
        stars = self._stars
        while self._take("|"):
            parts.append(self._sequence())
            stars = max(stars, self._stars)
        self._stars = stars
        return any_of([inner for inner, _ in parts]), sum(size for _, size in parts)

    def _sequence(self) -> tuple[str, int]:
        items, stars = [], 0
        while self._at < len(self._regex) and self._regex[self._at] not in "|)$":
            items.append(self._item())
            stars = max(stars, self._stars)
        self._stars = stars
        size = sum(size for _, size in items)
        if size > MOST_STATES:
            raise self._wrong(f"more than {MOST_STATES} states once its counts are written out")
        return "".join(item for item, _ in items), size

    def _item(self) -> tuple[str, int]:
        item, inside = self._atom()
        least, most = self._count()
        self._stars = self._stars + 1 if most is None else self._stars
        if self._stars > DEEPEST_STARS:
            raise self._wrong(f"more than {DEEPEST_STARS} unbounded repetitions in each other")
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
        self._stars = 0
        many = sum(b - a + 1 for a, b in ranges) > 256
        return spelled, WIDE if many else NARROW

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
