"""Makes the tables and pictures that pages show of data files and notebooks. Tests hold the pages to their sources."""
