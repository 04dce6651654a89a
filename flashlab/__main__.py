"""Makes `python -m flashlab` the same as the `flashlab` command."""

from flashlab.cli import main

if __name__ == "__main__":
    main()
