"""The JSON Schema of a run's lines, derived from the dataclasses that write them, so that other programs can read runs.

``python -m shardproof.harness.records.json_schema`` prints it; the published copy is docs/schema/run-VERSION.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from shardproof.harness.records.record import SCHEMA_VERSION, Footer, Header, Record

_PLAIN: Mapping[object, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    # JSON has no NaN and no infinity: a float that is not finite is one of three strings.
    float: {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]},
}


# Any, from here on: type hints as values, and JSON, have no narrower type.
def run_schema() -> dict[str, Any]:
    """Return the schema of one line: a record of records.jsonl, or the header or the footer of run.jsonl."""
    definitions: dict[str, Any] = {}
    for type_, kind in ((Record, None), (Header, "header"), (Footer, "footer")):
        _define(type_, definitions, kind=kind)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A line of a run of Shardproof, schema {SCHEMA_VERSION}",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in ("Record", "Header", "Footer")],
        "$defs": dict(sorted(definitions.items())),
    }


def _define(type_: type, definitions: dict[str, Any], *, kind: str | None = None) -> None:
    if type_.__name__ in definitions:
        return
    definitions[type_.__name__] = {}  # ends the recursion for a type that contains itself
    hints = get_type_hints(type_)
    properties = {field.name: _schema(hints[field.name], definitions) for field in fields(type_)}
    if "schema" in properties:
        properties["schema"] = {"const": SCHEMA_VERSION}
    if kind is not None:
        properties = {"kind": {"const": kind}} | properties
    description = " ".join((type_.__doc__ or "").split("\n\n")[0].split())
    definitions[type_.__name__] = {
        "description": description,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {UnionType, Union}:  # the only union in the schema is with None
        return {"anyOf": [_schema(arguments[0], definitions), {"type": "null"}]}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if isinstance(hint, type) and is_dataclass(hint):
        _define(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [str(member.value) for member in hint]}
    return _PLAIN[hint]


if __name__ == "__main__":
    print(json.dumps(run_schema(), indent=2))
