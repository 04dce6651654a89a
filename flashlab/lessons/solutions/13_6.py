class MyScheduler:
    """Says which requests are let in next. A request has a `name`, a `prompt` (so many tokens), and has `waited` so many steps."""

    def choose(self, waiting, free_tokens):
        """Those of `waiting`, a tuple, that may be let in now, the most urgent first: until one of them finds no room.

        `free_tokens` is how many tokens there is room for. How long an answer will be nobody knows.
        """
        patience = 50  # solution
        late = [x for x in waiting if x.waited >= patience]  # solution
        others = [x for x in waiting if x.waited < patience]  # solution
        return late + sorted(others, key=lambda x: x.prompt)  # solution
