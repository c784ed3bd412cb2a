"""`fairlead schema`: the configuration as a JSON Schema."""

import typer


def schema() -> None:
    """Print the JSON Schema (draft 2020-12) of the configuration, installed plugins included.

    \b
    Examples: completion and checks in an editor with the YAML language server:
      fairlead schema > fairlead.schema.json
      # yaml-language-server: $schema=fairlead.schema.json     (first line of the configuration)
    """
    import json

    from fairlead.config.json_schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
