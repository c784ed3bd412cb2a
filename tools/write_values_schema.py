"""Writes what is generated in charts/fairlead/values.schema.json: `python tools/write_values_schema.py`.

What `config` may say is the schema of `fairlead config schema`, without plugins of other distributions. The
descriptions of values are their comments in values.yaml. The rest is written by hand, in the file itself. A test
compares the file with what would be written.
"""

import json
import re
from pathlib import Path
from typing import Any

from fairlead.compat.json_schema import json_schema
from fairlead.config.registry import Registry

CHART = Path(__file__).parents[1] / "charts" / "fairlead"
SCHEMA = CHART / "values.schema.json"
#: Longest line in which an object is kept together.
WIDTH = 160
Schema = dict[str, Any]


def main() -> None:
    SCHEMA.write_text(written(), encoding="utf-8")


def written() -> str:
    """The whole file, from what it says now."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    made = json_schema(Registry(list))
    properties = made["$defs"]["Fairlead"]["properties"]
    custom = properties["inferenceExtension"]["properties"]["pluginsCustomConfig"]
    configuration = {key: made[key] for key in ("type", "if", "then", "else")}
    schema |= {"$schema": made["$schema"], "$defs": {**made["$defs"], "configuration": configuration}}
    extension = schema["properties"]["inferenceExtension"]["properties"]
    # Beside its fields: files by name, one of which pluginsConfigFile chooses.
    extension["pluginsCustomConfig"] = {**custom, "additionalProperties": {"type": "string"}}
    for place in (schema["properties"], extension["kvcacheIndexer"]["properties"]):
        place["config"] = {"$ref": "#/$defs/configuration"}
    describe(schema, (), comments((CHART / "values.yaml").read_text(encoding="utf-8")))
    definitions = schema.pop("$defs")
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(one)}" for name, one in definitions.items())
    return shown(schema).removesuffix("\n}") + f',\n  "$defs": {{\n{lines}\n  }}\n}}\n'


def describe(schema: Schema, path: tuple[str, ...], texts: dict[tuple[str, ...], str]) -> None:
    """Give every property the comment of its value, and no other description."""
    for key, described in schema.get("properties", {}).items():
        described.pop("description", None)
        if (*path, key) in texts:
            described["description"] = texts[*path, key]
        describe(described, (*path, key), texts)


def comments(text: str) -> dict[tuple[str, ...], str]:
    """Path of a value → the comment above it."""
    found: dict[tuple[str, ...], str] = {}
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"( *)# ?(.*)", line):
            comment.append(match[2])
            continue
        if match := re.match(r"( *)(\w+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if comment:
                found[tuple(path)] = " ".join(comment)
        comment = []
    return found


def shown(node: Any, indent: str = "") -> str:
    """JSON with everything on one line that fits one."""
    line = json.dumps(node, ensure_ascii=False)
    if not isinstance(node, dict | list) or len(indent) + len(line) <= WIDTH:
        return line
    inner = indent + "  "
    if isinstance(node, list):
        return "[\n" + ",\n".join(inner + shown(one, inner) for one in node) + f"\n{indent}]"
    pairs = (f"{inner}{json.dumps(key)}: {shown(value, inner)}" for key, value in node.items())
    return "{\n" + ",\n".join(pairs) + f"\n{indent}}}"


if __name__ == "__main__":
    main()
