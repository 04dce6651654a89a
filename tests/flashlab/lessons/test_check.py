"""`fl.check`: a verdict for everything that a learner's program may do, and no exception."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest

import flashlab as fl
from flashlab.lessons import checking, record
from flashlab.lessons.catalogue import EXERCISES
from flashlab.lessons.verdict import HEADLINES, PATIENCE
from tests.flashlab.lessons.answers import program_of

CELL = EXERCISES["00.1"].solution
POSIX = pytest.mark.skipif(os.name == "nt", reason="process groups are POSIX's")


def with_line(line: str, text: str = CELL) -> str:
    """The solution with a line in front of its step "load"."""
    return text.replace('        block.step("load")\n', f'        {line}\n        block.step("load")\n', 1)


def judged(line: str, exercise: str = "00.1", **options: float) -> fl.lessons.Verdict:
    return fl.check(program_of(with_line(line)), exercise=exercise, **options)


def test_a_hang_is_ended_and_the_line_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checking, "PATIENCE", 10_000)  # a busy machine is no reason to fail
    verdict = judged("while True: pass", seconds=1)
    assert verdict.kind == "hang"
    assert "still running after 1 seconds of work, in line 6: while True: pass" in verdict.message


@pytest.mark.long
def test_on_a_busy_machine_nothing_hangs(monkeypatch: pytest.MonkeyPatch):
    """It takes more seconds than it may, but hardly any of a processor."""
    monkeypatch.setattr(checking, "PATIENCE", 10_000)
    assert judged("import time; time.sleep(0.8)", seconds=2).passed


def test_what_only_the_clock_has_ended_is_told_as_that():
    """And where it was: a loop that gets no processor's time is one that has a line, too."""
    verdict = judged("import time; time.sleep(60)", seconds=0.5)
    assert verdict.kind == "no end"
    assert "no end within 2 seconds, in line 6: import time; time.sleep(60): a slow or busy machine" in verdict.message
    assert "or a loop without end; run it again" in verdict.message
    assert "seconds=1.5" in verdict.message


def test_a_reader_waits_20_seconds_for_an_endless_loop_at_most():
    assert checking.SECONDS * PATIENCE <= 20


def test_an_exception_is_a_crash_that_names_its_line():
    verdict = judged("1 / 0")
    assert verdict.kind == "crash"
    assert "ZeroDivisionError: division by zero, in line 6: 1 / 0" in verdict.message


@POSIX
def test_a_fault_is_a_crash():
    verdict = judged("import ctypes; ctypes.string_at(0)")
    assert (verdict.kind, "SIGSEGV" in verdict.message) == ("crash", True)


@pytest.mark.alike(2)
@pytest.mark.parametrize("line", ["raise SystemExit", "import sys; sys.exit(3)", "import os; os._exit(0)", "exit()"])
def test_an_exit_is_no_answer(line: str):
    assert judged(line).kind == "exit"


@pytest.mark.alike(1)
@pytest.mark.parametrize(
    "line", ["print('x' * 200_000)", "import sys; [print('x' * 999, file=sys.stderr) for _ in range(200)]"]
)
def test_a_flood_of_output_is_cut_off(line: str):
    verdict = judged(line)
    assert verdict.kind == "flood"
    assert 0 < len(verdict.printed) < 3000


def test_an_endless_flood_is_ended():
    assert judged("while True: print('x' * 999)", seconds=20).kind == "flood"


def test_what_is_printed_is_shown():
    verdict = judged("print('hello from the block')")
    assert verdict.passed
    assert "hello from the block" in verdict.printed
    assert "hello from the block" in verdict._repr_html_()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps to RLIMIT_AS")
def test_memory_is_limited():
    verdict = judged("np.ones(1 << 33)")
    assert verdict.kind == "memory"
    assert "in line 6" in verdict.message


