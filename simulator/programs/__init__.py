"""The tile programs, one file an algorithm."""
