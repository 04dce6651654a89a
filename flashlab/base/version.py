"""The version, by itself, so that what writes it into a document needs nothing else."""

__all__ = ["__version__"]

__version__ = "0.1.0"
