class MyZigzag:
    """Which rows a rank has of n, and what they see of the keys of rank `of`, which has the same rows of K and V."""

    def rows(self, n, ranks, rank):
        """The rows of a rank, as a list of numbers."""
        size, late = n // (2 * ranks), 2 * ranks - 1 - rank  # solution
        return [*range(rank * size, (rank + 1) * size), *range(late * size, (late + 1) * size)]  # solution

    def seen(self, n, ranks, rank, of):
        """A launch: (rows, keys, causal), with slices of what the two ranks have. None if nothing is seen."""
        size, everything = n // (2 * ranks), slice(0, n // ranks)  # solution
        if of == rank:  # solution
            return everything, everything, True  # solution
        if of < rank:  # solution
            return everything, slice(0, size), False  # solution
        return slice(size, 2 * size), everything, False  # solution
