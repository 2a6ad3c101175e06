"""The keywords of JSON schema that a grammar enforces, and what a schema says by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

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
OPTIONS = ("anyOf", "oneOf", "allOf")
ALONE = ("$ref", *OPTIONS)  # nothing stands beside them but annotations
KNOWN = frozenset({"type", "enum", "const", *ALONE}).union(*BY_KIND.values())
SUBSCHEMAS = ("items", "additionalProperties")
LISTS = (*OPTIONS, "prefixItems")
COUNTS = ("minItems", "maxItems", "minLength", "maxLength")


def fields(schema: Schema) -> set[str]:
    """Keywords that say something about the value."""
    return {word for word in schema if word not in ANNOTATIONS}


def kinds_of(schema: Schema) -> list[str]:
    """The JSON types a schema allows; without `type`, those that its keywords are about."""
    given = schema.get("type")
    if given is not None:
        kinds = list(dict.fromkeys([given] if isinstance(given, str) else given))
        return [k for k in kinds if not (k == "integer" and "number" in kinds)]
    said = fields(schema)
    return [k for k, words in BY_KIND.items() if words & said and k != "integer"]


def values(schema: Schema) -> list[Any]:
    """What `enum` or `const` allows, of the types that `type` allows."""
    given = [schema["const"]] if "const" in schema else list(schema["enum"])
    kinds = kinds_of(schema)
    return [v for v in given if not kinds or any(is_of(v, kind) for kind in kinds)]


def is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    types: dict[str, tuple[type, ...]] = {"object": (dict,), "array": (list,), "string": (str,), "number": (int, float)}
    return isinstance(value, types.get(kind, (type(None),)))


def parts_of(schema: Any) -> Iterator[tuple[str, Any]]:
    """(keyword, subschema) of the direct subschemas."""
    if not isinstance(schema, Mapping):
        return
    for sub in schema.get("properties", {}).values():
        yield "properties", sub
    for word in SUBSCHEMAS:
        if isinstance(schema.get(word), Mapping):
            yield word, schema[word]
    for word in LISTS:
        for sub in schema.get(word, []):
            yield word, sub