@pytest.mark.usefixtures("without_child")
@pytest.mark.alike(1)
@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        (
            "x + y, block.i",
            "x + y, block.i + 1",
            "out: row tile 4 (of 64 rows each) is written, but the tensor has 256 rows, the tiles 0 to 3",
        ),
        ("x + y, block.i", "x + y, -1", "out: row tile -1 (of 64 rows each) is written"),
        (
            "fetch(q, block.i, tile.rows)",
            "fetch(q, block.i, tile.rows, 9, 32)",
            "q: column tile 9 (of 32 columns each) is read",
        ),
    ],
)
def test_a_tile_out_of_bounds(was: str, becomes: str, says: str):
    assert was in CELL
    verdict = fl.check(program_of(CELL.replace(was, becomes)), exercise="00.1")
    assert verdict.kind == "out of bounds"
    assert says in verdict.message
    assert "in line" in verdict.message


@POSIX
@pytest.mark.parametrize("ending", ["", "; import time; time.sleep(60)"])
def test_no_process_is_left(ending: str, tmp_path: Path):
    """Neither of a program that ends nor of one that hangs."""
    note = tmp_path / "pid"
    start = f"import subprocess; p = subprocess.Popen(['sleep', '300']); open({str(note)!r}, 'w').write(str(p.pid))"
    judged(start + ending, seconds=1)
    pid = int(note.read_text())
    for _ in range(100):
        if _ended(pid):
            return
        time.sleep(0.05)
    pytest.fail("its child is still running")


def _ended(pid: int) -> bool:
    """Gone, or a zombie that nobody has looked after."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.exists() and sys.platform == "linux":
        return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_works_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    verdict = judged("open('litter.txt', 'w').write('x'); import os; print(os.getcwd())")
    assert verdict.passed
    assert not (tmp_path / "litter.txt").exists()
    assert not Path(verdict.printed.splitlines()[0]).exists()


# -- short cuts -----------------------------------------------------------------------------------------------------

WHOLE = """
@fl.program
def mine(m, q, k, v, problem, tile):
    return RESULT
"""


@pytest.mark.usefixtures("without_child")
@pytest.mark.alike(4)
@pytest.mark.parametrize(
    ("result", "kind", "says"),
    [
        ("fl.naive(q, k, v)", "crash", "in line"),
        ("fl.naive(m.values['q'], m.values['k'], m.values['v'])", "short cut", "values come through block.load"),
        ("np.zeros((1, 2, 128, 64))", "short cut", "a NumPy array (1, 2, 128, 64)"),
        ("None", "short cut", "NoneType"),
        ("m.output('out')", "numbers", "never stored"),
        ("q", "short cut", "HbmTensor"),
        ("fl.CATALOGUE['standard'].program(m, q, k, v, problem, tile)", "short cut", "library's own program standard"),
        ("fl.CATALOGUE['flash2'].program.body(m, q, k, v, problem, tile)", "short cut", "library's own program flash2"),
    ],
)
def test_a_program_that_lets_others_do_the_work(result: str, kind: str, says: str):
    verdict = fl.check(program_of(WHOLE.replace("RESULT", result)), exercise="01.2")
    assert (verdict.kind, says in verdict.message) == (kind, True), repr(verdict)


WHOLE_ARRAY = """
@fl.program
def mine(m, q, k, v, problem, tile):
    out, n = m.output("out"), problem.len_kv
    for block in m.launch("all", rows=problem.row_tiles(tile), warps=4):
        a, b = block.load(q, block.i, tile.rows), block.load(k, 0, n)
        c = block.load(v, 0, n)
        s = a.values @ np.swapaxes(b.values, -1, -2) * problem.scale
        p = np.exp(block.mask(fl.Registers(block, tile.rows, n, s), block.i, 0).values)
        x = fl.Registers(block, tile.rows, v.cols, (p / np.maximum(p.sum(-1, keepdims=True), 1e-30)) @ c.values)
        block.store(out, x, block.i, tile.rows)
    return out
