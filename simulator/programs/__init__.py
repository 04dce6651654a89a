"""The tile programs, with one file per algorithm."""
