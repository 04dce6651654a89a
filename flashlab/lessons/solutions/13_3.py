class MyCopier:
    """A manager as in 13.2, whose forks share all blocks. The first request that writes into a shared block gets a copy of it."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.tables = {}  # of each request: its blocks
        self.lengths = {}  # of each request: how many tokens it has
        self.refs = [0] * num_blocks  # of each block: how many tables have it
        self.free_blocks = list(range(num_blocks))  # those that no table has, each once

    def free(self, request):
        """A request is over. Its blocks are free, but for those that others have. KeyError: there is none such (any more)."""
        table = self.tables.pop(request)
        del self.lengths[request]
        for block in table:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free_blocks.append(block)

    def fork(self, parent, child):
        """A new request has all that parent has. KeyError, and nothing changes: no such parent, or the child isn't new."""
        if parent not in self.tables or child in self.tables:
            raise KeyError(f"{parent}, {child}")
        # all blocks of the parent, full or not, are the child's, too
        for block in self.tables[parent]:  # solution
            self.refs[block] += 1  # solution
        self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]  # solution

    def allocate_slots(self, request, n):
        """Room for the next n tokens of a request, which may be new: a list of copies, (from, to), that have to be made first.

        It is empty where no copy is needed. If there are too few blocks: None, and nothing changes.
        """
        table, length = self.tables.get(request, []), self.lengths.get(request, 0)
        # the first new token: is it written into a block that others have, too?
        shared = length % self.block_size > 0 and self.refs[table[-1]] > 1  # solution
        more = -(-(length + n) // self.block_size) - len(table) + shared  # solution
        if more > len(self.free_blocks):  # solution
            return None  # solution
        new, copies = [self.free_blocks.pop() for _ in range(more)], []  # solution
        for block in new:  # solution
            self.refs[block] = 1  # solution
        if shared:  # solution
            self.refs[table[-1]] -= 1  # solution
            copies = [(table[-1], new[0])]  # solution
            table = table[:-1]  # solution
        self.tables[request], self.lengths[request] = table + new, length + n  # solution
        return copies  # solution
