"""The base of all request models: nothing by guess, nothing converted, nothing accepted and ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from draftproof.serve.errors import FieldError

# Of a long list one wrong item is enough: a complaint takes a hundred times an item's memory, and each form of a union
# has complaints of its own.
FIRST = Field(fail_fast=True)


class Strict(BaseModel):
    """Unknown fields are refused, types are not converted, and a null counts as absent.

    refused: fields of the protocol that are not done here, each with a hint; their null is as good as their absence.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, sent: Any) -> Any:
        if not isinstance(sent, dict):
            return sent
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in sent.keys() & cls.refused.keys() - known:
            if sent[name] is not None:
                raise FieldError(name, f"{name} is not supported: {cls.refused[name]}", "unsupported_parameter")
        unknown = [k for k in sent if k not in known and k not in cls.refused]
        dropped = set(unknown[1:])  # one of them is enough to be refused: a complaint takes much more than a name
        return {k: v for k, v in sent.items() if k not in dropped and (v is not None or k in unknown)}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Says of the nulls what `_drop_nulls` does."""
        made = handler(core)
        told = handler.resolve_ref_schema(made)
        fields, needed = told.get("properties", {}), told.get("required", [])
        for name in fields.keys() - set(needed):
            fields[name] = {"anyOf": [fields[name], {"type": "null"}]}
        told["properties"] = fields | {n: {"type": "null"} for n in cls.refused if n not in fields}
        return made
