"""Numbers between bounds, as grammars in xgrammar's EBNF: digit by digit."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from draftproof.serve.schemas.ebnf import one_of, refuse

MOST_DIGITS = 18  # of a whole number, and of each part of another one: every reader takes it for finite
EXACT = 15  # decimal digits that a double keeps apart: bounds, and what is compared with them, have no more
INTEGER = f'"-"? ("0" | [1-9] [0-9]{{0,{MOST_DIGITS - 1}}})'
NUMBER = f'{INTEGER} ("." [0-9]{{1,{MOST_DIGITS}}})? ([eE] [+\\-]? [0-9]{{1,2}})?'


def whole(low: int | None, high: int | None) -> str:
    """Integers in [low, high]; None: no bound but that of the digits. UserError bad-schema when there is none."""
    most = 10**MOST_DIGITS - 1
    low, high = -most if low is None else low, most if high is None else high
    if low > high or low < -most or high > most:
        raise refuse(f"no integer of at most {MOST_DIGITS} digits is in [{low}, {high}]", "mend the bounds")
    parts = [f'"-" {_lengths(max(1, -high), -low)}'] if low < 0 else []
    return one_of(parts + ([_lengths(max(0, low), high)] if high >= 0 else []))


def _lengths(low: int, high: int) -> str:
    """Integers in [low, high], 0 <= low: numbers of the same length at a time."""
    parts = []
    for size in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (size - 1) if size > 1 else 0), min(high, 10**size - 1)
        parts.append(_digits(str(first), str(last)))
    return one_of(parts)


def _digits(low: str, high: str) -> str:
    """Strings of digits between two of the same length."""
    if not low:
        return '""'
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return f'"{low[0]}" {_digits(low[1:], high[1:])}'
    parts, rest = [], len(low) - 1
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        parts.append(f'"{first}" {_digits(low[1:], "9" * rest)}')
        first += 1
    if high[1:] != "9" * rest:
        parts.append(f'"{last}" {_digits("0" * rest, high[1:])}')
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}] {_digits('0' * rest, '9' * rest)}")
    return one_of(parts)


class Bound:
    """One end of an interval of numbers >= 0; open: the bound itself is outside."""

    def __init__(self, value: Decimal, open: bool) -> None:
        self.value, self.open = value, open
        whole_part, _, fraction = f"{value:f}".partition(".")
        self.whole, self.fraction = int(whole_part), fraction.rstrip("0")


def decimal(low: Decimal | None, high: Decimal | None, low_open: bool, high_open: bool) -> str:
    """Numbers between two bounds, without exponent. UserError bad-schema when there are none, or when the bounds have
    more digits than a double keeps apart."""
    parts: list[tuple[str, Bound, Bound | None]] = []
    if low is None or low < 0:
        below = Bound(-high, high_open) if high is not None and high <= 0 else Bound(Decimal(0), False)
        parts.append(('"-" ', below, None if low is None else Bound(-low, low_open)))
    if high is None or high >= 0:
        above = Bound(low, low_open) if low is not None and low >= 0 else Bound(Decimal(0), False)
        parts.append(("", above, None if high is None else Bound(high, high_open)))
    written = [sign + size for sign, least, most in parts if (size := _between(least, most))]
    if not written:
        raise refuse(f"no number is between the bounds {low} and {high}", "mend the bounds")
    return one_of(written)


def _between(low: Bound, high: Bound | None) -> str | None:
    """Numbers >= 0; None when there are none. The bound's own integer part is followed by fewer fractions."""
    if high and high.value < low.value:
        return None
    places = _places([low, high] if high else [low])
    inside = Fraction(low.fraction, low.open, None, False, places)
    if not high:
        high = Bound(Decimal(10**EXACT), True)
    elif low.whole == high.whole:
        alone = Fraction(low.fraction, low.open, high.fraction, high.open, places).written()
        return f'"{low.whole}" {alone}' if alone is not None else None
    ends = ((low.whole, inside), (high.whole, Fraction(None, False, high.fraction, high.open, places)))
    parts = [f'"{at}" {written}' for at, fraction in ends if (written := fraction.written()) is not None]
    if low.whole + 1 < high.whole:
        free = Fraction(None, False, None, False, places).written()
        parts.append(f"{_lengths(low.whole + 1, high.whole - 1)} {free}")
    return one_of(parts)


def _places(bounds: list[Bound]) -> int:
    """Digits behind the point."""
    size = max(len(str(b.whole)) for b in bounds)
    places = max(min(6, EXACT - size), *(len(b.fraction) for b in bounds))
    if size + places > EXACT:
        raise refuse(f"bounds of more than {EXACT} digits, which a double cannot tell apart", "round them")
    return places


@dataclass(frozen=True)
class Fraction:
    """Digits behind the point between two strings of digits; None: no bound on that side; open: the bound itself is
    outside. places: digits at most."""

    low: str | None
    low_open: bool
    high: str | None
    high_open: bool
    places: int

    def written(self) -> str | None:
        """Nothing, or a point and digits; None when neither fits."""
        digits = self._digits()
        parts = (['""'] if self._ends else []) + ([f'"." {digits}'] if digits else [])
        return one_of(parts) if parts else None

    @property
    def _ends(self) -> bool:
        """May the number end here, as if zeros followed?"""
        above = self.low is None or (self.low == "" and not self.low_open)
        return above and not (self.high == "" and self.high_open)

    @property
    def _free(self) -> bool:
        return self.high is None and (self.low is None or (self.low == "" and not self.low_open))

    def _digits(self) -> str | None:
        """One digit or more; None when there are none that fit. Digits strictly inside stand for themselves."""
        if not self.places:
            return None
        if self._free:
            return f"[0-9]{{1,{self.places}}}"
        least = int((self.low or "0")[0])
        most = 9 if self.high is None else int((self.high or "0")[0])
        at_low, at_high = self.low is not None, self.high is not None
        first, last = least + at_low, most - at_high
        parts = [f"[{first}-{last}] [0-9]{{0,{self.places - 1}}}"] if first <= last else []
        edges = {least: (True, least == most)} if at_low and least <= most else {}
        edges |= {most: (at_low and least == most, True)} if at_high and least <= most else {}
        for digit, (low, high) in edges.items():
            rest = self._behind(low and at_low, high and at_high)
            parts += [f'"{digit}" {rest}'] if rest is not None else []
        return one_of(parts) if parts else None

    def _behind(self, low: bool, high: bool) -> str | None:
        """What follows a digit that is that of the lower or the upper bound, or both."""
        rest = Fraction(
            (self.low or "")[1:] if low else None,
            self.low_open,
            (self.high or "")[1:] if high else None,
            self.high_open,
            self.places - 1,
        )
        digits = rest._digits()
        if digits is None:
            return '""' if rest._ends else None
        return f"({digits})?" if rest._ends else f"({digits})"
