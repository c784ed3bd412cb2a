"""The command `fairlead`, and `python -m fairlead`. Imports nothing before it handles Ctrl-C."""

import sys


def main() -> None:
    try:
        from fairlead.cli.main import main as run

        run()
    except KeyboardInterrupt:  # while modules are imported; later `run` handles it
        sys.exit(130)


if __name__ == "__main__":
    main()
