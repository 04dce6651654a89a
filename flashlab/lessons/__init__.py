"""The lessons' machinery: predictions before experiments, exercises with byte budgets, progress."""

from flashlab.lessons.catalogue import class_solution, kernel_solution, solution
from flashlab.lessons.checking import check
from flashlab.lessons.prediction import Answer, predict
from flashlab.lessons.record import Progress, progress
from flashlab.lessons.verdict import Verdict

__all__ = [
    "Answer",
    "Progress",
    "Verdict",
    "check",
    "class_solution",
    "kernel_solution",
    "predict",
    "progress",
    "solution",
]
