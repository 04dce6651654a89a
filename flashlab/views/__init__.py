"""Showing: tables, figures for people, plots, comparisons, sweeps, timelines."""
