"""What pages show of data files and notebooks: tables and pictures, made, and held to their sources by tests."""
