class MyManager:
    """Gives out the blocks of a pool. A request is a name, and its blocks lie in the order of its tokens."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.tables = {}  # of each request: its blocks
        self.lengths = {}  # of each request: how many tokens it has
        self.refs = [0] * num_blocks  # of each block: how many tables have it
        self.free_blocks = list(range(num_blocks))  # those that no table has, each once

    def allocate_slots(self, request, n):
        """Room for the next n tokens of a request, which may be new: True. With too few blocks: False, and nothing changes."""
        table, length = self.tables.get(request, []), self.lengths.get(request, 0) + n
        more = -(-length // self.block_size) - len(table)  # solution
        if more > len(self.free_blocks):  # solution
            return False  # solution
        new = [self.free_blocks.pop() for _ in range(more)]  # solution
        for block in new:  # solution
            self.refs[block] = 1  # solution
        self.tables[request], self.lengths[request] = table + new, length  # solution
        return True  # solution

    def fork(self, parent, child):
        """A new request begins as parent does: it shares parent's full blocks. Returns how many tokens that is.

        KeyError, and nothing changes: there is no such parent, or there is a request of the child's name.
        """
        if parent not in self.tables or child in self.tables:  # solution
            raise KeyError(f"{parent}, {child}")  # solution
        shared = self.tables[parent][: self.lengths[parent] // self.block_size]  # solution
        for block in shared:  # solution
            self.refs[block] += 1  # solution
        self.tables[child], self.lengths[child] = shared, len(shared) * self.block_size  # solution
        return self.lengths[child]  # solution

    def free(self, request):
        """A request is over. Its blocks are free, but for those that others have. KeyError: there is none such (any more)."""
        table = self.tables.pop(request)  # solution
        del self.lengths[request]  # solution
        for block in table:  # solution
            self.refs[block] -= 1  # solution
            if self.refs[block] == 0:  # solution
                self.free_blocks.append(block)  # solution
