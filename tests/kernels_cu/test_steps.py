"""The .cu files read like the tile programs (the same steps, named and ordered alike) and touch memory through the headers only."""

from __future__ import annotations

import re
from typing import Any

import pytest

import kernels_cu
from simulator import Problem, catalogue, simulate
from tests.simulator.problems import SLOW

NAMES = sorted(path.stem for path in kernels_cu.include_dir().parent.glob("*.cu"))
MARK = re.compile(r"// step: (\w+)(?: (\(.+\)))?$", re.MULTILINE)
ALLOWED = {"__global__", "__grid_constant__", "__launch_bounds__"}


def marks(text: str) -> list[str]:
    """The untagged marks of a .cu, in order."""
    return [name for name, tag in MARK.findall(text) if not tag]


def sources_of(algorithm: str) -> set[str]:
    return {kernel.source for kernel in catalogue.get(algorithm).kernels}


def program_steps(source: str, algorithm: str) -> list[str]:
    """The steps of the launches that `<source>.cu` holds, in the order in which the tile program first takes them."""
    row = catalogue.get(algorithm)
    mask = "dense" if "mask" in row.support.masks else None
    sinks = "sinks" in row.support.masks  # of a backward pass they have a launch
    # more keys than a run of flash_decoding's chunks has, or a chunk of mla_hopper's
    plain = Problem(
        batch=1,
        heads=2,
        kv_heads=1,
        len_q=16,
        len_kv=1030,
        head_dim=16,
        dtype=row.dtypes[0],
        causal=True,
        mask=mask,
        sinks=sinks,
    )
    problem = row.fitted(plain)
    inputs: dict[str, Any] = {"lse": True, **row.operation.draw(problem)}  # of a backward pass the LSE is an input
    run = simulate(algorithm, **inputs, trace=True, causal=True, tile=(16, 16), device=SLOW.replace(sms=200))
    trace, config = run.trace, run.counts.config
    assert trace is not None
    launches = dict.fromkeys(event.launch for event in trace.events)
    here = {e for e, kernel in zip(launches, row.launched(problem, config), strict=True) if kernel.source == source}
    return list(dict.fromkeys(event.step for event in trace.events if event.launch in here))


LAUNCHING = {
    name: [algorithm for algorithm in catalogue.with_kernels() if name in sources_of(algorithm)] for name in NAMES
}
"""The algorithms that launch what a .cu holds."""
PAIRS = [
    (n, a)
    for n, launching in LAUNCHING.items()
    for a in launching
    if n == a or n not in catalogue.CATALOGUE or a not in NAMES
]
"""A .cu and an algorithm whose steps it has: that of its name, one that has no .cu of its own, or else all that share it."""


def trespasses(text: str) -> list[str]:
    """What a .cu may not do itself: PTX, intrinsics, atomics, and reading or writing memory by a pointer of its own."""
    code = re.sub(r"//.*|/\*.*?\*/", "", text)
    pointers = re.findall(r"\b\w+\s*\*+\s*(?:const\s+|__restrict__\s+)*(\w+)\s*[,;)=]", code)
    rules = {
        "PTX": r"\basm\b",
        "an atomic": r"\batomic\w*",
        "memory of a Tensor": r"\.\s*data\b|->",
        "a dereference": r"(?:[=(,{};!?:&|+\-/<>\[]|\breturn)\s*\*\s*[\w(]",
        "a subscript of a pointer": rf"\b(?:{'|'.join(pointers) or '(?!)'})\s*\[",
    }
    found = [f"{what}: {m.group().strip()}" for what, rule in rules.items() for m in re.finditer(rule, code)]
    return found + [f"an intrinsic: {word}" for word in re.findall(r"\b__\w+", code) if word not in ALLOWED]


def test_every_algorithm_has_its_kernel_and_every_kernel_an_algorithm() -> None:
    assert {source for name in catalogue.with_kernels(language="cuda") for source in sources_of(name)} == set(NAMES)
    assert all(LAUNCHING.values())


@pytest.mark.parametrize(("name", "algorithm"), PAIRS)
def test_steps_are_the_tile_programs(name: str, algorithm: str) -> None:
    text = kernels_cu.source(name).read_text(encoding="utf-8")
    steps = program_steps(name, algorithm)
    left_out = set(marks(text)) - set(steps)  # an algorithm that shares a .cu needn't take all its steps
    assert left_out <= {step for other in LAUNCHING[name] if other != algorithm for step in program_steps(name, other)}
    assert [mark for mark in marks(text) if mark not in left_out] == steps
    assert {step for step, _ in MARK.findall(text)} == set(marks(text)), "a tagged mark names a step of its own"
    assert len(re.findall(r"step:", text)) == len(MARK.findall(text)), "a mark that isn't well-formed"


@pytest.mark.parametrize("name", NAMES)
def test_memory_and_intrinsics_only_through_the_headers(name: str) -> None:
    assert trespasses(kernels_cu.source(name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        'asm volatile("bar.sync 0;");',
        "x = __shfl_xor_sync(~0u, x, 1);",
        "float y = __ldg(lse);",
        "atomicAdd(lse, 1.f);",
        "*lse = 1;",
        "x = a + *(p + 1);",
        "lse[row] = x;",
        "void* p = q.data;",
        "float y = tensor->scale;",
        "__shared__ float tile[64];",
    ],
)
def test_a_trespass_is_seen(line: str) -> None:
    assert trespasses(f"void f(float* lse, const Tensor q) {{\n  {line}\n}}")


def test_a_step_out_of_order_is_seen() -> None:
    text = kernels_cu.source("standard").read_text(encoding="utf-8")
    swapped = (
        text.replace("step: load_q", "step: x")
        .replace("step: load_k", "step: load_q")
        .replace("step: x", "step: load_k")
    )
    assert marks(swapped) != program_steps("standard", "standard")
