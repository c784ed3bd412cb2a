"""The forms of Envoy's configuration that all its parts have in common."""

from typing import Any

Json = dict[str, Any]


def typed(kind: str, **content: Any) -> Json:
    """A message that names its type, without the prefix of all types."""
    return {"@type": f"type.googleapis.com/{kind}", **content}


def extension(name: str, kind: str, /, **content: Any) -> Json:
    """An extension, e.g. a filter. `kind`: the type of its configuration below `envoy.extensions`."""
    return {"name": name, "typed_config": typed(f"envoy.extensions.{kind}", **content)}


def lua(name: str, source: str) -> Json:
    """A filter that runs a script."""
    return extension(name, "filters.http.lua.v3.Lua", default_source_code={"inline_string": source})


def from_file(path: str, **more: Any) -> Json:
    """The source of a part that Envoy reads from a file, which it follows."""
    return {"path_config_source": {"path": path, **more}, "resource_api_version": "V3"}
