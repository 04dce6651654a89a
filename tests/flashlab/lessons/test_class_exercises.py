"""Each exercise whose answer is a class: the solution holds, mistakes are told by the shortest history that shows them."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons import lesson13_extras
from flashlab.lessons.catalogue import CLASS_EXERCISES
from flashlab.lessons.exercise import MARK
from flashlab.lessons.histories import (
    MOST,
    Failure,
    Held,
    Model,
    Operation,
    Pool,
    World,
    drawn,
    held,
    replay,
    short_histories,
    shortest,
)
from tests.flashlab.lessons.answers import class_of
from tests.flashlab.lessons.class_misconceptions import MISCONCEPTIONS, Misconception
from tests.mutants.managers import MANAGERS as SEEDED
from tests.tiers import examples, one_of_each

MANAGERS = ("13.2", "13.3")
"""Those that are held to the model without pages."""


def of(wrong: Misconception) -> str:
    """The text of an answer with a mistake."""
    marked = CLASS_EXERCISES[wrong.exercise].marked
    assert wrong.was in marked, wrong.name
    return marked.replace(wrong.was, wrong.becomes)


@pytest.mark.parametrize("name", CLASS_EXERCISES)
def test_the_skeleton_is_the_solution_without_the_marked_lines(name: str):
    exercise = CLASS_EXERCISES[name]
    marked = [line for line in exercise.marked.splitlines() if line.endswith(MARK)]
    rest = iter(exercise.solution.splitlines())
    assert marked and MARK not in exercise.skeleton + exercise.solution
    assert all(line in rest for line in exercise.skeleton.splitlines())
    assert len(exercise.solution.splitlines()) == len(exercise.skeleton.splitlines()) + len(marked)
    compile(exercise.skeleton, name, "exec")


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize("name", CLASS_EXERCISES)
def test_the_skeleton_has_not_begun_and_the_solution_passes(name: str):
    exercise = CLASS_EXERCISES[name]
    assert fl.check(class_of(exercise.skeleton), exercise=name).kind == "not started"
    verdict = fl.check(class_of(exercise.solution), exercise=name)
    assert verdict.passed and all(line.equal for line in verdict.budget), repr(verdict)
    assert exercise.afterwards in repr(verdict)


def test_a_class_is_checked_in_a_process_of_its_own():
    text = CLASS_EXERCISES["13.2"].solution
    endless = fl.check(
        class_of(text.replace("self.refs[block] -= 1", "while True: pass")), exercise="13.2", seconds=0.5
    )
    assert endless.kind == "hang" and "while True: pass" in endless.message


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize(
    "wrong", one_of_each(MISCONCEPTIONS, lambda wrong: wrong.exercise, lambda wrong: f"{wrong.exercise}-{wrong.name}")
)
def test_a_misconception_fails_and_is_told(wrong: Misconception):
    """Kind, method and reason of each. A history goes along."""
    verdict = fl.check(class_of(of(wrong)), exercise=wrong.exercise)
    assert (verdict.kind, verdict.step) == (wrong.kind, wrong.at), repr(verdict)
    assert re.search(wrong.why, verdict.message), verdict.message
    assert "\n" not in verdict.message and verdict.findings
    assert "✘" in verdict.findings[-1] and wrong.at in verdict.findings[-1]


def test_each_exercise_has_eight_misconceptions_of_different_names():
    """Those of lesson 14 are in a file of their own."""
    assert len({(m.exercise, m.name) for m in MISCONCEPTIONS}) == len(MISCONCEPTIONS)
    assert min(Counter(m.exercise for m in MISCONCEPTIONS)[name] for name in CLASS_EXERCISES if name[:2] == "13") >= 8


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("class A:\n    pass\n", "A has no method allocate_slots(request, n)"),
        (
            "class A:\n    def allocate_slots(self): pass\n",
            "A.allocate_slots takes (self), and is called as allocate_slots",
        ),
        ("def f():\n    pass\n", "takes a class with allocate_slots(request, n); fork(parent, child)"),
    ],
)
def test_what_is_no_such_class_is_told_in_a_line(answer: str, says: str):
    verdict = fl.check(class_of(answer), exercise="13.2")
    assert verdict.kind == "usage" and says in verdict.message and "\n" not in verdict.message


@pytest.mark.usefixtures("without_child")
def test_a_manager_is_handed_over_as_a_class_and_none_of_the_librarys():
    made = class_of(CLASS_EXERCISES["13.2"].solution)(4, 2)
    assert "hand over MyManager itself, without brackets" in fl.check(made, exercise="13.2").message
    assert "takes a class" in fl.check("mine.cu", exercise="13.2").message
    from flashlab.serve.blocks import KVCacheManager

    assert "the library's own" in fl.check(KVCacheManager, exercise="13.2").message


LEFT_OUT = {
    "launches in flight": (
        "blocks are freed while their launch is queued", "found before the launch wrote it",
        "a failed launch counts as written",
    ),
    "a reserve for those that are there": ("newcomers take the reserve",),
    "hits among the free blocks": ("free hits are counted as room",),
    "the order of free blocks": (
        "what can be found is taken first", "the beginning is taken first", "a used block is taken like an unused one",
    ),
    "where a launch writes": ("slots begin a token late",),
}  # fmt: skip
"""Bugs of the library's manager, by what the lesson's managers don't have."""


