"""The tutor for kernels: what a kernel tells, where two records first differ, and that each misconception's place is named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlab as fl
from flashlab.lessons import kernel_child, kernel_tutor, kernels
from flashlab.lessons.catalogue import KERNEL_EXERCISES
from flashlab.lessons.kernel_exercise import Launch
from flashlab.lessons.kernel_record import (
    ACCESS,
    BARRIER,
    GONE,
    HEAD,
    SHARED,
    STEP,
    VALUE,
    Access,
    Moment,
    assigned,
    lines_of_step,
    read,
)
from flashlab.lessons.kernel_telling import Variable, telling
from flashlab.lessons.kernel_told import Told
from flashlab.lessons.kernel_tutor import first_difference, first_moved
from simulator.dtypes import Array
from tests.flashlab.lessons.cuda_misconceptions import MISCONCEPTIONS
from tests.flashlab.lessons.misconceptions import Misconception

NO_ARGUMENTS = Launch(said="", arguments={}, grid=(1,), block=(2,), truth={}, budget={}, tile=1)
SOURCE = """\
__global__ void k(float* out) {
  __shared__ float tile[2];
  // step: load
  float x = 0;
  for (int j = 0; j < 2; ++j) {
    // step: scale
    tile[0] = x;
    x *= 2;
    // step: store
    out[0] = x;
  }
}
""".splitlines()
VARIABLES = (Variable("tile", 2), Variable("x", 4), Variable("j", 5, of_loop=True))
TILE, X, J = range(3)


# -- what a kernel tells --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KERNEL_EXERCISES)
def test_a_source_that_tells_keeps_its_lines(name: str):
    exercise = KERNEL_EXERCISES[name]
    told = telling(exercise.solution, exercise.kernel)
    lines = told.text.split("#line 1\n")[1].splitlines()
    assert len(lines) == len(exercise.solution.splitlines())
    for line, was in zip(lines, exercise.solution.splitlines(), strict=True):
        assert re.sub(r" (EMU_SEE\(\d+, '.', \w+\)|::emulator::Telling[^;]*;)", "", line) == was
    for variable in told.variables:
        assert re.search(rf"\b{variable.name}\b", exercise.solution.splitlines()[variable.line - 1])


def test_what_is_told_of():
    told = telling(KERNEL_EXERCISES["05.5"].solution, "my_flash2")
    names = [variable.name for variable in told.variables]
    assert {"k_tile", "v_tile", "q_row", "acc", "m", "l", "s", "m_new", "alpha", "p"} <= set(names)
    assert not {"q", "k", "v", "out", "lse", "BR", "return"} & set(names)
    assert [v.name for v in told.variables if v.of_loop] == ["j", "c", "c"]


@pytest.mark.parametrize(
    ("declaration", "names"),
    [
        ("float a = f(1, 2), b[2][3] = {{1, 2}, {3}}, c;", ["a", "b", "c"]),
        ("const unsigned n = 3;", ["n"]),
        ("unsigned n = 3;", ["n"]),
        ("unsigned long long n = 3;", ["n"]),
        ("__shared__ __align__(128) unsigned char sram[2 * T::BYTES];", ["sram"]),
        ("std::size_t n{4};", ["n"]),
        ("const float* at = x;", []),
        ("a = b, c = d;", []),
        ("return x;", []),
        ("f(a, b);", []),
        ("a.f(b);", []),
        ("using T = float;", []),
        ("constexpr int N = 4;", []),
        ("if (a) { float b = 1; } else c = 2;", ["b"]),
        ("for (int i = 0; i < 2; ++i) for (int j = 0; j < 2; ++j) { int k = j; }", ["j", "k"]),
        ("for (int i = 0; i < 2; ++i) { }", ["i"]),
    ],
)
def test_declarations(declaration: str, names: list[str]):
    told = telling(f"__global__ void k(float* x) {{ {declaration} }}", "k")
    assert [variable.name for variable in told.variables] == names


def test_where_a_variable_is_assigned():
    source = [
        "float m = 0;",
        "x.m = 1; tm = 2;",
        "if (m == 1) n = m;",
        "m[3][i % 2] += 1;",
        "// m = 4",
        "a = 1, m.x *= 2;",
    ]
    assert [assigned(source, "m", 1, n) for n in range(2, 8)] == [1, 1, 1, 4, 4, 6]
    assert lines_of_step(SOURCE, "scale") == (6, 9)
    assert lines_of_step(SOURCE, "none") == (1, len(SOURCE) + 1)


# -- records --------------------------------------------------------------------------------------------------------


def entry(kind: int, thread: int, *numbers: float) -> list[float]:
    return [kind, thread, len(numbers), *numbers]


def step(thread: int, name: str) -> list[float]:
    return entry(STEP, thread, *map(ord, name))


def value(thread: int, number: int, *values: float) -> list[float]:
    return entry(SHARED if number == TILE else VALUE, thread, number, 4, len(values), 0, 0, *values)


def room(*entries: list[float]) -> Array:
    flat = [x for one in entries for x in one]
    return np.array([HEAD + len(flat), 0, 0, *flat], float)


def run(values: Sequence[tuple[float, float]], out: float | None = None, tiles: Sequence[float] = (1, 1)) -> Told:
    """Two threads of the kernel above that hold these values of x after each round of its step `scale`."""
    entries: list[list[float]] = []
    for thread in range(2):
        entries += [step(thread, "load"), value(thread, X, 1)]
        for j, now in enumerate(values):
            entries += [value(thread, J, j), step(thread, "scale"), value(thread, X, now[thread])]
            if thread == 0:
                entries += [value(0, TILE, tiles[j], 5)]
            entries += [step(thread, "store"), entry(ACCESS, thread, 0, 4 * thread, 4, 1, 7), entry(GONE, thread, J)]
    last = values[-1] if values else (0, 0)
    final = {"out": np.array(last if out is None else (out, last[1]), np.float32)}
    return Told(read(room(*entries), VARIABLES, ["out"], final, steps=True), SOURCE, {7: 10}, frozenset(), (2,))


RIGHT = [(2.0, 3.0), (4.0, 6.5)]


def test_a_record_knows_steps_loops_and_values():
    record = run(RIGHT).record
    named = [("", 0), ("load", 1), ("scale", 1), ("store", 1), ("scale", 2), ("store", 2)]
    assert record.moments == [Moment(*one) for one in named]
    assert record.loops[Moment("scale", 2)] == {"j": 1}
    assert record.values[Moment("scale", 2)]["x"][1].tolist() == [[6.5]]
    assert record.shape(Moment("store", 2), "tile") == (2,)


def test_without_steps_barriers_part_a_record_and_the_loop_is_that_of_the_work():
    entries: list[list[float]] = [value(0, X, 1)]
    for j in (64, 32):
        entries += [value(0, J, j), value(0, X, j), entry(BARRIER, 0)]
    record = read(room(*entries, entry(GONE, 0, J)), VARIABLES, [], {}, steps=False)
    assert [float(record.values[m]["x"][0][-1][0]) for m in record.moments[:2]] == [64, 32]
    assert record.loops[Moment("", 1)] == {"j": 32}


def test_equal_records_do_not_differ():
    assert first_difference(run(RIGHT), run(RIGHT), NO_ARGUMENTS) is None


def test_the_first_difference_is_named_with_line_step_loop_and_thread():
    found = first_difference(run([(2, 3), (4, 7)]), run(RIGHT), NO_ARGUMENTS)
    assert found and (found.line, found.step) == (8, "scale")
    assert "step `scale`, j = 1, thread 1" in found.words and "x is 7 and should be 6.5" in found.words


def test_what_is_late_is_no_difference_until_it_is_missed():
    late, due = run(RIGHT), run(RIGHT)
    moved = late.record.values[Moment("scale", 1)].pop("x")
    late.record.values[Moment("store", 1)] = {"x": moved}  # the next step does it
    due.record.values[Moment("store", 1)] = {"x": moved}
    assert first_difference(late, due, NO_ARGUMENTS) is None
    never = run(RIGHT)
    never.record.values[Moment("scale", 2)].pop("x")
    found = first_difference(never, run(RIGHT), NO_ARGUMENTS)
    assert found and found.step == "scale" and "x was left as it was" in found.words


def test_what_is_wrong_in_shared_memory_counts_before_what_comes_of_it():
    stale = run([(2, 3), (9, 6.5)])
    del stale.record.values[Moment("scale", 2)]["tile"]
    due = run(RIGHT, tiles=(1, 8))
    found = first_difference(stale, due, NO_ARGUMENTS)
    assert found and "tile[0]" in found.words


def test_a_tile_in_another_order_is_no_difference():
    mine, due = run(RIGHT, tiles=(2, 3)), run(RIGHT, tiles=(2, 3))
    for of in mine.record.values.values():
        if "tile" in of:
            of["tile"] = {t: x[:, ::-1] for t, x in of["tile"].items()}
    assert first_difference(mine, due, NO_ARGUMENTS) is None


def test_what_is_loaded_from_elsewhere_is_named():
    mine, due = run([(2, 3), (4, 7)]), run(RIGHT)
    for told, offset in ((mine, 0), (due, 4)):
        told.record.accesses[Moment("scale", 2)] = [Access(1, "out", offset, 4, store=False, place=7)]
    found = first_difference(mine, due, NO_ARGUMENTS)
    assert found and "j = 1" in found.words and "doesn't load out[1] and loads out[0]" in found.words


def test_a_variable_of_another_name_is_known_by_its_value():
    mine, due = run([(2, 3), (4, 7)]), run(RIGHT)
    for values in mine.record.values.values():
        if "x" in values:
            values["own"] = values.pop("x")
    mine = replace(mine, record=replace(mine.record, sizes={"own": 4, "tile": 4}))
    found = first_difference(mine, due, NO_ARGUMENTS)
    assert found and found.step == "scale" and "own is 7 and should be 6.5" in found.words


def test_an_output_is_told_by_the_line_that_stores_it():
    found = first_difference(run(RIGHT, out=5), run(RIGHT), NO_ARGUMENTS)
    assert found and found.line == 10 and found.step == "store"
    assert "thread 0" in found.words and "out[0] is 5 and should be 4" in found.words


def test_a_loop_that_ends_early_or_late_is_named():
    short, long = run(RIGHT[:1]), run(RIGHT)
    found = first_difference(short, long, NO_ARGUMENTS)
    assert found and found.line == 5 and "j = 1" in found.words
    short.record.final["out"][:] = long.record.final["out"]  # type: ignore[index]
    found = first_difference(long, short, NO_ARGUMENTS)
    assert found and found.line == 5 and "yours comes here once more" in found.words


def test_bytes_are_told_by_the_line_that_moves_too_many():
    more = run(RIGHT)
    more.record.accesses[Moment("store", 2)] *= 2
    found = first_moved(more, run(RIGHT), "out", "written")
    assert found and found.line == 10 and "write 16 bytes of out here, and those of the solution 8" in found.words
    assert first_moved(run(RIGHT), run(RIGHT), "out", "written") is None


@given(st.lists(st.tuples(*[st.floats(0.5, 100)] * 2), min_size=1, max_size=4), st.data())
def test_whatever_one_step_does_otherwise_is_found_in_it(values: list[tuple[float, float]], data: st.DataObject):
    where = data.draw(st.integers(0, len(values) - 1))
    wrong = [*values]
    wrong[where] = (wrong[where][0] + 0.25 * max(map(max, values)), wrong[where][1])
    tiles = [1.0] * len(values)
    assert first_difference(run(values, tiles=tiles), run(values, tiles=tiles), NO_ARGUMENTS) is None
    found = first_difference(run(wrong, tiles=tiles), run(values, tiles=tiles), NO_ARGUMENTS)
    assert found and found.step == "scale" and f"j = {where}, thread 0" in found.words


# -- on the emulator ------------------------------------------------------------------------------------------------


def learner_s(wrong: Misconception, folder: Path) -> Path:
    path = folder / KERNEL_EXERCISES[wrong.exercise].file
    path.write_text(KERNEL_EXERCISES[wrong.exercise].marked.replace(wrong.was, wrong.becomes), encoding="utf-8")
    return path


def told_of(wrong: Misconception, path: Path) -> kernel_tutor.Difference | None:
    """What the tutor says of a file, on the first launch that fails."""
    exercise, text = KERNEL_EXERCISES[wrong.exercise], path.read_text(encoding="utf-8")
    for launch in exercise.launches(Random(0)):
        verdict = kernels.judge(exercise, text, [launch], [kernel_child.run(path, exercise.kernel, launch, 240)])
        if not verdict.passed:
            rounds = verdict.kind == kernels.ROUNDS
            return kernel_tutor.compare(path, exercise, launch, kernels.moved_of(verdict), 240, rounds=rounds)
    return None


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize(
    "wrong",
    [pytest.param(x, id=f"{x.exercise}-{x.name}") for x in MISCONCEPTIONS if x.kind in kernels.TUTORED or x.why],
)
def test_the_tutor_names_the_place_of_a_misconception(wrong: Misconception, tmp_path: Path):
    found = told_of(wrong, learner_s(wrong, tmp_path))
    assert found, "the tutor says nothing"
    if wrong.at:
        assert wrong.at in (found.step, str(found.line)), found.words
    assert re.search(wrong.why, found.words), found.words
    assert "\n" not in found.words


def test_nine_in_ten_misconceptions_say_where_they_are_and_all_say_why():
    for_the_tutor = [x for x in MISCONCEPTIONS if x.kind in kernels.TUTORED]
    assert sum(bool(x.at) for x in for_the_tutor) >= 0.9 * len(for_the_tutor)
    assert all(x.why for x in for_the_tutor)


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize("name", KERNEL_EXERCISES)
def test_the_solution_does_not_differ_from_itself_in_other_words(name: str, tmp_path: Path):
    """A comment makes it another file."""
    exercise = KERNEL_EXERCISES[name]
    path = tmp_path / exercise.file
    path.write_text(f"{exercise.solution}// the end\n", encoding="utf-8")
    for launch in exercise.launches(Random(1)):
        assert kernel_tutor.compare(path, exercise, launch, None, 240) is None


@pytest.mark.long
@pytest.mark.compiler
def test_a_check_says_what_the_tutor_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "fresh", lambda: Random(0))
    (wrong,) = (x for x in MISCONCEPTIONS if (x.exercise, x.name) == ("05.5", "output-is-not-rescaled"))
    verdict = fl.check(learner_s(wrong, tmp_path), exercise="05.5", seconds=240)
    assert verdict.step == "rescale" and verdict.tutor in repr(verdict)
    assert re.search(
        r"step `rescale`, j = 32, thread \d+ of block .*: acc was not multiplied by alpha = ", verdict.tutor
    )
    assert "acc[d] *= alpha" not in verdict.tutor  # the solution's line stays the learner's to find


@pytest.mark.long
@pytest.mark.compiler
def test_of_a_kernel_without_marks_barriers_part_the_steps(tmp_path: Path):
    exercise = KERNEL_EXERCISES["10.1"]
    text = re.sub(r"// step: \w+", "//", exercise.solution).replace("sum * scale", "sum")
    path = tmp_path / exercise.file
    path.write_text(text, encoding="utf-8")
    found = kernel_tutor.compare(path, exercise, exercise.launches(Random(0))[0], None, 240)
    assert found and not found.step and "j = 0" in found.words and "scale" in found.words, found
