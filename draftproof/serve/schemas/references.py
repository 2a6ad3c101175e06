"""References of a JSON schema: where they lead, and that what they lead to ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from draftproof.serve.schemas.ebnf import refuse
from draftproof.serve.schemas.keywords import OPTIONS, Schema

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


def must_end(seen: Sequence[Schema], refs: Mapping[str, Any]) -> None:
    """Every reference leads to a value that ends, and to no reference that leads back to it before any text.
    seen: every subschema, and what `refs` lead to."""
    ending = _settled({id(schema): _for_an_end(schema, refs) for schema in seen})
    straight = _settled({id(schema): _all(_ahead(schema, refs)) for schema in seen})
    for ref, schema in refs.items():
        if isinstance(schema, Mapping) and not (id(schema) in ending and id(schema) in straight):
            raise refuse(
                f"$ref {ref[:80]!r} leads back to itself without an end", "make the property optional, or nullable"
            )


Needs = tuple[int, list[int]]  # how many of these schemas, by id, must be settled before another is


def _settled(needs: Mapping[int, Needs]) -> set[int]:
    """What is settled in the end. Each need is looked at once: schemas may refer to each other in long chains."""
    left = {schema: count for schema, (count, _) in needs.items()}
    users: dict[int, list[int]] = {schema: [] for schema in needs}
    for schema, (_, needed) in needs.items():
        for other in needed:
            users[other].append(schema)
    done = [schema for schema, count in left.items() if not count]
    for schema in done:  # it grows
        for user in users[schema]:
            left[user] -= 1
            if not left[user]:
                done.append(user)
    return set(done)


def _all(schemas: Sequence[Any]) -> Needs:
    needed = [id(schema) for schema in schemas if isinstance(schema, Mapping)]
    return len(needed), needed


def _for_an_end(schema: Schema, refs: Mapping[str, Any]) -> Needs:
    if "$ref" in schema:
        return _all([refs[schema["$ref"]]])
    for word in OPTIONS:
        if word in schema:
            count, options = _all(schema[word])
            return int(count == len(schema[word])), options  # one is enough, and `true` is one
    properties = schema.get("properties", {})
    needed = [properties.get(name, schema.get("additionalProperties")) for name in schema.get("required", [])]
    least = schema.get("minItems", 0)
    needed += schema.get("prefixItems", [])[:least]
    needed += [schema.get("items")] if least > len(schema.get("prefixItems", [])) else []
    return _all(needed)


def _ahead(schema: Schema, refs: Mapping[str, Any]) -> list[Any]:
    """Schemas whose values a value of this one may be."""
    return [refs[schema["$ref"]]] if "$ref" in schema else [sub for word in OPTIONS for sub in schema.get(word, [])]
