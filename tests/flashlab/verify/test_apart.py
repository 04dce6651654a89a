"""Targets in a process of their own: the verdict is the same, and a check in which the process ends has failed."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlab as fl
from flashlab.verify import Options, Row, apart, load, steps, verify
from flashlab.verify.bench import Bench
from flashlab.verify.claims import least_seconds, refused
from flashlab.verify.steps import MOST_ENDS, Alarm, Ended, Steps
from tests.flashlab.cli.typed import document, one_line, run

# a thread per element of a row; it dies on more than 4 heads, in one way or another
SOURCE = """
#include <csignal>
constexpr int ABORTS = 1, KILLED = 2, OVERRUNS = 3, ENDLESS = 4;

__global__ void rows(const float* Q, const float* K, const float* V, float* O, int N, int len_k, int d, float scale) {
  extern __shared__ float s[];
  const int row = blockIdx.x, head = blockIdx.y, i = threadIdx.x;
  if (gridDim.y > 4 && row + head + i == 0) {
    if (WRONG == ABORTS) abort();
    if (WRONG == KILLED) raise(SIGKILL);
    if (WRONG == OVERRUNS) sprintf((char*)malloc(24), "%0100000d", 1);  // in the C library, where nothing is watched
    if (WRONG == ENDLESS) for (;;) continue;
  }
  const float *q = Q + (head * N + row) * d, *k = K + head * len_k * d, *v = V + head * len_k * d;
  if (i == 0) {
    float top = -INFINITY, sum = 0;
    for (int j = 0; j < len_k; ++j) {
      s[j] = 0;
      for (int e = 0; e < d; ++e) s[j] += scale * q[e] * k[j * d + e];
      top = fmaxf(top, s[j]);
    }
    for (int j = 0; j < len_k; ++j) sum += s[j] = expf(s[j] - top);
    for (int j = 0; j < len_k; ++j) s[j] /= sum;
  }
  __syncthreads();
  float o = 0;
  for (int j = 0; j < len_k; ++j) o += s[j] * v[j * d + i];
  O[(head * N + row) * d + i] = o;
}
"""
SIZES: Any = {"grid": "len_q, batch * heads", "block": "head_dim", "sram": "4 * len_kv + 4"}
DOMAIN = fl.Domain(dtype="float32", head_dim=16, groups=1, empty=False, pairs=100)
OPTIONS = ("--dtype", "float32", "--head-dims", 16, "--groups", 1, "--no-empty", "--pairs", 100, "--examples", 5)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources") / "rows.cu"
    path.write_text(SOURCE)
    return path


def typed(source: Path, wrong: int, *words: object) -> dict[str, Any]:
    launch = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
    checks = "permutation,batch,determinism"
    return document(
        "verify", f"{source}:rows", *launch, *OPTIONS, "-D", f"WRONG={wrong}", "--check", checks, *words, code=1
    )


def ran(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["status"] != "not run"]


def failures(found: dict[str, Any]) -> list[str]:
    return [row["detail"] for row in found["rows"] if row["status"] == "failed"]


# kernels of `.cu` files


@pytest.mark.long
@pytest.mark.compiler
def test_the_verdict_on_a_kernel_is_the_same_as_here(source: Path) -> None:
    kernel = fl.kernel(source, "rows", **SIZES, macros={"WRONG": 0})
    asked: Any = {"checks": ["rule", "search", "determinism"], "examples": 5}
    here = verify(fl.Adapter(kernel, domain=DOMAIN), **asked)
    shown: list[Row] = []
    there = apart.verify_apart("rows", lambda: fl.Adapter(kernel, domain=DOMAIN), Options(**asked), on_row=shown.append)
    assert here.passed and there.passed
    # a search may meet other problems in another process, where Hypothesis keeps no examples
    assert [replace(x, seconds=0, worst=None) for x in here.rows] == [
        replace(x, seconds=0, worst=None) for x in there.rows
    ]
    assert shown == there.rows


@pytest.mark.alike("1-words0", "2-words1")
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("wrong", "words", "said"),
    [
        (1, (), r"rows.cu:9: exit: thread 0 of block 0 calls abort\(\)"),
        (2, (), "^its process was ended by SIGKILL$"),
        (3, (), "^its process was ended by SIG(ABRT|SEGV)$"),
        (4, ("--time-limit", 1), "rows.cu:12: time limit: thread 0 of block 0 is still running after 1 s"),
    ],
)
def test_a_kernel_that_ends_its_process_or_never_ends(
    source: Path, wrong: int, words: tuple[object, ...], said: str
) -> None:
    found = typed(source, wrong, *words)
    statuses = {"permutation": "passed", "batch": "failed", "determinism": "passed"}
    assert {row["check"]: row["status"] for row in ran(found)} == statuses, "the others are run, in another process"
    [told] = failures(found)
    assert re.search(said, told) and told in found["failing"]["message"]


@pytest.mark.compiler
@pytest.mark.long
def test_a_kernel_by_its_name_runs_apart_in_python_too(source: Path) -> None:
    report = verify(f"{source}:rows", **SIZES, macros={"WRONG": 2}, dtypes=["float32"], checks=["split"])
    assert {row.status for row in report.rows} == {"not run"}, "it has no LSE"
    always = source.with_name("always.cu")
    always.write_text(SOURCE.replace("gridDim.y > 4 && row + head + i == 0", "true"))
    report = verify(f"{always}:rows", **SIZES, macros={"WRONG": 2}, dtypes=["float32"], checks=["rule"])
    failed, rest = report.rows[: MOST_ENDS - 1], report.rows[MOST_ENDS - 1 :]  # it has died in the probe, too
    assert {(row.status, row.detail, row.ended) for row in failed} == {
        ("failed", "its process was ended by SIGKILL", True)
    }
    assert {(row.status, row.detail) for row in rest} == {("not run", "its process had ended 5 times")}


# Python's functions

PYTHON = """
import os, sys
import numpy as np
import flashlab as fl

