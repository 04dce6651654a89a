class MyCache:
    """Finds blocks by what they hold. A block is found by its own tokens together with all before them."""

    def __init__(self, block_size, digest):
        self.block_size = block_size
        self.digest = digest  # digest(parent, tokens) is a number: of that of the block before, or None, and of a tuple
        self.entries = {}  # by digest

    def enter(self, tokens, table):
        """The blocks of a table hold these tokens. From now on the full ones can be found, if no other block is, in their place."""
        parent = None
        for i in range(len(tokens) // self.block_size):  # solution
            end = (i + 1) * self.block_size  # solution
            parent = self.digest(parent, tuple(tokens[end - self.block_size : end]))  # solution
            if parent not in self.entries:  # solution
                self.entries[parent] = table[i], tuple(tokens[:end])  # solution

    def find(self, tokens):
        """The blocks that hold the beginning of a prompt, in a row from its first one. Its last token is never among them."""
        parent, found = None, []
        for i in range((len(tokens) - 1) // self.block_size):  # solution
            end = (i + 1) * self.block_size  # solution
            parent = self.digest(parent, tuple(tokens[end - self.block_size : end]))  # solution
            block, held = self.entries.get(parent, (None, None))  # solution
            if held != tuple(tokens[:end]):  # solution
                break  # solution
            found.append(block)  # solution
        return found

    def forget(self, block):
        """A block is given to somebody else: nobody finds it any more. Perhaps nobody could."""
        self.entries = {digest: entry for digest, entry in self.entries.items() if entry[0] != block}  # solution