def test_the_mistakes_have_each_bug_of_serving_that_these_managers_can_have():
    taught = [bug for wrong in MISCONCEPTIONS for bug in wrong.serving]
    left_out = [bug for bugs in LEFT_OUT.values() for bug in bugs]
    assert set(taught) | set(left_out) == {bug.name for bug in SEEDED}
    assert not set(taught) & set(left_out)


ANOTHER = """
from collections import Counter

class Mine:
    def __init__(self, num_blocks, block_size):
        self.size, self.tables, self.lengths = block_size, {}, {}
        self.refs, self.free_blocks = Counter(), set(range(num_blocks))

    def allocate_slots(self, request, n):
        table = self.tables.get(request, ())
        length = self.lengths.get(request, 0) + n
        needed = (length + self.size - 1) // self.size
        if needed - len(table) > len(self.free_blocks):
            return False
        while len(table) < needed:
            block = min(self.free_blocks)
            self.free_blocks.discard(block)
            self.refs[block] += 1
            table += (block,)
        self.tables[request], self.lengths[request] = table, length
        return True

    def fork(self, parent, child):
        if child in self.tables:
            raise KeyError(child)
        full = self.lengths[parent] // self.size
        self.tables[child] = self.tables[parent][:full]
        self.refs.update(self.tables[child])
        self.lengths[child] = full * self.size
        return self.lengths[child]

    def free(self, request):
        self.lengths.pop(request)
        self.refs.subtract(table := self.tables.pop(request))
        self.free_blocks |= {block for block in table if not self.refs[block]}
"""
"""A right manager in another form: tuples, a counter and a set."""


@pytest.mark.usefixtures("without_child")
def test_another_right_manager_passes_and_what_it_forgets_is_told():
    assert fl.check(class_of(ANOTHER), exercise="13.2").passed
    for was, becomes, kind, step, says in (
        ("self.refs.update(self.tables[child])", "pass", "history", "fork", "and 2 tables have block"),
        ("if not self.refs[block]}", "}", "history", "free", "is free, and b has it"),
        ("self.free_blocks.discard(block)", "pass", "history", "allocate_slots", "is free, and a has it"),
        ("self.lengths.pop(request)", "pass", "history", "free", "a is over, and lengths still has it"),
        ("self.refs, self", "self.counts, self", "history", "__init__", "Mine has no attribute refs"),
        (
            "self.size, self.tables, self.lengths = block_size, {}, {}",
            "1 / 0",
            "crash",
            "__init__",
            "raises ZeroDivisionError",
        ),
    ):
        assert was in ANOTHER
        verdict = fl.check(class_of(ANOTHER.replace(was, becomes)), exercise="13.2")
        assert (verdict.kind, verdict.step) == (kind, step) and says in verdict.message, repr(verdict)


# -- histories ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MANAGERS)
@examples(30)
@given(seed=st.integers(0, 10**6), blocks=st.integers(1, 9), size=st.integers(1, 4))
def test_the_solutions_hold_whatever_is_drawn(name: str, seed: int, blocks: int, size: int):
    copying, pool = name == "13.3", Pool(blocks, size)
    history = drawn(Random(seed), pool, copying=copying)
    world = replay(class_of(CLASS_EXERCISES[name].solution), pool, history, copying=copying)
    assert isinstance(world, World), world
    assert world.copied == world.least


