"""`python -m flashlab` is `flashlab`."""

from flashlab.cli import main

if __name__ == "__main__":
    main()
