"""The closed formulas, one file an algorithm."""
