"""Measures on a machine: counters, sanitizers, speed, agreement. It also holds the results that commands save."""
