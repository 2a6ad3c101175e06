"""Is this a JSON schema that a grammar can enforce? What is not is refused with the keyword's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from draftproof.serve.schemas.ebnf import MOST_REPEATS, refuse
from draftproof.serve.schemas.formats import FORMATS
from draftproof.serve.schemas.keywords import (
    ALONE,
    BY_KIND,
    COUNTS,
    KNOWN,
    LISTS,
    SUBSCHEMAS,
    Schema,
    fields,
    is_of,
    kinds_of,
    parts_of,
    values,
)
from draftproof.serve.schemas.references import MOST_REFERENCES, followed, must_end, resolve

MOST_BYTES = 64 * 1024  # of a schema's JSON: what can be compiled in seconds
DEEPEST = 64  # objects and arrays of the schema's JSON in each other
LONGEST_KEY = 200
MOST_TAGS = 64  # values of a property that tells alternatives of oneOf apart
# In the whole schema: what compiles in seconds.
MOST = {"properties": 256, "alternatives of anyOf and oneOf": 96, "references": MOST_REFERENCES}


def check(root: Any) -> None:
    """All subschemas that the root leads to. UserError bad-schema."""
    if not isinstance(root, Mapping):
        raise refuse(f"a schema must be a JSON object, not {type(root).__name__}", "give an object")
    _depth(root)
    try:
        size = len(json.dumps(root, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError) as error:  # also a lone surrogate, which no text can hold
        raise refuse(f"the schema is no JSON: {str(error)[:100]}", "send JSON") from error
    if size > MOST_BYTES:
        raise refuse(f"the schema has {size:,} bytes; {MOST_BYTES:,} is the most", "make it smaller")
    seen, refs = reached(root)
    must_end(seen, refs)
    for schema in seen:
        if "oneOf" in schema and not _disjoint(root, schema["oneOf"]):
            raise refuse("'oneOf' whose alternatives may overlap cannot be enforced", "use anyOf")


def _depth(root: Any) -> None:
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise refuse(f"the schema nests deeper than {DEEPEST}", "flatten it, or use $ref to repeat a part")
        inner = [list(v.values()) if isinstance(v, Mapping) else v for v in level if isinstance(v, (Mapping, list))]
        level = [v for values in inner for v in values if isinstance(v, (Mapping, list))]


def reached(root: Schema) -> tuple[list[Schema], dict[str, Any]]:
    """The subschemas that count, each checked, once, and every reference -> its schema."""
    seen: list[Schema] = []
    known: set[int] = set()  # references may lead to one schema in many ways
    refs: dict[str, Any] = {}
    left: list[Any] = [root]
    properties = alternatives = 0
    while left:
        schema = left.pop()
        if id(schema) in known:
            continue
        known.add(id(schema))
        _one(schema)
        if not isinstance(schema, Mapping):
            continue
        seen.append(schema)
        left += [sub for _, sub in parts_of(schema)]
        if (ref := schema.get("$ref")) is not None and ref not in refs:
            refs[ref] = resolve(root, ref)
            left.append(refs[ref])
        properties += len(schema.get("properties", ()))
        alternatives += sum(len(schema.get(word, ())) for word in ("anyOf", "oneOf"))
        counts = (properties, alternatives, len(refs))
        if any(n > most for n, most in zip(counts, MOST.values(), strict=True)):
            raise refuse(
                f"the schema has more than {', '.join(f'{n} {what}' for what, n in MOST.items())}", "make it smaller"
            )
    return seen, refs


def _one(schema: Any) -> None:
    """The keywords of one subschema, and the forms of what they say."""
    if schema is False:
        raise refuse("the schema `false` allows nothing", "leave the property out")
    if schema is True:
        return
    if not isinstance(schema, Mapping):
        raise refuse(f"a schema must be an object or true, not {str(schema)[:40]!r}", "mend it")
    words = fields(schema)
    for word in sorted(words - KNOWN):
        if not (word == "uniqueItems" and schema[word] is False):
            raise refuse(f"the keyword {word[:60]!r} cannot be enforced")
    _types(schema)
    kinds = kinds_of(schema)
    for word in ALONE:
        if word in words and (others := words - {word}):
            raise refuse(f"{sorted(others)[0]!r} beside {word!r} cannot be enforced", f"move it into {word}")
    fixed = words & {"enum", "const"}
    others = words - {"type", "uniqueItems", *ALONE, *fixed}
    if fixed and (others or len(fixed) == 2):
        one, other = [*sorted(others), "const"][0], "enum" if "enum" in fixed else "const"
        raise refuse(f"{one!r} beside {other!r} cannot be enforced", "keep one of them")
    if "type" not in words and len([k for k in kinds if k != "integer"]) > 1:
        raise refuse(f"keywords of several types without `type`: {', '.join(sorted(others))}", "give the type")
    for word in sorted(others):
        if not any(word in BY_KIND[kind] for kind in kinds):
            raise refuse(f"the keyword {word!r} means nothing for type {', '.join(kinds)}")
    _forms(schema)
    if fixed and not values(schema):
        raise refuse("no value of `enum` or `const` has the `type`", "mend the type")


def _types(schema: Schema) -> None:
    given = schema.get("type")
    names = given if isinstance(given, list) else [] if given is None else [given]
    if "type" in schema and (not names or not all(isinstance(n, str) and n in BY_KIND for n in names)):
        raise refuse(f"the type {str(given)[:60]!r} is none of {', '.join(BY_KIND)}", "mend the type")


def _forms(schema: Schema) -> None:
    """Values of keywords have the right JSON types and stay below the limits."""

    def need(word: str, ok: bool, what: str) -> None:
        if word in schema and not ok:
            raise refuse(f"{word!r} must be {what}, it is {str(schema[word])[:60]!r}", "mend it")

    properties, required = schema.get("properties", {}), schema.get("required", [])
    need("properties", isinstance(properties, Mapping), "an object")
    need("required", isinstance(required, list) and all(isinstance(n, str) for n in required), "a list of names")
    for name in [*properties, *required]:
        if len(name) > LONGEST_KEY:
            raise refuse(f"a property's name has {len(name)} characters; {LONGEST_KEY} is the most")
    for word in COUNTS:
        n = schema.get(word)
        need(word, type(n) is int and 0 <= n <= MOST_REPEATS, f"a whole number, at most {MOST_REPEATS:,}")
    for word in BY_KIND["number"]:
        need(word, type(schema.get(word)) in (int, float), "a number")
    for word in LISTS:
        need(word, isinstance(schema.get(word), list) and bool(schema[word] or word == "prefixItems"), "a list")
    need("allOf", len(schema.get("allOf", ())) == 1, "a list of one schema: more cannot be enforced together")
    for word in SUBSCHEMAS:
        need(word, isinstance(schema.get(word), (bool, Mapping)), "a schema")
    need("$ref", isinstance(schema.get("$ref"), str), "a text")
    need("pattern", isinstance(schema.get("pattern"), str), "a regular expression")
    need("enum", isinstance(schema.get("enum"), list) and bool(schema["enum"]), "a list that is not empty")
    need("format", schema.get("format") in FORMATS, f"one of {', '.join(sorted(FORMATS))}")
    shapes = [w for w in ("pattern", "format") if w in schema]
    if len(shapes) == 2 or (shapes and {"minLength", "maxLength"} & schema.keys()):
        raise refuse(f"{shapes[0]!r} beside another rule of the text cannot be enforced", "say both in one pattern")


def _disjoint(root: Schema, options: list[Any]) -> bool:
    """Do the alternatives differ in type, or in the constant of one required property?"""
    options = [followed(root, o) for o in options]
    if any(not isinstance(o, Mapping) for o in options) or len({id(o) for o in options}) < len(options):
        return False
    kinds = [set(_types_of(o)) for o in options]
    pairs = [(i, j) for j in range(len(options)) for i in range(j)]
    apart = [bool(kinds[i] and kinds[j]) and not _overlap(kinds[i], kinds[j]) for i, j in pairs]
    return all(ok or _tagged(root, options[i], options[j]) for ok, (i, j) in zip(apart, pairs, strict=True))


def _types_of(schema: Schema) -> list[str]:
    """Types that hold even where `type` is absent and keywords say nothing about other types."""
    if "type" in schema:
        return kinds_of(schema)
    given = values(schema) if {"enum", "const"} & schema.keys() else []
    samples = {(type(v), is_of(v, "integer")): v for v in given}.values()  # one of each: there may be thousands
    return [k for k in BY_KIND if any(is_of(v, k) for v in samples)]


def _overlap(one: set[str], other: set[str]) -> bool:
    numbers = {"integer", "number"}
    return bool(one & other) or bool(one & numbers and other & numbers)


def _tagged(root: Schema, one: Schema, other: Schema) -> bool:
    shared = set(one.get("required", [])) & set(other.get("required", []))
    return any(
        (a := _fixed(root, one, name)) and (b := _fixed(root, other, name)) and a.isdisjoint(b) for name in shared
    )


def _fixed(root: Schema, schema: Schema, name: str) -> set[Any]:
    """The few plain values that a property may have; none where it may have others."""
    sub = followed(root, schema.get("properties", {}).get(name))
    few = isinstance(sub, Mapping) and ("const" in sub or len(sub.get("enum", ())) in range(1, MOST_TAGS + 1))
    given = values(sub) if few else []
    return set() if any(isinstance(v, (dict, list)) for v in given) else set(given)
