"""Lesson 13: its exercises whose answers are block managers."""

from __future__ import annotations

from typing import Any

from flashlab.lessons.class_exercise import ClassExercise, Found
from flashlab.lessons.histories import EPISODE, Failure, held
from flashlab.serve.costs import Model

OPERATIONS = 10_000
"""Calls of a check. A right manager takes half a second for all of them."""
TOKEN = Model().token_bytes
"""K and V of a token, in all layers of a model of eight billion parameters, in bytes."""
_METHODS = {"allocate_slots": ("request", "n"), "fork": ("parent", "child"), "free": ("request",)}


def _failed(failure: Failure) -> Found:
    """The shortest history that breaks a manager."""
    if not failure.history:
        return Found(failure.kind, failure.message, "__init__", tuple(failure.told))
    call, pool, n = failure.history[-1], failure.pool, len(failure.history)
    blocks = f"{pool.blocks} block{'s' * (pool.blocks != 1)} of {pool.size} token{'s' * (pool.size != 1)}"
    head = f"{call}: {failure.message} (operation {n} of the shortest history that was found, on {blocks})"
    return Found(failure.kind, head, call.verb, tuple(failure.told))


def _manager(answer: Any) -> Found:
    found = held(answer, copying=False, operations=OPERATIONS)
    if isinstance(found, Failure):
        return _failed(found)
    pools = OPERATIONS // EPISODE
    return Found("passed", f"{OPERATIONS:,} operations on {pools} pools, each beside the model without pages")


def _copier(answer: Any) -> Found:
    found = held(answer, copying=True, operations=OPERATIONS)
    if isinstance(found, Failure):
        return _failed(found)
    pools = OPERATIONS // EPISODE
    return Found(
        "passed",
        f"{OPERATIONS:,} operations on {pools} pools, each beside the model without pages",
        said=f"{found.copied:,} blocks were copied, and each fork could have copied its whole table: {found.forked:,} blocks",
        problem=f"{OPERATIONS:,} operations, {TOKEN:,} bytes for each token of a copied block",
        budget=(("copies", "written", found.tokens * TOKEN, found.least * TOKEN),),
    )


EXERCISES = (
    ClassExercise(
        name="13.2",
        title="Write the manager",
        task="Three verbs. `allocate_slots` gives a request room for its next tokens, or says no and changes nothing. `fork` lets "
        "a new request begin as another one does: full blocks are shared, and the rest it will compute for itself. `free` takes a "
        "request's blocks back, but not those that others have. Nothing is lost, nothing is given twice, and freeing twice is an "
        "error. Four attributes say which request has what. Keep them true: the check looks at them after each of 10,000 calls, "
        "and shows the shortest history that breaks your manager.",
        methods=_METHODS,
        judge=_manager,
        hints=(
            "How many blocks do all its tokens need, old and new? It has `len(table)` of them. `-(-a // b)` rounds up.",
            "Look for room before you take the first block: a call that says no must leave no trace.",
            "A block that is new has a count of 1. A fork adds 1 to each block that it shares: `length // block_size` of them.",
            "Free: one less for each block of the table, and a block whose count is 0 goes back to `free_blocks`.",
        ),
        slips={
            "allocate_slots": "allocate_slots: count what is needed, look whether it is there, then take it, and count it.",
            "fork": "fork: the child has a list of its own, of blocks that one more table has now.",
            "free": "free: a block is free when the last table that has it is gone, and then once.",
        },
        afterwards="Next: this is vLLM's first manager, but for its copies. You have seen how such bugs hide: nothing fails when a "
        "block is freed too early. It fails some requests later, in somebody else's text.",
    ),
    ClassExercise(
        name="13.3",
        title="Copy-on-write",
        task="Now a fork shares *all* blocks, the one that isn't full as well. That costs nothing, until one of them writes. "
        "A token must never be written into a block that another request has, too: the one that writes first gets a copy of it, "
        "and leaves the old one to the others. `allocate_slots` returns the copies that have to be made, as pairs (from, to). The "
        "budget is the least that can be copied: at most one block for each call, and none where nobody else is left.",
        methods=_METHODS,
        judge=_copier,
        hints=(
            "Only one block of a table can be written: the last one, if it isn't full. Is it? And does another request have it?",
            "A copy needs a block, so it belongs to what has to be free before anything is taken.",
            "The old block loses one owner. The copy takes its place in the table: at the end, before the other new blocks.",
        ),
        slips={
            "bytes": "A copy is needed where the next token goes into a block that isn't full, and others have it at this moment.",
            "fork": "fork: the child has a list of its own, with all of the parent's blocks, each counted once more.",
            "allocate_slots": "allocate_slots: may the last block be written? If not, a new one takes its place, and the old "
            "one has an owner less.",
        },
        afterwards="Next: the copies are a launch of their own (copy_pages), before the one that writes. In between, nobody may "
        "give the old block away: that's one of the 36 bugs that the library's manager is tested with.",
    ),
)
