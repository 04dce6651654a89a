"""Measuring on a machine: counters, sanitizers, speed, agreement; and the results that commands keep."""
