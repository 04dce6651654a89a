"""The measures of work that tests bound don't move with what else goes on."""

from __future__ import annotations

import gc

from tests.work import calls


def test_the_garbage_collector_is_no_work_of_a_call() -> None:
    """It would come at every new list here, and call the function that waits for it."""

    def lists() -> None:
        for _ in range(100):
            kept.append([])

    def at_collection(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    kept: list[list[int]] = []
    collections: list[str] = []
    expected = calls(lists)
    threshold = gc.get_threshold()
    gc.callbacks.append(at_collection)
    gc.set_threshold(1)
    try:
        assert calls(lists) == expected
        lists()
        assert collections
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(at_collection)
