"""What lessons 08 and 09 show: steps of a tile program beside the lines of its kernel, and what was measured on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import takewhile
from typing import Any

import kernels_cu
from flashlab.lessons.lesson07 import measured as of_the_lessons
from flashlab.lessons.show import Shown, bars
from flashlab.player.sources import marks, step_lines
from simulator import Problem, random_inputs, simulate
from simulator.catalogue import ladder

RUNGS = tuple(ladder("flash3", "flash2"))


class Beside:
    """Steps of a tile program and of its `.cu`: side by side in a notebook, one after the other in a terminal."""

    def __init__(self, steps: Mapping[str, tuple[str, str]]) -> None:
        self.steps = steps

    def __repr__(self) -> str:
        return "\n\n".join(f"{program}\n\n{kernel}" for program, kernel in self.steps.values())

    def _repr_html_(self) -> str:
        cell = '<td style="text-align: left; vertical-align: top"><pre style="white-space: pre-wrap">{}</pre></td>'
        rows = "".join(f"<tr>{''.join(cell.format(escape(x)) for x in pair)}</tr>" for pair in self.steps.values())
        head = "".join(f'<th style="text-align: left">{x}</th>' for x in ("tile program", "CUDA"))
        return f"<table><tr>{head}</tr>{rows}</table>"


def beside(algorithm: str, *steps: str) -> Beside:
    """The named steps of an algorithm of one launch, as its tile program and as its kernel say them.

    >>> print(beside("flash2", "load_k").steps["load_k"][0].splitlines()[0])
    block.step("load_k")
    """
    p = Problem(batch=1, heads=1, len_q=64, head_dim=64, dtype="float16")
    trace = simulate(algorithm, *random_inputs(p), trace=True).trace
    assert trace is not None
    text = kernels_cu.source(algorithm).read_text(encoding="utf-8")
    kernel, found = marks(text), text.splitlines()
    chosen: dict[str, tuple[str, str]] = {}
    for step in steps:
        event = next(event for event in trace.events if event.step == step)
        first, source = trace.sources[event.source]
        start, end = step_lines(source, first, event.line)
        program = _flush(source.splitlines()[start - first : end - first + 1])
        chosen[step] = (
            program,
            "\n\n".join(_flush(_paragraph(found[mark.first - 1 : mark.last])) for mark in kernel[step]),
        )
    return Beside(chosen)


def excerpt(file: str, start: str) -> str:
    """The part of a `.cu`, or of a header, from the line that begins with `start` to the brace that closes it.

    >>> print(excerpt("warpgroup.cuh", "DEVICE int warpgroup_id"))
    DEVICE int warpgroup_id() { return uniform(static_cast<int>(threadIdx.x) / WARPGROUP); }
    """
    headers = kernels_cu.include_dir()
    folder = headers if file.endswith(".cuh") else headers.parent
    found = (folder / file).read_text(encoding="utf-8").splitlines()
    first = next(n for n, line in enumerate(found) if line.startswith(start))
    if found[first].endswith("}"):
        return found[first]
    last = next(n for n, line in enumerate(found[first:], first) if line.startswith("}"))
    return "\n".join(found[first : last + 1])


def measured(kind: str) -> Mapping[str, Any]:
    """What was measured of the "ladder", of "fp8", of an SM's "rates", or by a "profile". It prints on
    which GPU and when, and which kernels have changed since.

    >>> len(measured("fp8")["accuracy"])
    [measured on another machine: NVIDIA H200, 23 November 2026]
    4
    """
    data = of_the_lessons()[kind]
    print(f"[measured on another machine: {data['measured']}]")
    return data


def climb(ladder: Mapping[str, Any], *, head_dim: int, tokens: int, causal: bool) -> Shown:
    """The rungs' TFLOP/s in one cell of the benchmark, and cuDNN's."""
    speed = {
        row["peer"] or RUNGS[-1]: row["tflops"]
        for row in ladder["rows"]
        if (row["head_dim"], row["length"], row["causal"]) == (head_dim, tokens, causal)
    }
    names = [*RUNGS, "cudnn"]
    title = f"TFLOP/s, head dim {head_dim}, {tokens:,} tokens, {'causal' if causal else 'full'}"
    return bars(names, {"TFLOP/s": [speed[name] for name in names]}, of="TFLOP/s", title=title)


def _paragraph(found: list[str]) -> list[str]:
    """Lines up to the end of the loop or branch that the first is in: a mark may cover more than its step."""
    depth = _indent(found[0])
    inside = list(takewhile(lambda line: not line.strip() or line.startswith("#") or _indent(line) >= depth, found))
    return "\n".join(inside).rstrip().splitlines()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _flush(found: list[str]) -> str:
    """Lines without the indentation that all of them share."""
    least = min((_indent(line) for line in found if line.strip() and line[0] != "#"), default=0)
    return "\n".join((line if line.startswith("#") else line[least:]).rstrip() for line in found)