def right(q, k, v, causal=False):
    return fl.naive(q, k, v, causal=causal).out.astype(q.dtype)

def aborts(q, k, v, causal=False):
    if q.shape[2] == 130: os.abort()
    print("run")
    return right(q, k, v, causal)

def hangs(q, k, v, causal=False):
    while q.shape[2] == 130:
        pass
    return right(q, k, v, causal)

def leaves(q, k, v, causal=False):
    sys.exit("enough")
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.py"
    path.write_text(PYTHON)
    return path


def words_for(module: Path, function: str, checks: str = "determinism,prefix") -> list[object]:
    return ["verify", f"{module}:{function}", "--dtype", "float32", "--check", checks]


def test_a_function_that_ends_its_process(module: Path) -> None:
    found = document(*words_for(module, "aborts"), code=1)
    ends = ("failed", "its process was ended by SIGABRT", True)
    assert [(row["status"], row["detail"], row["ended"]) for row in ran(found)] == [
        ("passed", "", False),
        ends,
        ends,
    ]
    assert found["failing"]["message"] == "determinism, causal: its process was ended by SIGABRT"


def test_a_function_that_never_ends(module: Path) -> None:
    found = document(*words_for(module, "hangs", "determinism"), "--time-limit", 2, code=1)
    row = found["rows"][1]
    assert (row["status"], row["detail"]) == ("failed", "a call was still running after 2 seconds")
    line = 1 + next(n for n, text in enumerate(PYTHON.splitlines()) if "while" in text)
    assert row["place"][0] == str(module) and row["place"][1] in (line, line + 1)


def test_a_function_that_leaves_is_a_failed_check(module: Path) -> None:
    assert set(failures(document(*words_for(module, "leaves"), code=1))) == {"raised SystemExit: enough"}


def test_what_it_prints_stays_out_of_the_document(module: Path) -> None:
    result = run(*words_for(module, "aborts"), "--json", code=1)
    assert "run\n" in result.stderr and "run" not in result.stdout.replace('"not run"', "")


def test_a_target_that_cannot_be_loaded(module: Path) -> None:
    module.write_text("import os; os.abort()")
    said = one_line(*words_for(module, "right"))
    assert said.endswith("theirs.py:right: expected a target that can be loaded: its process was ended by SIGABRT\n")
    assert "nowhere.py" in one_line("verify", "nowhere.py:f")
    assert "--time-limit = -1.0: expected seconds" in one_line("verify", "nowhere.py:f", "--time-limit", -1)
    assert "--time-limit = 3.0: expected nothing" in one_line("verify", "flash2", "--time-limit", 3)


