"""References of a JSON schema: where they lead, and that what they lead to ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from draftproof.serve.schemas.ebnf import refuse
from draftproof.serve.schemas.keywords import Schema, parts_of

MOST_REFERENCES = 256  # different ones


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


def followed(root: Schema, schema: Any) -> Any:
    """A schema, or the one that its reference leads to."""
    for _ in range(MOST_REFERENCES + 1):
        if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
            break
        schema = resolve(root, schema["$ref"])
    return schema


def must_end(refs: Mapping[str, Any]) -> None:
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
