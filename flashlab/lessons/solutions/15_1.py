class MyAbsorbed:
    """Attention over the rows of a latent cache, as they lie. Arrays are float64.

    A row has 512 numbers c and 64 numbers r, which carry the position. Head h would make a key of it, (a[h] @ c, r), and a value,
    b[h] @ c.
    """

    def query(self, q, a):
        """q (heads, queries, 128 + 64) was made for keys, a (heads, 128, 512): the same for rows, (heads, queries, 512 + 64)."""
        c, r = q[..., :128] @ a, q[..., 128:]  # solution
        return np.concatenate([c, r], axis=-1)  # solution

    def attend(self, x, rows):
        """x (heads, queries, 576), rows (tokens, 576): the mean of the c of all rows by their weight, (heads, queries, 512)."""
        s = x @ rows.T / np.sqrt(128 + 64)  # solution
        p = np.exp(s - s.max(-1, keepdims=True))  # solution
        return (p / p.sum(-1, keepdims=True)) @ rows[:, :512]  # solution

    def output(self, o, b):
        """o (heads, queries, 512) is what attend found, b (heads, 128, 512): the heads' outputs, (heads, queries, 128)."""
        return o @ b.swapaxes(-1, -2)  # solution