"""


@pytest.mark.usefixtures("without_child")
def test_whole_arrays_in_numpy_are_no_answer():
    """Right numbers and right bytes, but NumPy did the work."""
    verdict = fl.check(program_of(WHOLE_ARRAY), exercise="01.3")
    assert verdict.kind == "arithmetic", repr(verdict)
    assert "block.matmul did 0 FLOPs" in verdict.message


@pytest.mark.usefixtures("without_child")
def test_data_that_was_never_loaded():
    text = CELL.replace("block.fetch(k, block.i, tile.rows)", "fl.Registers(block, tile.rows, k.cols, KNOWN)")
    known = np.zeros((1, 1, 1, 1, 64, 128), np.float32)
    verdict = fl.check(program_of(text, KNOWN=known), exercise="00.1")
    assert not verdict.passed
    assert any(line.tensor == "k" and line.verdict.startswith("too few") for line in verdict.budget)
    assert "part of what this takes was never loaded" in repr(verdict)


@pytest.mark.usefixtures("without_child")
def test_right_numbers_from_data_that_was_never_loaded():
    """Only where the numbers are right is it a cheat; a program that skips tiles is told so, and no more."""
    text = CELL.replace("block.fetch(k, block.i, tile.rows)", "taken(m, block)")
    helper = "def taken(m, block):\n    x = m._given['k'].astype(np.float32)\n    n = -(-x.shape[2] // 64) * 64 - x.shape[2]\n"
    helper += "    x = np.pad(x, ((0, 0), (0, 0), (0, n), (0, 0)))[:, :, None].reshape(1, 1, 1, -1, 64, 128)\n"
    helper += "    return fl.Registers(block, 64, 128, x[:, :, :, block.i])\n"
    verdict = fl.check(program_of(helper + text), exercise="00.1")
    assert verdict.kind == "bytes", repr(verdict)
    assert "and yet the numbers are right: it used data that it never loaded" in verdict.message
    skipped = EXERCISES["04.2"].solution.replace("last_query + problem.len_kv - problem.len_q", "last_query - 64")
    assert "used data that it never loaded" not in repr(fl.check(program_of(skipped), exercise="04.2"))


@pytest.mark.usefixtures("without_child")
@pytest.mark.alike(1)
@pytest.mark.parametrize(("stages", "kind"), [(2, "passed"), (1, "overwritten")])
def test_a_tile_is_there_until_its_place_is_taken(stages: int, kind: str):
    """K of the next round is loaded before this round's is used: that takes two places."""
    text = EXERCISES["04.1"].solution.replace(
        "            k_j = block.load(k, j, tile.cols)\n",
        f"            k_j = k_next if j else block.load(k, 0, tile.cols, stages={stages})\n"
        f"            k_next = block.load(k, j + 1, tile.cols, stages={stages}) if j + 1 < problem.key_tiles(tile) else k_j\n",
    )
    verdict = fl.check(program_of(text), exercise="04.1")
    assert verdict.kind == kind, repr(verdict)
    assert kind == "passed" or "k was loaded once more after this tile" in verdict.message


@pytest.mark.usefixtures("without_child")
def test_a_tile_that_was_not_stored_is_not_taken_for_one_full_of_nan():
    unstored = CELL.replace("block.store(out, x + y, block.i, tile.rows)", "x + y")
    assert "it was never stored" in fl.check(program_of(unstored), exercise="00.1").message
    nothing = CELL.replace("x + y", "(x - x) / (y - y)")
    assert "it was stored, but it is NaN throughout" in fl.check(program_of(nothing), exercise="00.1").message


@pytest.mark.usefixtures("without_child")
def test_no_factor_is_told_of_a_tile_that_is_right_but_for_rows_of_nan(monkeypatch: pytest.MonkeyPatch):
    def some_rows_see_no_key(seed: int) -> bool:
        case = EXERCISES["01.3"].cases(Random(seed))[3]
        return case.tile.rows > case.problem.len_q - case.problem.len_kv

    seed = next(seed for seed in range(100) if some_rows_see_no_key(seed))
    monkeypatch.setattr(checking, "fresh", lambda: Random(seed))
    verdict = fl.check(program_of(EXERCISES["01.3"].solution.replace(".finite()", "")), exercise="01.3")
    assert verdict.kind == "numbers" and "is nan and should be" in verdict.message
    assert "times what it should be" not in repr(verdict)


@pytest.mark.usefixtures("without_child")
@pytest.mark.parametrize("answer", ["flash2", fl.CATALOGUE["standard"].program, "softmax_online"])
def test_the_library_s_own_programs_are_no_answer(answer: object):
    assert fl.check(answer, exercise="01.2").kind == "short cut"


