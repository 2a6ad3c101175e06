"""Is this a JSON schema that a grammar can enforce? What is not is refused with the keyword's name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from draftproof.serve.formats import FORMATS
from draftproof.serve.patterns import MOST_REPEATS, refuse

Schema = Mapping[str, Any]

MOST_BYTES = 64 * 1024  # of a schema's JSON: what can be compiled in seconds
DEEPEST = 64  # objects and arrays of the schema's JSON in each other
LONGEST_KEY = 200

ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
    "$defs", "definitions",
})  # fmt: skip
BY_KIND: dict[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
ALONE = ("$ref", "anyOf", "oneOf", "allOf")  # nothing stands beside them but annotations
_KNOWN = frozenset({"type", "enum", "const", *ALONE}).union(*BY_KIND.values())
_SUBSCHEMAS = ("items", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")


def fields(schema: Schema) -> set[str]:
    """Keywords that say something about the value."""
    return {word for word in schema if word not in ANNOTATIONS}


def kinds_of(schema: Schema) -> list[str]:
    """The JSON types a schema allows; without `type`, those that its keywords are about."""
    given = schema.get("type")
    if given is not None:
        kinds = list(dict.fromkeys([given] if isinstance(given, str) else given))
        return [k for k in kinds if not (k == "integer" and "number" in kinds)]
    return [k for k, words in BY_KIND.items() if words & fields(schema) and k != "integer"]


def values(schema: Schema) -> list[Any]:
    """What `enum` or `const` allows, of the types that `type` allows."""
    given = [schema["const"]] if "const" in schema else list(schema["enum"])
    kinds = kinds_of(schema)
    return [v for v in given if not kinds or any(_is(v, kind) for kind in kinds)]


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    types: dict[str, tuple[type, ...]] = {"object": (dict,), "array": (list,), "string": (str,), "number": (int, float)}
    return isinstance(value, types.get(kind, (type(None),)))


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
    _ends(root, reached(root))


def _depth(root: Any) -> None:
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise refuse(f"the schema nests deeper than {DEEPEST}", "flatten it, or use $ref to repeat a part")
        inner = [list(v.values()) if isinstance(v, Mapping) else v for v in level if isinstance(v, (Mapping, list))]
        level = [v for values in inner for v in values if isinstance(v, (Mapping, list))]


def resolve(root: Schema, ref: str) -> Any:
    """The part of the schema that a reference names. UserError bad-schema."""
    if ref != "#" and not ref.startswith("#/"):
        raise refuse(f"$ref {ref[:80]!r} points outside the schema", "use #/$defs/NAME")
    at: Any = root
    for part in ref[2:].split("/") if ref != "#" else []:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and key.isascii() and key.isdigit() and int(key) < len(at):
            at = at[int(key)]
        elif isinstance(at, Mapping) and key in at:
            at = at[key]
        else:
            raise refuse(f"$ref {ref[:80]!r} points to nothing", "define it under $defs")
    return at


def reached(root: Schema) -> dict[str, Any]:
    """Every reference that counts -> its schema; all subschemas on the way are checked."""
    refs: dict[str, Any] = {}
    left: list[Any] = [root]
    while left:
        schema = left.pop()
        _one(root, schema)
        for _, sub in parts_of(schema):
            left.append(sub)
        if isinstance(schema, Mapping) and "$ref" in schema and schema["$ref"] not in refs:
            refs[schema["$ref"]] = resolve(root, schema["$ref"])
            left.append(refs[schema["$ref"]])
    return refs


def parts_of(schema: Any) -> Iterator[tuple[str, Any]]:
    """(keyword, subschema) of the direct subschemas."""
    if not isinstance(schema, Mapping):
        return
    for sub in schema.get("properties", {}).values():
        yield "properties", sub
    for word in _SUBSCHEMAS:
        if isinstance(schema.get(word), Mapping):
            yield word, schema[word]
    for word in _LISTS:
        for sub in schema.get(word, []):
            yield word, sub


def _one(root: Schema, schema: Any) -> None:
    """The keywords of one subschema, and the forms of what they say."""
    if schema is False:
        raise refuse("the schema `false` allows nothing", "leave the property out")
    if schema is True:
        return
    if not isinstance(schema, Mapping):
        raise refuse(f"a schema must be an object or true, not {str(schema)[:40]!r}", "mend it")
    words = fields(schema)
    for word in sorted(words - _KNOWN):
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
        raise refuse(
            f"{sorted(others | fixed)[0]!r} beside {sorted(fixed)[-1]!r} cannot be enforced", "keep one of them"
        )
    if "type" not in words and len([k for k in kinds if k != "integer"]) > 1:
        raise refuse(f"keywords of several types without `type`: {', '.join(sorted(others))}", "give the type")
    for word in sorted(others):
        if not any(word in BY_KIND[kind] for kind in kinds):
            raise refuse(f"the keyword {word!r} means nothing for type {', '.join(kinds)}")
    _forms(schema)
    if fixed and not values(schema):
        raise refuse("no value of `enum` or `const` has the `type`", "mend the type")
    if "oneOf" in schema and not _disjoint(root, schema["oneOf"]):
        raise refuse("'oneOf' whose alternatives may overlap cannot be enforced", "use anyOf")


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
    for word in _COUNTS:
        n = schema.get(word)
        need(word, type(n) is int and 0 <= n <= MOST_REPEATS, f"a whole number, at most {MOST_REPEATS:,}")
    for word in BY_KIND["number"]:
        need(word, type(schema.get(word)) in (int, float), "a number")
    for word in _LISTS:
        need(word, isinstance(schema.get(word), list) and bool(schema[word] or word == "prefixItems"), "a list")
    need("allOf", len(schema.get("allOf", ())) == 1, "a list of one schema: more cannot be enforced together")
    for word in _SUBSCHEMAS:
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
    if any(not isinstance(o, Mapping) for o in options):
        return False
    kinds = [set(_types_of(o)) for o in options]
    pairs = [(i, j) for j in range(len(options)) for i in range(j)]
    apart = [bool(kinds[i] and kinds[j]) and not _overlap(kinds[i], kinds[j]) for i, j in pairs]
    return all(ok or _tagged(root, options[i], options[j]) for ok, (i, j) in zip(apart, pairs, strict=True))


def _types_of(schema: Schema) -> list[str]:
    """Types that hold even where `type` is absent and keywords say nothing about other types."""
    if "type" in schema:
        return kinds_of(schema)
    return [k for k in BY_KIND if any(_is(v, k) for v in values(schema))] if {"enum", "const"} & schema.keys() else []


def _overlap(one: set[str], other: set[str]) -> bool:
    numbers = {"integer", "number"}
    return bool(one & other) or bool(one & numbers and other & numbers)


def _tagged(root: Schema, one: Schema, other: Schema) -> bool:
    shared = set(one.get("required", [])) & set(other.get("required", []))
    return any(
        (a := _fixed(root, one, name)) and (b := _fixed(root, other, name)) and not any(x == y for x in a for y in b)
        for name in shared
    )


def _fixed(root: Schema, schema: Schema, name: str) -> list[Any]:
    sub = followed(root, schema.get("properties", {}).get(name))
    return values(sub) if isinstance(sub, Mapping) and {"enum", "const"} & sub.keys() else []


def followed(root: Schema, schema: Any) -> Any:
    """A schema, or the one that its reference leads to."""
    for _ in range(DEEPEST):
        if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
            break
        schema = resolve(root, schema["$ref"])
    return schema


def _ends(root: Schema, refs: Mapping[str, Any]) -> None:
    """Every reference leads to a value that ends, and to no reference that leads back to it before any text."""
    ending: set[str] = set()
    while new := {ref for ref, schema in refs.items() if ref not in ending and _finite(schema, ending)}:
        ending |= new
    straight: set[str] = set()
    while new := {ref for ref, schema in refs.items() if ref not in straight and _ahead(schema) <= straight}:
        straight |= new
    for ref in refs:
        if ref not in ending or ref not in straight:
            raise refuse(
                f"$ref {ref[:80]!r} leads back to itself without an end", "make the property optional, or nullable"
            )


def _finite(schema: Any, ending: set[str]) -> bool:
    if not isinstance(schema, Mapping):
        return True
    if "$ref" in schema:
        return schema["$ref"] in ending
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return any(_finite(sub, ending) for sub in schema[word])
    properties = schema.get("properties", {})
    needed = [properties.get(name, schema.get("additionalProperties")) for name in schema.get("required", [])]
    least = schema.get("minItems", 0)
    needed += schema.get("prefixItems", [])[:least]
    needed += [schema.get("items")] if least > len(schema.get("prefixItems", [])) else []
    return all(_finite(sub, ending) for sub in needed)


def _ahead(schema: Any) -> set[str]:
    """References that a value of the schema may begin with."""
    if not isinstance(schema, Mapping):
        return set()
    inner = [sub for word, sub in parts_of(schema) if word in ("anyOf", "oneOf", "allOf")]
    return ({schema["$ref"]} if "$ref" in schema else set()).union(*(_ahead(sub) for sub in inner))