def test_what_is_refused_in_the_child_is_refused_here() -> None:
    def loads_nothing() -> Any:
        raise fl.UsageError("fn", np.zeros((2, 3)), "a function")

    with pytest.raises(fl.UsageError, match=r"^fn = array of float64, \(2, 3\): expected a function$"):
        apart.verify_apart("nothing", loads_nothing, Options())


def test_a_search_costs_one_end() -> None:
    """The case that ended the process isn't made smaller, for each step of that would end another one."""
    ended = list[str]()

    class Once(Steps):
        def step(self, body: Callable[[], Any]) -> Any:
            ended.append("")
            raise Ended("it ended")

    from flashlab.verify import _search  # pyright: ignore[reportPrivateUsage]
    from flashlab.verify.targets import target_of

    bench = Bench(target_of(load("flashlab:naive"), "simulator"), ("float32",), False, 0, Once())
    row, trial = _search(bench, 50, any_tile=False)
    assert (row.status, row.detail, row.ended) == ("failed", "it ended", True) and trial is not None
    assert len(ended) == 1


# the alarm


def test_an_alarm_is_put_off_while_a_call_is_given_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the clock a busy machine would make a right target fail. What is left then rings it, a while later."""
    looks, has, armed = iter([False, False, False, True]), iter([0.0, 3.0, 6.0]), list[float]()
    over: Any = SimpleNamespace(wait=lambda _: next(looks))

    class Watch:
        def __init__(self, _: int) -> None: ...

        seconds = property(lambda _: next(has))

    monkeypatch.setattr(steps, "Stopwatch", Watch)
    monkeypatch.setattr(steps.faulthandler, "dump_traceback_later", lambda seconds, **_: armed.append(seconds))
    with (tmp_path / "where.txt").open("w") as where:
        Alarm(tmp_path, 5)._put_off(where, over)
    assert armed == [5 + 2 * steps.LOOK, 2 + 2 * steps.LOOK, 1e-3]


# a candidate that means harm

HARM = """
import os, sys, json
import numpy as np
import flashlab as fl

DOMAIN = fl.Domain(dtype="float32", head_dim=range(16, 65, 16), groups=1, empty=False)

def right(q, k, v, causal=False):
    return fl.naive(q, k, v, causal=causal).out.astype(q.dtype)

def channel():
    \"\"\"The descriptor of the answers: a pipe that can be written.\"\"\"
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:") and os.write(fd, b"") == 0:
                return fd
        except OSError:
            pass

def writes(q, k, v, causal=False):
    os.write(channel(), b"all is well\\n")
    return right(q, k, v, causal)

def forges(q, k, v, causal=False):
    room = next(f.f_locals["request"].room for f in iter_frames() if "request" in f.f_locals)
    number = next(f.f_locals["request"].number for f in iter_frames() if "request" in f.f_locals)
    said = {"at": room, "shape": list(q.shape), "dtype": q.dtype.name}
    os.write(channel(), json.dumps({"number": number, "kind": "done", "items": [said]}).encode() + b"\\n")
    return right(q, k, v, causal)

def iter_frames():
    frame = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back

def cuts(q, k, v, causal=False):
    out = right(q, k, v, causal)
    folder = next(f.f_locals["self"].folder for f in iter_frames() if hasattr(f.f_locals.get("self"), "folder"))
    os.truncate(folder / "shared.bin", 0)
    return out

def objects(q, k, v, causal=False):
    return np.array([[None]])

def huge(q, k, v, causal=False):
    return np.broadcast_to(np.float32(0), (1 << 12, 1 << 12, 64))

def lse_is_none(q, k, v, causal=False):
    return right(q, k, v, causal), None

adapted = fl.Adapter(right, domain=DOMAIN, supports=lambda p: p.len_q < 200 or "long", names={"causal": "causal"})

