"""What earlier requests left behind: committed rows by text, so that a shared beginning is not run again.

A tree of pieces of text (a radix tree), each with copies of what every store holds of its tokens: target and drafter
together, so that acceptance behind a hit is what it would have been without. Rows can be taken up in the middle of a
piece. A state (of a recurrent layer, or a row that waits for its next token) cannot: with such stores a text is taken
up at the end of a piece whose state was kept. The pieces that were unused for the longest time make room for new ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

Rows = list[list[Tensor]]  # by store; dimension 1 of every tensor is the token


@dataclass(eq=False)
class Piece:
    tokens: tuple[int, ...]
    rows: Rows
    state: list[list[Tensor]] | None  # by store, behind the last token
    parent: Piece | None
    children: dict[int, Piece] = field(default_factory=dict)  # by their first token
    used: int = 0

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for store in (*self.rows, *(self.state or ())) for t in store)


@dataclass(frozen=True)
class Hit:
    """The first `length` tokens: rows of every stretch with the position it begins at, and the state behind them."""

    length: int
    stretches: list[tuple[int, Rows]]
    state: list[list[Tensor]] | None


class PrefixCache:
    """limit: bytes. stateful: some store keeps a state."""

    def __init__(self, limit: int, *, stateful: bool) -> None:
        self.limit, self.stateful = limit, stateful
        self.nbytes = 0
        self._root = Piece((), [], None, None)
        self._leaves: set[Piece] = set()
        self._clock = itertools.count(1)

    def match(self, ids: Sequence[int]) -> Hit:
        """The longest beginning of `ids` that is held, at least one token short of them: that one must be run."""
        stretches, lengths, state = [], [0], None
        taken = 0  # stretches that count
        for piece, begin, count in self._walk(ids[:-1]):
            stretches.append((begin, cut(piece.rows, 0, count)))
            lengths.append(begin + count)
            if not self.stateful or (count == len(piece.tokens) and piece.state is not None):
                taken, state = len(stretches), piece.state
        return Hit(lengths[taken], stretches[:taken], state)

    def add(self, ids: Sequence[int], begin: int, rows: Rows, state: list[list[Tensor]] | None) -> None:
        """Rows of ids[begin:] and the state behind them. Nothing is kept where what lies before is no longer held."""
        path = list(self._walk(ids))
        held = path[-1][1] + path[-1][2] if path else 0
        if held < begin:
            return
        parent = self._root
        if path:
            piece, _, count = path[-1]
            parent = piece if count == len(piece.tokens) else self._split(piece, count)
        if held == len(ids):
            if state is not None and parent.state is None and parent is not self._root:
                self.nbytes += sum(t.nbytes for store in state for t in store)
                parent.state = state
        else:
            whole = held == begin  # nothing to cut off: no second copy
            own = rows if whole else cut(rows, held - begin, len(ids) - begin, copied=True)
            self._hang(Piece(tuple(ids[held:]), own, state, parent, used=next(self._clock)), parent)
        self._shrink()

    def clear(self) -> None:
        self._root.children.clear()
        self._leaves.clear()
        self.nbytes = 0

    def _walk(self, ids: Sequence[int]) -> list[tuple[Piece, int, int]]:
        """(piece, position it begins at, tokens of it that agree), from the beginning of the text on."""
        found, piece, at = [], self._root, 0
        now = next(self._clock)
        while at < len(ids) and (child := piece.children.get(ids[at])):
            count = agreeing(child.tokens, ids, at)
            child.used = now
            found.append((child, at, count))
            if count < len(child.tokens):
                break
            piece, at = child, at + count
        return found

    def _split(self, piece: Piece, count: int) -> Piece:
        """Cut a piece in two; the first part is returned, and holds no state."""
        first = Piece(piece.tokens[:count], cut(piece.rows, 0, count, copied=True), None, piece.parent, used=piece.used)
        assert piece.parent is not None
        piece.parent.children[first.tokens[0]] = first
        rest = cut(piece.rows, count, len(piece.tokens), copied=True)
        piece.tokens, piece.rows, piece.parent = piece.tokens[count:], rest, first
        first.children[piece.tokens[0]] = piece
        return first

    def _hang(self, piece: Piece, parent: Piece) -> None:
        parent.children[piece.tokens[0]] = piece
        self._leaves.discard(parent)
        self._leaves.add(piece)
        self.nbytes += piece.nbytes

    def _shrink(self) -> None:
        while self.nbytes > self.limit:
            oldest = min(self._leaves, key=lambda piece: piece.used)
            self.nbytes -= oldest.nbytes
            self._leaves.remove(oldest)
            parent = oldest.parent
            assert parent is not None
            del parent.children[oldest.tokens[0]]
            if parent is not self._root and not parent.children:
                self._leaves.add(parent)


def agreeing(tokens: Sequence[int], ids: Sequence[int], at: int) -> int:
    """How many of `tokens` stand in ids[at:], from its beginning on."""
    there = ids[at : at + len(tokens)]
    return next((i for i, (a, b) in enumerate(zip(tokens, there, strict=False)) if a != b), len(there))


def cut(rows: Rows, begin: int, end: int, *, copied: bool = False) -> Rows:
    parts = [[t[:, begin:end] for t in store] for store in rows]
    return [[t.clone() for t in store] for store in parts] if copied else parts
