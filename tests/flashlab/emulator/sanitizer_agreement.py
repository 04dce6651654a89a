"""The zoo of seeded faults under compute-sanitizer on a GPU, and beside it what the emulator says of them on a CPU.

    python -m tests.flashlab.emulator.sanitizer_agreement [--out docs/results] [--only TEXT] [--workers 8] [--timeout 60]

Every mutant of tests/flashlab/emulator/zoo.py that one of the four tools is made for runs under that tool, and so does each sound
kernel, which must have no findings. Mutants that hang a GPU come last, one at a time, and are killed. The file says what
each side found and where; it needs a GPU, CuPy, compute-sanitizer and a C++ compiler, and takes about three minutes.
`--run NAME` launches one mutant (`sound:NAME`: the same from the real sources) and is what the tools look at.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import kernels_cu  # noqa: E402
from flashlab.measure import results, sanitizers  # noqa: E402
from flashlab.measure.results import Data, Kind, markdown_table  # noqa: E402
from flashlab.measure.sanitizers import OPTIONS, Ran  # noqa: E402
from flashlab.run import nvrtc  # noqa: E402
from flashlab.run.arrays import cupy  # noqa: E402
from simulator.errors import Unavailable, UsageError, unknown  # noqa: E402
from tests.flashlab.emulator.mutant import Mutant, sound_job  # noqa: E402
from tests.flashlab.emulator.run import Job, Launch, Pointer, emulate  # noqa: E402
from tests.flashlab.emulator.zoo import ZOO  # noqa: E402

HANG_TIMEOUT = 20
LAUNCHING = "launching"  # what never says so didn't hang a GPU


@dataclass(frozen=True)
class Row:
    """One mutant, or one sound kernel. `emulator` and `emulator_line`: its finding; `findings`: how much the tool found (None:
    it never came to its end), `gpu_lines`: the lines that it names. `same_line`: the emulator's is among them."""

    target: str
    kernel: str
    sound: bool
    emulator: str
    emulator_line: str
    tool: str
    findings: int | None
    first: str
    gpu_lines: tuple[str, ...]
    same_line: bool
    verdict: str
    seconds: float


def seen() -> list[Mutant]:
    """The mutants that a tool of compute-sanitizer is made for, and those that a GPU shows by hanging; these come last."""
    return sorted((m for m in ZOO if m.tool or m.hangs), key=lambda m: m.hangs)


def sound() -> list[Mutant]:
    """A mutant for each kernel, problem and tool, to run its kernel without the fault."""
    return list({(m.kernel, m.problem, m.tool): m for m in seen() if m.tool and not m.hangs}.values())


# In a process of its own: the launches


def run(name: str) -> None:
    """Launch a mutant, or `sound:` and a mutant's name, each array in an allocation of its own, to the byte."""
    kind, _, rest = name.rpartition(":")
    mutant = {m.name: m for m in ZOO}.get(rest)
    if mutant is None:
        raise unknown("run", name, [m.name for m in ZOO])
    cupy().cuda.set_allocator(None)
    launch(sound_job(mutant) if kind else mutant.job())
    print("launched 1 case", flush=True)


def launch(job: Job) -> None:
    """A job's launches on the current GPU."""
    memory = {array.name: cupy().cuda.alloc(array.nbytes) for array in job.arrays}
    for array in job.arrays:
        if array.values is not None:
            memory[array.name].copy_from_host(np.frombuffer(array.values, np.uint8).ctypes.data, array.nbytes)
    kernels = [kernel(each) for each in job.launches]
    print(LAUNCHING, flush=True)
    for each, entry in zip(job.launches, kernels, strict=True):
        arguments = tuple(a.at(memory[a.array].ptr) if isinstance(a, Pointer) else a for a in each.arguments)
        entry(each.grid, each.block, arguments, shared_mem=each.sram)
    cupy().cuda.runtime.deviceSynchronize()


def kernel(each: Launch) -> Any:
    """A launch's kernel, compiled by CuPy with lines, or from its cache."""
    code, options = source(each)
    found = cupy().RawModule(code=code, options=options).get_function(each.entry)
    if each.sram > found.max_dynamic_shared_size_bytes:
        found.max_dynamic_shared_size_bytes = each.sram
    return found


def source(each: Launch) -> tuple[str, tuple[str, ...]]:
    """What is compiled: the text, its lines under its own name, and the options."""
    headers = f"-DFL_DIGEST={nvrtc.sources_digest()}"  # CuPy's cache doesn't look into headers
    includes = (*each.includes, f"-I{kernels_cu.include_dir()}")
    code = f'#line 1 "{each.path.name}"\n' + each.path.read_text(encoding="utf-8")
    return code, (*nvrtc.OPTIONS, "-lineinfo", *includes, *each.macros, headers)


# Here: the tools, one process a run


def judge(mutant: Mutant, *, is_sound: bool, said: Ran) -> Row:
    """A tool's verdict beside the emulator's."""
    ran = emulate(sound_job(mutant) if is_sound else mutant.job(), time_limit=1 if mutant.hangs else 20)
    mine = [f for f in ran.findings if f.kind == mutant.sees]
    lines = {str(x) for f in mine for x in (f.line, f.other_line, *f.via) if x}
    found = sanitizers.parse(said.text)
    errors = found.number or int(bool(found.first) and said.killed)
    if is_sound:
        verdict = (
            "FINDINGS" if errors or ran.findings else "clean" if "launched 1 case" in said.text else "not finished"
        )
    elif errors:
        verdict = "both"
    elif said.killed:
        verdict = "hangs" if mutant.hangs and LAUNCHING in said.text else "not finished"
    else:
        verdict = "emulator only" if found.number is not None and "launched 1 case" in said.text else "not finished"
    return Row(
        f"sound:{mutant.name}" if is_sound else mutant.name, mutant.kernel, is_sound,
        ", ".join(dict.fromkeys(f.kind for f in ran.findings)), str(mine[0].line) if mine else "", mutant.tool or "memcheck",
        found.number, found.first if found.first else _last_line(said.text) if verdict == "not finished" else "",
        found.places[:12], bool(lines & set(found.places)), verdict, round(said.seconds, 1),
    )  # fmt: skip


