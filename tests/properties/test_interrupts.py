"""An interrupt (Ctrl-C) ends a run: threads of the simulator, a launch of the emulator, and what is in a child process.

Each run here would take hours. None of these tests looks at a clock: pytest's time limit fails a run that goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_info, threadpool_limits  # pyright: ignore

import flashlab as fl
from flashlab.base.scratch import scratch
from tests.simulator.problems import zeros
from tests.tiers import one_of_each

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys
import flashlab as fl

@fl.program
def endless(m, q, k, v, problem, tile):
    for block in m.launch("endless", warps=1):
        os.write(1, b"running\\n")
        while True:
            block.step("again")
"""
KERNELS = {
    "an empty loop": "__global__ void k(float* x) { for (;;); }",
    "a loop": "__global__ void k(volatile float* x) { for (;;) x[0] = x[0] + 1; }",
    "a spin": "__global__ void k(volatile float* x) { while (x[0] == 0) __syncwarp(); }",
    "threads that wait": "__global__ void k(volatile float* x) { for (;;) __syncthreads(); }",
}
EMULATED = """
import sys, numpy as np
from pathlib import Path
from flashlab.emulator.build import build
from flashlab.emulator.library import Arena
library, arena = build(Path(sys.argv[1])), Arena()
arena.put("x", np.zeros(1, np.float32))
print("running", flush=True)
library.launch("k", (4,), (64,), [np.uint64(arena.pointer("x")).tobytes()], arena)
"""
TELLING = """
import os, sys, threading, time
from flashlab.cli import main

def tell():
    while not os.path.exists("pid"):
        time.sleep(0.01)
    print("running", flush=True)

threading.Thread(target=tell, daemon=True).start()
"""
"""A run whose child leaves a file when it has begun."""
TERMINATED = """
import signal, sys
from flashlab.cli import main
from flashlab.verify.bench import Bench

Bench.run = lambda *_, **__: signal.raise_signal(signal.SIGTERM)
sys.argv[1:] = ["verify", "flash2", "--check", "determinism", "--dtype", "float16"]
main()
"""