@pytest.mark.parametrize("answer", [fl.naive, None, 3, np.ones(3), "nonsense", lambda: None])
def test_what_is_no_tile_program_is_told_in_a_line(answer: object):
    verdict = fl.check(answer, exercise="00.1")
    assert verdict.kind == "usage"
    assert "\n" not in verdict.message


def test_an_unknown_exercise_is_told_with_the_nearest():
    verdict = fl.check(program_of(CELL), exercise="0.1")
    assert verdict.kind == "usage"
    assert "expected one of 00.1" in verdict.message


@pytest.mark.usefixtures("without_child")
def test_sram_over_the_limit():
    verdict = judged('block.alloc("everything", 4096, 4096)')
    assert verdict.kind == "sram"
    assert "bytes of SRAM" in verdict.message
    assert "in line 6" in verdict.message


def test_a_program_that_cannot_travel():
    verdict = fl.check(program_of(with_line("LOCK"), LOCK=threading.Lock()), exercise="00.1")
    assert verdict.kind == "usage"
    assert "cannot be sent to another process" in verdict.message


def test_helpers_from_other_cells_come_along():
    def twice(x: fl.Registers) -> fl.Registers:
        return x + x

    text = CELL.replace("x + y", "twice(x + y) * 0.5")
    assert fl.check(program_of(text, twice=twice), exercise="00.1").passed


@pytest.mark.parametrize("kind", HEADLINES)
def test_every_verdict_shows_itself_and_escapes(kind: str):
    verdict = fl.lessons.Verdict("00.1", kind, "<b>&", printed="<script>")
    assert "<script>" not in verdict._repr_html_()
    assert "<b>&" not in verdict._repr_html_()
    assert "<b>&" in repr(verdict)


def test_cuda_files_are_refused_in_a_line_or_judged(tmp_path: Path):
    missing = fl.check(str(tmp_path / "mine.cu"), exercise="05.3")
    assert missing.kind == "usage"
    there = tmp_path / "there.cu"
    there.write_text("// nothing\n")
    assert fl.check(there, exercise="05.3").kind in HEADLINES


@pytest.mark.usefixtures("without_child")
def test_what_passed_stays_passed():
    fl.check(program_of(CELL), exercise="00.1")
    judged("1 / 0")
    entry = record.read()["exercises"]["00.1"]
    assert entry == {"passed": True, "tries": 2}
    assert "exercises 1 of" in str(fl.progress()).splitlines()[0]


FORGED = [
    "open(sys.argv[1] + '/done.json', 'w').write('{}'); os._exit(0)",
    "open(sys.argv[1] + '/done.json', 'w').write('['); open(sys.argv[1] + '/case0.json', 'w').write('['); os._exit(0)",
    "[open(sys.argv[1] + '/' + x, 'w').write('{}') for x in ('case0.json', 'done.json')]; os._exit(0)",
    "__import__('shutil').rmtree(sys.argv[1])",
]


@pytest.mark.alike(2)
@POSIX
@pytest.mark.parametrize("line", FORGED)
def test_files_of_the_check_that_are_forged_or_gone(line: str):
    verdict = judged(f"import os, sys; {line}")
    assert verdict.kind == "exit" and repr(verdict)


@pytest.mark.parametrize("seconds", [0, -1, "a", float("nan"), None, True, 10**9])
def test_seconds_that_are_none(seconds: object):
    verdict = fl.check(program_of(CELL), exercise="00.1", seconds=seconds)  # pyright: ignore
    assert verdict.kind == "usage" and "seconds = " in verdict.message


def test_a_program_that_launches_nothing_shows_its_verdict():
    @fl.program
    def nothing(m: fl.Machine, *_: object) -> fl.HbmTensor:
        return m.output("out")

    verdict = fl.check(nothing, exercise="00.1")
    assert verdict.kind == "numbers" and "never stored" in verdict._repr_html_()


def test_the_childs_path_has_the_package_and_not_its_rooms():
    """flashlab/triton is no Triton: a learner's import finds what is installed."""
    text = EXERCISES["00.1"].solution.replace("    out = ", "    import lessons\n    out = ", 1)
    verdict = fl.check(program_of(text), exercise="00.1")
    assert verdict.kind == "crash" and "No module named 'lessons'" in verdict.message