def _last_line(text: str) -> str:
    return (text.strip() or "no output").splitlines()[-1][:200]


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """What is written to the file."""
    faults = [row for row in rows if not row.sound]
    tally = Counter(row.verdict for row in faults)
    seen_by_both = [row for row in faults if row.verdict == "both"]
    summary = {
        "mutants": len(faults),
        "emulator": sum(bool(row.emulator) for row in faults),
        "both": tally["both"],
        "hangs": tally["hangs"],
        "emulator_only": tally["emulator only"],
        "not_finished": sum(row.verdict == "not finished" for row in rows),
        "with_lines": sum(bool(row.gpu_lines) for row in seen_by_both),
        "same_line": sum(row.same_line for row in seen_by_both),
        "sound": sum(row.sound for row in rows),
        "sound_findings": sum(row.sound and row.verdict == "FINDINGS" for row in rows),
        "zoo": len(ZOO),
        "no_tool": len(ZOO) - len(seen()),
    }
    return {"passed": passed(rows), "summary": summary, "rows": [asdict(row) for row in rows]}


def passed(rows: Sequence[Row]) -> bool:
    """Every run came to its end, the sound kernels have no findings, and the emulator found every mutant. What only the
    emulator sees is no failure: the file says it."""
    return bool(rows) and all(
        row.verdict not in ("FINDINGS", "not finished") and (row.sound or row.emulator) for row in rows
    )


def compare(*, only: str, workers: int, timeout: float) -> list[Row]:
    """All runs, several at a time; those that hang at the end, one by one."""
    program = sanitizers.program()
    work = [(m, False) for m in seen()] + [(m, True) for m in sound()]
    work = [(m, is_sound) for m, is_sound in work if only in m.name]

    def one(target: tuple[Mutant, bool]) -> Row:
        mutant, is_sound = target
        command = [sys.executable, str(Path(__file__)), "--run", f"sound:{mutant.name}" if is_sound else mutant.name]
        limit = HANG_TIMEOUT if mutant.hangs else timeout
        tool = mutant.tool or "memcheck"
        said = sanitizers.limited([program, "--tool", tool, *OPTIONS[tool], *command], limit)
        row = judge(mutant, is_sound=is_sound, said=said)
        print(f"{row.verdict:14}{row.tool:10} {row.target} {row.seconds} s", file=sys.stderr, flush=True)
        return row

    with ThreadPoolExecutor(workers) as pool:
        jobs = [sound_job(m) if is_sound else m.job() for m, is_sound in work]
        for future in [pool.submit(kernel, each) for job in jobs for each in job.launches]:
            future.result()  # in CuPy's cache, where the runs find them
        rows = list(pool.map(one, [target for target in work if not target[0].hangs]))
    return rows + [one(target) for target in work if target[0].hangs]


class Zoo(Data):
    """What `report` makes of all runs."""

    passed: bool
    summary: dict[str, int]
    rows: tuple[Row, ...]


def headline(data: Zoo) -> str:
    """How many of the faults each side found."""
    s = data.summary
    return (
        f"of {s['mutants']} seeded faults that a GPU can show, the emulator found {s['emulator']}, compute-sanitizer "
        f"{s['both']} ({s['same_line']} of {s['with_lines']} at the emulator's line), and {s['hangs']} hang it; "
        f"{s['sound_findings']} findings in {s['sound']} runs of sound kernels"
    )


def table(data: Zoo) -> str:
    """A row per fault."""
    header = ("fault", "kernel", "emulator", "line", "tool", "verdict", "tool's lines")
    return markdown_table(
        header,
        [
            (r.target, r.kernel, r.emulator, r.emulator_line, r.tool, r.verdict, ", ".join(r.gpu_lines[:3]))
            for r in data.rows
            if not r.sound
        ],
    )


KIND = Kind(
    "zoo",
    "Memory: seeded faults, the emulator and compute-sanitizer",
    "seeded faults in the kernels: what the emulator finds and what compute-sanitizer finds, with lines",
    "python -m tests.flashlab.emulator.sanitizer_agreement",
    Zoo,
    headline,
    table,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", default=str(results.FOLDER), help="folder of the file (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name has this text; writes no file")
    parser.add_argument("--workers", type=int, default=8, help="runs at a time (%(default)s)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one run (%(default)s)")
    parser.add_argument("--force", action="store_true", help="replace the file of that name")
    parser.add_argument("--run", metavar="NAME", help="launch one mutant and end")
    options = parser.parse_args()
    try:
        if options.run:
            run(options.run)
            return 0
        rows = compare(only=options.only, workers=options.workers, timeout=options.timeout)
        if not options.only:
            names = ["standard", "online_softmax", "flash1", "flash2"]
            print(results.save(KIND, names, report(rows), folder=options.out, replace=options.force))
    except (UsageError, Unavailable) as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if passed(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
