"""How each algorithm's kernel uses the units of an SM. Its file has `launches(problem, config, rates)`."""
