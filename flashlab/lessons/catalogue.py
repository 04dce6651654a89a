"""The lessons, their exercises and their predictions, by name."""

from __future__ import annotations

from flashlab.lessons import lesson00, lesson01, lesson02

_MODULES = (lesson00, lesson01, lesson02)

LESSONS = {
    "00": "The memory hierarchy",
    "01": "Standard attention",
    "02": "Softmax, safe and online",
}
EXERCISES = {exercise.name: exercise for module in _MODULES for exercise in module.EXERCISES}
PREDICTIONS = {prediction.name: prediction for module in _MODULES for prediction in module.PREDICTIONS}
