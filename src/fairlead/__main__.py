"""`python -m fairlead`."""

from fairlead.cli.main import main

if __name__ == "__main__":
    main()
