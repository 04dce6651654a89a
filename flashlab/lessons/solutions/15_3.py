class MyChoice:
    """Which form of latent attention takes less time. Each query meets each key, and numbers have 16 bits."""

    def absorbed(self, heads, queries, keys):
        """What moves of the cache, and FLOPs: (bytes, flops). A query of a head absorbs A, and its output gets B."""
        nbytes = 2 * keys * 576  # solution
        flops = 2 * heads * queries * (keys * (576 + 512) + 2 * 128 * 512)  # solution
        return nbytes, flops  # solution

    def unfolded(self, heads, queries, keys):
        """The same: each head makes its keys (128 numbers, and the 64 of the row) and its values, writes them, and reads them."""
        made = 2 * keys * heads * (192 + 128)  # solution
        nbytes = 2 * keys * 576 + 2 * made  # solution
        flops = 2 * heads * (keys * 2 * 128 * 512 + queries * keys * (192 + 128))  # solution
        return nbytes, flops  # solution

    def choose(self, heads, queries, keys, bandwidth, rate):
        """Which one, "absorbed" or "unfolded": on a GPU with so many bytes per second and so many FLOPs per second."""

        def seconds(form):
            """How long a form takes: self.absorbed, or self.unfolded."""
            nbytes, flops = form(heads, queries, keys)  # solution
            return max(nbytes / bandwidth, flops / rate)  # solution

        return "absorbed" if seconds(self.absorbed) <= seconds(self.unfolded) else "unfolded"  # solution
