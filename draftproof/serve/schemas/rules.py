"""The rules of one grammar, in xgrammar's EBNF."""

from __future__ import annotations

from draftproof.serve.schemas import ranges
from draftproof.serve.schemas.ebnf import JSON, Alphabet, characters, refuse, regex

_HEX = "[0-9A-Fa-f]"
_SURROGATES = f'[Dd] [89ABab] {_HEX} {_HEX} "\\\\u" [Dd] [C-Fc-f] {_HEX} {_HEX}'
# A string is a rule that ends by itself: so a token may hold a string's end and what follows, and is found fast.
_BASE = f"""
ws ::= "" | " " | "\\n" [ \\t]{{0,20}}
string ::= "\\"" rest
rest ::= "\\"" | PLAIN rest | "\\\\" escape rest
escape ::= ["\\\\/bfnrt] | "u" ([0-9A-CEFa-cef] {_HEX} {_HEX} {_HEX} | [Dd] [0-7] {_HEX} {_HEX} | {_SURROGATES})
integer ::= {ranges.INTEGER}
number ::= {ranges.NUMBER}
any ::= object | array | string | number | "true" | "false" | "null"
object ::= "{{" ws (string ":" ws any ("," ws string ":" ws any)* ws)? "}}"
array ::= "[" ws (any ("," ws any)* ws)? "]"
"""


MOST_RULES = 1_000_000  # characters of a grammar: what compiles within seconds
MOST_STATES = 1024  # cost of all regular expressions of a grammar
MOST_KEY_STATES = 512  # of keys that none of an object's properties has: a hundredth of a second each


class Rules:
    """The rules of one grammar: JSON without a schema, and what is added; the same rule is not added twice."""

    def __init__(self, alphabet: Alphabet = JSON) -> None:
        self.alphabet = alphabet
        self._text = [_BASE.replace("PLAIN", characters(alphabet.plain))]
        self._names: dict[str, str] = {}  # body -> rule
        self._reserved = self._states = self._size = 0
        self.key_states = 0  # written so far

    def name(self, body: str) -> str:
        """The rule with this body."""
        if body not in self._names:
            self._names[body] = self.reserve()
            self.define(self._names[body], body)
        return self._names[body]

    def reserve(self) -> str:
        """A name whose body `define` will give."""
        self._reserved += 1
        return f"r{self._reserved}"

    def define(self, name: str, body: str) -> None:
        """UserError bad-schema when all rules are too long: whoever writes them ends here at the latest."""
        self._size += len(body)
        if self._size > MOST_RULES:
            raise refuse(f"the schema needs a grammar of more than {MOST_RULES:,} characters", "make it smaller")
        self._text.append(f"{name} ::= {body}\n")

    def once(self, name: str, body: str) -> None:
        if body not in self._names:
            self._names[body] = name
            self.define(name, body)

    def automaton(self, expression: str, size: int) -> str:
        """The rule of a regular expression of that cost. UserError bad-schema when all of them cost too much."""
        body = regex(expression)
        self._states += 0 if body in self._names else size
        if self._states > MOST_STATES:
            raise refuse("the patterns and formats of the schema need too many states", "use fewer, or simpler ones")
        return self.name(body)

    def grammar(self, root: str) -> str:
        return f"root ::= {root}\n{''.join(self._text)}"
