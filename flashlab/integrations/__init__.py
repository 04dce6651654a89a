"""Doors to other libraries, a file each, of its name. Nothing of them is imported before it is asked for."""
