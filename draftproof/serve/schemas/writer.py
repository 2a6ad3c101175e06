"""JSON schemas as grammars in xgrammar's EBNF; what a grammar does not enforce is refused by name.

xgrammar reads JSON schemas itself, and drops what it does not know without a word (`not`, `if`, `allOf` of several,
lengths beside a pattern); strings with a length may then hold raw control characters, which is no JSON. So the grammar
is written here, keyword by keyword, and xgrammar only compiles and matches it.

Every text of the grammar is valid; not every valid text is in it: keys come in the order of the schema, and white space
is at most one space, or a line break and its indentation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from decimal import Decimal
from typing import Any

from draftproof.serve.schemas import ranges
from draftproof.serve.schemas.checks import check
from draftproof.serve.schemas.ebnf import (
    JSON,
    Alphabet,
    charset,
    literal,
    one_of,
    quote,
    refuse,
    regex,
    repeated,
    without,
)
from draftproof.serve.schemas.formats import FORMATS
from draftproof.serve.schemas.keywords import OPTIONS, Schema, fields, kinds_of, values
from draftproof.serve.schemas.patterns import pattern
from draftproof.serve.schemas.references import resolve
from draftproof.serve.schemas.rules import MOST_KEY_STATES, Rules


class Writer:
    """One schema, checked, as rules. strict: an object that declares properties has no others unless it says so.

    UserError bad-schema for what is no schema, what the grammar cannot enforce, and what no text satisfies.
    """

    def __init__(self, root: Schema, rules: Rules, *, strict: bool = True) -> None:
        check(root)
        self.root, self.rules, self.strict = root, rules, strict
        self._refs: dict[str, str] = {}  # a reference -> its rule
        self._left: list[str] = []  # those without a body so far
        self._values: dict[int, str] = {}  # a subschema's id -> its EBNF

    def write(self, schema: Any) -> str:
        """The rule of one subschema of the root, and of everything it refers to."""
        name = self.rules.name(self.value(schema))
        while self._left:
            ref = self._left.pop()
            self.rules.define(self._refs[ref], self.value(resolve(self.root, ref)))
        return name

    def value(self, schema: Any) -> str:
        """EBNF of one subschema. It is written once: written again wherever its rule is used, nesting doubles the work
        at every level."""
        if schema is True:
            return "any"
        if id(schema) not in self._values:
            self._values[id(schema)] = self._written(schema)
        return self._values[id(schema)]

    def _written(self, schema: Schema) -> str:
        if not (given := fields(schema)):
            return "any"
        if "$ref" in given:
            return self._reference(schema["$ref"])
        for word in OPTIONS:
            if word in given:
                return one_of([self.rules.name(self.value(s)) for s in schema[word]])
        if "enum" in given or "const" in given:
            return one_of([quote(self.literal(value)) for value in values(schema)])
        kinds: dict[str, Callable[[Schema], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": _number,
            "integer": _integer,
        }
        words = {"boolean": '("true" | "false")', "null": '"null"'}
        return one_of([words[kind] if kind in words else kinds[kind](schema) for kind in kinds_of(schema)])

    def literal(self, value: Any) -> str:
        """JSON of a value, in the one way that the grammar has for it."""
        text = json.dumps(value, ensure_ascii=False)
        if self.rules.alphabet is JSON:
            return text
        return "".join(self.rules.alphabet.escapes[0x3C] if c == "<" else c for c in text)

    def _reference(self, ref: str) -> str:
        if ref not in self._refs:
            self._refs[ref] = self.rules.reserve()
            self._left.append(ref)
        return self._refs[ref]

    def _string(self, schema: Schema) -> str:
        content = content_of(schema, self.rules.alphabet, self.rules)
        return "string" if content is None else f'"\\"" {content} "\\""'

    def _object(self, schema: Schema) -> str:
        """Properties in their order. From the last to the first: what may follow once something stands, and what may
        stand first."""
        properties = {**schema.get("properties", {})}
        required, extra = dict.fromkeys(schema.get("required", [])), self._additional(schema)
        for name in required:
            if name not in properties and extra is None:
                raise refuse(f"property {name!r} is required, and not allowed", "declare it")
            properties.setdefault(name, schema.get("additionalProperties", True))
        if not properties and extra == "any":
            return "object"
        pair = f'{self.rules.name(self._other_key(properties))} ":" ws {extra}' if extra else None
        rest = f'("," ws {pair})* ws' if pair else "ws"
        first = f"{pair} {rest}" if pair else None
        for name, sub in reversed(properties.items()):
            one = self.rules.name(f'{quote(self.literal(name))} ":" ws {self.rules.name(self.value(sub))}')
            after = self.rules.name(rest)
            here = f"{one} {after}"
            needed = name in required
            rest = f'"," ws {here}' if needed else f'"," ws {here} | {after}'
            first = here if needed or first is None else f"{here} | {self.rules.name(first)}"
        inner = f"({first})" + ("" if required else "?") if first else ""
        return self.rules.name(f'"{{" ws {inner} "}}"')

    def _additional(self, schema: Schema) -> str | None:
        """The rule of undeclared properties' values; None: there are none."""
        given = schema.get("additionalProperties", not (self.strict and "properties" in schema))
        if given is False:
            return None
        return "any" if given is True else self.rules.name(self.value(given))

    def _other_key(self, names: Collection[str]) -> str:
        """Keys that are none of `names`: without escapes, so that no key has a second spelling."""
        allowed = self.rules.alphabet.plain
        plain = [n for n in names if all(any(a <= ord(c) <= b for a, b in allowed) for c in n)]
        return f'"\\"" {regex(self._unlike(plain, self._depth(plain)))} "\\""' if names else "string"

    def _depth(self, words: list[str]) -> int:
        """How many characters of a key are compared with the words: all while they are few in the whole grammar."""
        depth = states = 1
        while more := len({w[:depth] for w in words if len(w) >= depth}):
            if self.rules.key_states + states + more > MOST_KEY_STATES:
                break
            depth, states = depth + 1, states + more
        self.rules.key_states += states
        return depth

    def _unlike(self, words: list[str], depth: int) -> str:
        """A regular expression for texts of plain characters that are none of the words, and begin with `depth`
        characters of none."""
        plain = list(self.rules.alphabet.plain)
        heads = sorted({w[0] for w in words if w})
        other = without(without(plain) + [(ord(h), ord(h)) for h in heads])
        parts = [f"{charset(other)}{charset(plain)}*"]
        for head in heads if depth > 1 else ():
            parts.append(literal(head) + self._unlike([w[1:] for w in words if w[:1] == head], depth - 1))
        return f"({'|'.join(parts)})" + ("" if "" in words else "?")

    def _array(self, schema: Schema) -> str:
        head = schema.get("prefixItems", [])
        items = schema.get("items", not (self.strict and "prefixItems" in schema))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if items is False:
            most = len(head) if most is None else min(most, len(head))
        if most is not None and least > most:
            raise refuse(f"an array of at least {least} and at most {most} items", "mend the bounds")
        shown = head[:most]
        tail = '""'
        if most is None or most > len(head):
            item = self.rules.name(self.value(items))
            left = None if most is None else most - len(head)
            shown, tail = [*head, items], repeated(f'"," ws {item}', max(0, least - len(head) - 1), left and left - 1)
        for at, sub in reversed(list(enumerate(shown))):
            item = self.rules.name(self.value(sub))
            tail = f"{item} {tail}" if at == 0 else f'"," ws {item} {tail}'
            tail = tail if at < least else f"({tail})?"
            tail = self.rules.name(tail)
        return self.rules.name(f'"[" ws {tail} ws "]"' if shown else '"[" ws "]"')