@fl.program
def copies(m, q, k, v, problem, tile):
    out = m.output("out")
    for block in m.launch("copies", rows=problem.row_tiles(tile), warps=4):
        block.step("copy")
        block.store(out, block.fetch(v, block.i, tile.rows), block.i, tile.rows)
    return out
"""


@pytest.fixture
def harm(tmp_path: Path) -> Path:
    path = tmp_path / "harm.py"
    path.write_text(HARM)
    return path


@pytest.mark.parametrize(
    ("function", "said"),
    [
        pytest.param("writes", "it wrote among the answers", marks=pytest.mark.long),
        ("forges", "(holds NaN or inf|it wrote among the answers)"),
        ("cuts", "(its process was ended by SIGBUS|the shared memory was cut off|memory outside of it was written)"),
        pytest.param("objects", "what it returned is no array of numbers", marks=pytest.mark.long),
        ("huge", r"it returned an array of the shape \(4096, 4096, 64\)"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="it looks for a descriptor in /proc")
def test_what_answers_falsely_fails(harm: Path, function: str, said: str) -> None:
    found = document("verify", f"{harm}:{function}", "--dtype", "float32", "--check", "reuse", code=1)
    assert re.search(said, failures(found)[0])


def test_an_lse_that_is_promised_is_checked(harm: Path) -> None:
    said = one_line("verify", f"{harm}:lse_is_none", "--lse", "e", "--dtype", "float32", "--check", "reuse")
    assert "lse = e: expected None for a function that returns no (out, lse)" in said.replace("'", "")


def test_the_seed_is_drawn_once_the_target_is_loaded(harm: Path) -> None:
    words = ("verify", f"{harm}:right", "--dtype", "float32", "--check", "reuse")
    assert document(*words)["seed"] != 0, "which it is once in 2^32 times"
    assert document(*words, "--seed", 5)["seed"] == 5
    assert document("verify", "flash2", "--check", "gqa", "--dtype", "float16")["seed"] == 0


def test_an_adapter_of_the_candidates_own_file(harm: Path) -> None:
    """Its domain, and what it supports, come over."""
    found = document("verify", f"{harm}:adapted", "--check", "reuse,long_sums", "--dtype", "float32")
    assert found["domain"] == "dtype float32, head_dim 16 to 64 by 16, groups 1, empty False, masks causal"
    assert {row["status"] for row in found["rows"] if row["check"] == "reuse"} == {"passed"}
    assert "--layout = 'bshd': expected none of them" in one_line("verify", f"{harm}:adapted", "--layout", "bshd")


def test_a_program_runs_apart_too(harm: Path) -> None:
    found = document(
        "verify", f"{harm}:copies", "--check", "byte_counts,permutation", "--dtype", "float32", "--examples", 0, code=1
    )
    assert {(row["check"], row["status"]) for row in ran(found)} >= {
        ("byte_counts", "passed"),
        ("permutation", "failed"),
    }
    assert found["backend"] == "simulator"


def test_python_isolates_on_request() -> None:
    inside = list[int]()

    def wrong(q: Any, k: Any, v: Any) -> Any:
        inside.append(1)
        return q

    asked: Any = {"checks": ["reuse"], "dtypes": ["float32"], "isolate": True}
    report = verify(wrong, **asked)
    assert report.verdict == "failed" and not inside, "its lists are another process's"
    with pytest.raises(fl.UsageError, match=r"^isolate = True: expected False for flash2"):
        verify("flash2", **asked)
    with pytest.raises(fl.UsageError, match=r"^time_limit = -1: expected seconds"):
        verify(wrong, **asked, time_limit=-1)
    with pytest.raises(fl.UsageError, match=r"^time_limit = 5: expected None"):
        verify(wrong, time_limit=5)
    with pytest.raises(fl.UsageError, match=r"^target = 5: expected package:function"):
        verify(5, isolate=True)
    lock = threading.Lock()

    def held(q: Any, k: Any, v: Any) -> Any:
        return lock

    with pytest.raises(fl.UsageError, match=r"^target = .*held: expected one that can go to another process"):
        verify(held, isolate=True)
    with pytest.raises(fl.UsageError, match=r"^isolate = 1: expected True or False"):
        verify(wrong, isolate=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(fl.UsageError, match=r"^quick = True: expected False"):
        verify(wrong, quick=True, full=True)


def test_conventions_are_said_by_the_judge(harm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(harm.parent)
    asked: Any = {"isolate": True, "quick": True, "checks": ["reuse"], "dtypes": ["float32"]}
    report = verify(
        "harm:right", **asked, adapt=lambda fn: fl.Adapter(fn, causal="top-left", domain=fl.Domain(groups=1))
    )
    assert report.verdict == "passed, LSE unchecked" and "groups 1" in report.domain
    with pytest.raises(fl.UsageError, match=r"^target = harm:adapted: expected a function without conventions"):
        verify("harm:adapted", **asked, adapt=fl.Adapter)
    with pytest.raises(fl.UsageError, match=r"^adapt = 5: expected a function that returns an Adapter"):
        verify("harm:right", **asked, adapt=5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(fl.UsageError, match=r"^adapt = .*: expected None"):
        verify("harm:right", adapt=fl.Adapter)


@pytest.mark.torch
@pytest.mark.parametrize("operation", ["attention", "gradients"])
def test_torch_is_in_the_other_process(tmp_path: Path, operation: str) -> None:
    """Here its arrays are NumPy's, of bfloat16 too."""
    (tmp_path / "theirs.py").write_text(
        "import torch\ndef attention(q, k, v):\n    p = torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, -1)\n"
        "    return (p @ v.float()).to(q.dtype)\n"
    )
    words = ["--framework", "torch", "--operation", operation, "--dtype", "bfloat16", "--groups", 1, "--no-empty"]
    found = document("verify", f"{tmp_path}/theirs.py:attention", *words, "--check", "determinism")
    assert found["counts"]["passed"] and not found["counts"]["failed"]


