"""What shows results to people: tables, formatted figures, plots, comparisons, sweeps and timelines."""