def content_of(schema: Schema, alphabet: Alphabet, rules: Rules) -> str | None:
    """What stands between a string's quotes; None: anything. With a length there are no escapes."""
    ecma = schema.get("pattern") or FORMATS.get(schema.get("format", ""))
    if ecma:
        return rules.automaton(*pattern(ecma, alphabet))
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if most is not None and least > most:
        raise refuse(f"a text of at least {least} and at most {most} characters", "mend the bounds")
    if not least and most is None:
        return None
    return repeated(alphabet.counted, least, most)


def _integer(schema: Schema) -> str:
    low, high, low_open, high_open = _bounds(schema)
    if low is None and high is None:
        return "integer"
    least = None if low is None else math.floor(low) + 1 if low_open else math.ceil(low)
    most = None if high is None else math.ceil(high) - 1 if high_open else math.floor(high)
    return ranges.whole(least, most)


def _number(schema: Schema) -> str:
    low, high, low_open, high_open = _bounds(schema)
    return "number" if low is None and high is None else ranges.decimal(low, high, low_open, high_open)


def _bounds(schema: Schema) -> tuple[Decimal | None, Decimal | None, bool, bool]:
    """Lower and upper bound, and whether they are outside themselves; the stricter where two are given."""

    def end(inside: str, outside: str, sign: int) -> tuple[Decimal | None, bool]:
        given = [(sign * Decimal(str(schema[word])), word == outside) for word in (inside, outside) if word in schema]
        return (sign * max(given)[0], max(given)[1]) if given else (None, False)

    low, low_open = end("minimum", "exclusiveMinimum", 1)
    high, high_open = end("maximum", "exclusiveMaximum", -1)
    return low, high, low_open, high_open
