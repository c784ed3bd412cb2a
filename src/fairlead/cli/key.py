"""`fairlead key`: an API key for a client, and the line for the gateway's file of keys."""

from typing import Annotated

import typer

from fairlead.cli.options import examples


@examples("""
\b
Examples: the key is for the client, the line for the file that gateway.keys names
  fairlead key team-a >> keys.txt
  fairlead key team-b --expires 2030-01-31 >> keys.txt
""")
def key(
    tenant: Annotated[str, typer.Argument(help="Whom the key names: letters, digits and . _ : @ / + -")],
    expires: Annotated[str, typer.Option(metavar="TIME", help="2030-01-31, or 2030-01-31T12:00:00Z; UTC.")] = "",
) -> None:
    """Make an API key. The key goes to stderr, this once, and the line for the file to stdout.

    The line holds the key's SHA-256, from which nobody can tell the key.
    """
    from fairlead.gateway.envoy.authentication import new_key

    text, kept = new_key(tenant, expires)
    typer.echo(f"the key, shown this once: {text}", err=True)
    typer.echo(kept.line)
