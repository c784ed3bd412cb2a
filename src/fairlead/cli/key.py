"""`fairlead key`: an API key for a client, and the line for the gateway's file of keys."""

from typing import Annotated

import typer

from fairlead.cli.options import examples


@examples("""
\b
Examples:
  fairlead key team-a >> keys.txt
  fairlead key team-b --expires 2030-01-31 >> keys.txt
""")
def key(
    tenant: Annotated[str, typer.Argument(help="Who gets the key: letters, digits and . _ : @ / + -")],
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="2030-01-31, or 2030-01-31T12:00:00Z; UTC.")
    ] = None,
) -> None:
    """Create an API key for a client of the embedded gateway.

    The key goes to stderr, once. The line for the file of keys goes to stdout; it holds only the key's SHA-256.
    """
    from fairlead.gateway.envoy.authentication import new_key

    text, kept = new_key(tenant, expires)
    typer.echo(f"the key, shown this once: {text}", err=True)
    typer.echo(kept.line)
