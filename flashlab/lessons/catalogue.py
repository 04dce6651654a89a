"""The lessons, their exercises and their predictions, by name."""

from __future__ import annotations

import linecache
from importlib import import_module
from typing import Any

import numpy

from flashlab.lessons import (
    lesson00,
    lesson01,
    lesson02,
    lesson03,
    lesson04,
    lesson05,
    lesson06,
    lesson06_triton,
    lesson07,
    lesson08,
    lesson09,
    lesson10,
    lesson11,
    lesson11_kernels,
    lesson12,
    lesson12_kernels,
    lesson13,
    lesson13_extras,
    lesson13_kernels,
    lesson13_managers,
    lesson14,
    lesson15,
    lesson15_forms,
    lesson15_int8,
)
from simulator import Program

_MODULES = (
    lesson00,
    lesson01,
    lesson02,
    lesson03,
    lesson04,
    lesson08,
    lesson09,
    lesson11,
    lesson12,
    lesson13,
    lesson15,
)
_KERNEL_MODULES = (lesson05, lesson06, lesson07, lesson10, lesson11_kernels, lesson12_kernels, lesson13_kernels)

LESSONS = {
    "00": "The memory hierarchy",
    "01": "Standard attention",
    "02": "Softmax, safe and online",
    "03": "FlashAttention-1",
    "04": "FlashAttention-2",
    "05": "CUDA from nothing",
    "06": "Reading flash2.cu",
    "07": "Measuring",
    "08": "FlashAttention-3 on Hopper",
    "09": "Eight bits",
    "10": "An empty page",
    "11": "The way back",
    "12": "One token at a time",
    "13": "Pages and a server's day",
    "14": "Several GPUs",
    "15": "What a cache costs",
}
EXERCISES = {exercise.name: exercise for module in _MODULES for exercise in module.EXERCISES}
KERNEL_EXERCISES = {exercise.name: exercise for module in _KERNEL_MODULES for exercise in module.EXERCISES}
"""Those whose answer is a `.cu` file."""
TRITON_EXERCISES = {exercise.name: exercise for exercise in lesson06_triton.EXERCISES}
"""Those whose answer is a `.py` file, with a kernel in Triton."""
_CLASS_MODULES = (lesson13_managers, lesson13_extras, lesson14, lesson15_forms, lesson15_int8)
CLASS_EXERCISES = {exercise.name: exercise for module in _CLASS_MODULES for exercise in module.EXERCISES}
"""Those whose answer is a class, or a function of a rank."""
PREDICTIONS = {
    prediction.name: prediction
    for module in (*_MODULES, *_KERNEL_MODULES, lesson14)
    for prediction in module.PREDICTIONS
}


def kernel_solution(name: str) -> str:
    """The text of the `.cu` file that solves an exercise.

    >>> kernel_solution("05.1").splitlines()[1]
    '__global__ void axpy(const float* x, const float* y, float* out, float a, int n) {'
    """
    return KERNEL_EXERCISES[name].solution


def solution(name: str) -> Program:
    """The program of an exercise's solution: for what a lesson does with it, whether it has been solved or not.

    >>> import flashlab as fl
    >>> p = fl.Problem(batch=1, heads=1, len_q=64, head_dim=64, dtype="float16")
    >>> fl.count(solution("00.1"), p).hbm.read
    16384
    """
    text, file = EXERCISES[name].solution, f"<solution {name}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # so that a trace can show its lines
    names: dict[str, Any] = {"fl": import_module("flashlab"), "np": numpy}
    exec(compile(text, file, "exec"), names)
    return next(thing for thing in names.values() if isinstance(thing, Program))


def class_solution(name: str) -> Any:
    """The class, or the function, of an exercise's solution.

    >>> manager = class_solution("13.2")(num_blocks=4, block_size=2)
    >>> manager.allocate_slots("a", 3), manager.tables
    (True, {'a': [3, 2]})
    """
    names: dict[str, Any] = {"__name__": __name__, "fl": import_module("flashlab"), "np": numpy}
    text, file = CLASS_EXERCISES[name].solution, f"<solution {name}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(compile(text, file, "exec"), names)
    return next(thing for thing in reversed(names.values()) if callable(thing))
