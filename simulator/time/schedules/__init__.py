"""How each algorithm's kernel uses the units: one file of its name, with `launches(problem, config, rates)`."""
