"""What only maintainers run, from a checkout: `python -m studies NAME …`. `python -m studies` lists the names."""