def test_the_same_memory_is_handed_over(harm: Path) -> None:
    """`reuse` sees a cache by address, in this process too."""
    kept: dict[Any, Any] = {}

    def cached(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        where = (q.ctypes.data, q.shape)
        if where not in kept:
            kept[where] = fl.naive(q, k, v, causal=causal).out.astype(q.dtype)
        return kept[where]

    report = verify(cached, checks=["reuse"], dtypes=["float32"], examples=0)
    assert report.verdict == "failed" and "off by" in report.rows[0].detail
    kept.clear()
    assert verify(cached, checks=["determinism"], dtypes=["float32"], examples=0).passed


# claims


def test_no_time_is_below_what_the_memory_takes() -> None:
    p = fl.Problem(batch=1, heads=8, len_q=4096, head_dim=64, dtype="float16")
    h100 = fl.Device.named("h100")
    least = least_seconds(p)
    assert least == 3 * 8 * 4096 * 64 * 2 / h100.bandwidth, "q, k and v; out may stay in the L2"
    assert refused(p, least) == "" and "can't be true from cold inputs" in refused(p, least * 0.99)
    small = h100.replace(l2=1024)
    assert least_seconds(p, small) == least * 4 / 3 - 1024 / h100.bandwidth
    windowed = p.replace(len_q=1, len_kv=4096, causal=True, window=(127, 0))
    assert least_seconds(windowed) == 8 * 64 * 2 * (1 + 2 * 128) / h100.bandwidth
    ragged = p.replace(len_q=None, lengths=((3, 100), (5, 10)))
    assert least_seconds(ragged) == 8 * 64 * 2 * (8 + 2 * 110) / h100.bandwidth
    assert least_seconds(p.replace(mask="dense")) < least, "a mask may hide keys"
    with pytest.raises(fl.UsageError, match="^seconds = -1: expected a time"):
        refused(p, -1)


def test_flashlab_time_refuses_a_claim() -> None:
    words = ("time", "flash2", "--heads", 8, "--len-q", 4096, "--head-dim", 64)
    assert "µs can't be true from cold inputs" in run(*words, "--claim", 1, code=1).stdout
    assert document(*words, "--claim", 1, code=1)["refused"].startswith("1 µs can't be true")
    assert document(*words, "--claim", 1e6)["refused"] == ""
    assert "refused" not in document(*words)
    assert "--claim = -1.0: expected a time" in one_line(*words, "--claim", -1)
