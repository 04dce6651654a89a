"""Counts in closed form, with one file per algorithm."""
