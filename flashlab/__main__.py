"""Makes `python -m flashlab` the same as the `flashlab` command."""

from flashlab.command import main

if __name__ == "__main__":
    main()