def interrupted(*command: str, cwd: Path, path: str = str(ROOT)) -> tuple[int, str]:
    """The status and stderr of a Python that was interrupted as soon as it had said that it is running."""
    environment = {**os.environ, "PYTHONPATH": path}
    # whoever runs the tests in the background has interrupts ignored, and children inherit that
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    with subprocess.Popen(
        [sys.executable, *command], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=listen,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "running\n"
            child.send_signal(signal.SIGINT)
            _, said = child.communicate()
        finally:
            child.kill()
    return child.returncode, said


@pytest.mark.alike(1)
@pytest.mark.parametrize("batch", ["1", "2"])
def test_simulator(tmp_path: Path, batch: str) -> None:
    """With several batches each thread has some of them. The first part that runs says so."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    command = "-m", "flashlab", "simulate", "mine.py:endless", "--batch", batch, "--heads", "1", "--len-q", "1024"
    status, said = interrupted(*command, cwd=tmp_path)
    assert status == 130 and "Traceback" not in said


LOADING = """
import time
print("running", flush=True)
while True:
    try:
        time.sleep(1)
    except BaseException:  # some module may take an interrupt for a failure of its own
        pass
"""
SCRIPT = "import sys; sys.argv = ['/usr/bin/flashlab', 'count', 'flash2']; from flashlab.cli import main; main()"


@pytest.mark.parametrize("command", [("-c", SCRIPT), ("-m", "flashlab", "count", "flash2")], ids=["script", "-m"])
def test_while_modules_load(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Nothing was begun, and there is nothing to say."""
    (tmp_path / "simulator.py").write_text(LOADING)  # it is the first that takes time to load
    assert interrupted(*command, cwd=tmp_path, path=f"{tmp_path}{os.pathsep}{ROOT}") == (130, "")


def test_once_they_are_loaded_an_interrupt_is_an_exception_again(tmp_path: Path) -> None:
    """Commands end what they have started. One that is ignored stays so."""
    tell = "import signal, sys; from flashlab.base import interrupts; signal.signal(signal.SIGINT, {}); "
    tell += (
        "sys.argv[0] = 'flashlab'; interrupts.listen(); interrupts.loaded(); print(signal.getsignal(signal.SIGINT).{})"
    )
    for handler, name in (("signal.default_int_handler", "__name__"), ("signal.SIG_IGN", "name")):
        done = subprocess.run(
            [sys.executable, "-c", tell.format(handler, name)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.stdout.strip() == handler.partition(".")[2]


def test_what_is_ended_is_no_finding(tmp_path: Path) -> None:
    """SIGTERM ends a verification, also in the middle of a check. It is nothing that the target raised."""
    (tmp_path / "run.py").write_text(TERMINATED)
    command = [sys.executable, "run.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


@pytest.mark.alike(1)
@pytest.mark.compiler
@pytest.mark.parametrize("kernel", one_of_each(KERNELS, kind=lambda name: "loop" in name))
def test_emulator(tmp_path: Path, kernel: str) -> None:
    (tmp_path / "k.cu").write_text(KERNELS[kernel])
    (tmp_path / "run.py").write_text(EMULATED)
    status, said = interrupted("run.py", "k.cu", cwd=tmp_path)
    assert status in (-signal.SIGINT, 130) and said.endswith("KeyboardInterrupt\n")


@pytest.mark.compiler
def test_a_kernel_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The child is ended with what waits for it."""
    (tmp_path / "k.cu").write_text(KERNELS["a loop"].replace("{", '{ FILE* f = fopen("pid", "w"); fclose(f);', 1))
    (tmp_path / "run.py").write_text(
        TELLING
        + "sys.argv[1:] = ['emulate', 'k.cu', '--grid', '1', '--block', '1', '--arg', 'x=float32[1]', '--time-limit', '0']\n"
        "main()\n"
    )
    status, said = interrupted("run.py", cwd=tmp_path)
    assert status == 130 and "Traceback" not in said


@pytest.mark.compiler
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """It can't be ended by it. The folder that both leave is deleted by the next one that makes such a folder."""
    (tmp_path / "tmp").mkdir()
    os.mkfifo(tmp_path / "alive")  # at an end once the child, which alone writes to it, has ended
    said = '{ FILE* f = fopen("alive", "w"); fputs("x", f); fflush(f);'
    (tmp_path / "k.cu").write_text(KERNELS["a loop"].replace("{", said, 1))
    command = (
        "-m",
        "flashlab",
        "emulate",
        "k.cu",
        "--grid",
        "1",
        "--block",
        "1",
        "--arg",
        "x=float32[1]",
        "--time-limit",
        "0",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen([sys.executable, *command], cwd=tmp_path, env=environment) as parent:
        try:
            with (tmp_path / "alive").open() as alive:
                assert alive.read(1) == "x"
                parent.kill()
                assert alive.read() == ""
        finally:
            parent.kill()
    [left] = (tmp_path / "tmp").iterdir()
    strangers = [tmp_path / "tmp" / name for name in ("flashlab-scratch-mine", "flashlab-mine")]
    for path in (left, *strangers):
        path.mkdir(exist_ok=True)
        os.utime(path, (0, 0))
    with scratch(within=tmp_path / "tmp") as held:
        os.utime(held, (0, 0))
        with scratch(within=tmp_path / "tmp") as other:
            assert set((tmp_path / "tmp").iterdir()) == {held, other, *strangers}
    assert set((tmp_path / "tmp").iterdir()) == set(strangers)


def test_the_others_stop_when_one_has_failed() -> None:
    """What one thread raises ends the run, though another would never end."""
    first = threading.Lock()

    @fl.program
    def fails(
        m: fl.Machine, q: fl.HbmTensor, k: fl.HbmTensor, v: fl.HbmTensor, problem: fl.Problem, tile: fl.Tile
    ) -> None:
        for block in m.launch("fails", warps=1):
            if first.acquire(blocking=False):
                raise ZeroDivisionError
            while True:
                block.step("again")

    p = fl.Problem(batch=2, heads=1, len_q=1024, head_dim=16, dtype="float16")
    with pytest.raises(ZeroDivisionError):
        fl.simulate(fails, *fl.random_inputs(p))


def blas_threads() -> list[int]:
    pools: Any = threadpool_info()
    return [pool["num_threads"] for pool in pools]


def test_calls_that_overlap_leave_the_threads_of_blas() -> None:
    """The first to come is the first to go: what the second one found was the first one's single thread."""
    entered, left = threading.Event(), threading.Event()
    p = fl.Problem(batch=1, heads=1, len_q=16, head_dim=16, dtype="float16")
    data = fl.random_inputs(p)

    def program(wait: threading.Event | None, tell: threading.Event) -> fl.Program:
        @fl.program
        def one(
            m: fl.Machine, q: fl.HbmTensor, k: fl.HbmTensor, v: fl.HbmTensor, problem: fl.Problem, tile: fl.Tile
        ) -> fl.HbmTensor:
            tell.set()
            if wait is not None:
                wait.wait()
            return zeros(m, problem, tile)

        return one

    second = threading.Thread(target=lambda: fl.simulate(program(left, entered), *data))

    @fl.program
    def first(
        m: fl.Machine, q: fl.HbmTensor, k: fl.HbmTensor, v: fl.HbmTensor, problem: fl.Problem, tile: fl.Tile
    ) -> fl.HbmTensor:
        second.start()
        entered.wait()
        return zeros(m, problem, tile)

    with threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        fl.simulate(first, *data)
        left.set()
        second.join()
        assert 2 in before and blas_threads() == before