def test_histories_are_the_same_in_each_check_and_have_all_that_can_happen():
    text = CLASS_EXERCISES["13.3"].solution
    first, second = (held(class_of(text), copying=True, operations=2000) for _ in range(2))
    assert first == second and isinstance(first, Held) and first.least > 0
    random, seen = Random(13), Counter[str]()
    for _ in range(20):
        pool = Pool(random.randint(1, MOST), random.randint(1, 4))
        model = Model(pool, copying=True)
        for operation in drawn(random, pool, copying=True):
            refused, copies = model.refuses(operation), model.copies(operation.request) if operation.n else 0
            room = bool(refused) or model.do(operation)
            seen[f"{operation.verb} {'refused' if refused else 'done' if room else 'no room'}"] += 1
            seen["copied"] += copies and room
    assert min(seen.values()) >= 20 and len(seen) == 7, seen


def test_the_model_counts_blocks_without_having_any():
    model = Model(Pool(4, 2), copying=True)
    for operation in (Operation("allocate_slots", "a", n=3), Operation("fork", "a", "b")):
        assert model.do(operation)
    assert (model.used, model.copies("b")) == (2, 1)
    assert model.do(Operation("allocate_slots", "b", n=1))
    assert (model.used, model.copies("a")) == (3, 0)
    assert not model.do(Operation("allocate_slots", "a", n=4)) and len(model.tokens["a"]) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong", [m for m in MISCONCEPTIONS if m.exercise in MANAGERS], ids=lambda m: f"{m.exercise}-{m.name}"
)
def test_no_shorter_history_shows_the_mistake(wrong: Misconception):
    """All histories with fewer operations are tried, by pools that the grader doesn't look at, too."""
    copying, manager = wrong.exercise == "13.3", class_of(of(wrong))
    found = held(manager, copying=copying, operations=10_000)
    assert isinstance(found, Failure)
    for length in range(1, min(len(found.history), 4)):
        for history in short_histories(length):
            for pool in (Pool(1, 1), Pool(3, 1), Pool(2, 2), Pool(5, 3)):
                assert isinstance(replay(manager, pool, history, copying=copying), World), (history, pool)
    assert shortest(manager, found, copying=copying) == found


def test_a_history_is_told_operation_by_operation():
    manager = class_of(of(next(m for m in MISCONCEPTIONS if m.name == "frees-what-others-have")))
    found = held(manager, copying=False, operations=2000)
    assert isinstance(found, Failure)
    assert [line.split("→")[0].strip() for line in found.told[:-1]] == [
        "1  allocate_slots('a', 1)",
        "2  fork('a', 'b')",
    ]
    assert found.told[-1].startswith("3  free('a')  ✘ block ") and found.told[-1].endswith("is free, and b has it")


# -- a prefix cache and a scheduler -------------------------------------------------------------------------------


def test_two_prompts_have_equal_hashes():
    one, other = (lesson13_extras.checksum(None, tokens) for tokens in lesson13_extras.COLLIDING)
    assert one == other and len(set(lesson13_extras.COLLIDING)) == 2


@examples(30)
@given(seed=st.integers(0, 10**6), digest=st.sampled_from(["exact", "checksum", "narrow"]))
def test_a_right_cache_is_right_whatever_is_drawn(seed: int, digest: str):
    history = lesson13_extras.cache_history(Random(seed))
    cache = class_of(CLASS_EXERCISES["13.5"].solution)
    assert lesson13_extras.cache_failure(cache, history, getattr(lesson13_extras, digest)) is None


def test_a_scheduler_gets_a_score_beside_others_and_no_grade():
    first, short = (
        lesson13_extras.simulate_day(choose)
        for choose in (lambda waiting, free: waiting, lambda waiting, free: sorted(waiting, key=lambda x: x.prompt))
    )
    mine = lesson13_extras.simulate_day(class_of(CLASS_EXERCISES["13.6"].solution)().choose)
    assert 1 <= mine.mean < first.mean / 2 and mine.longest <= 2 * first.longest < short.longest
    found = CLASS_EXERCISES["13.6"].judge(
        class_of("class A:\n    def choose(self, waiting, free_tokens):\n        return waiting")
    )
    assert found.kind == "passed" and found.said.startswith(f"score: {first.mean:.1f} steps")
