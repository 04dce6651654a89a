"""The zoo: seeded bugs, one line each, and the check of `flashlab.verify` that is meant to kill it.

A mutant is a patch of real source text: a tile program, the machine below it, or a `.cu`. It counts by its mechanism, of
which no two are alike. `blind` says what the usual test would say: `allclose(1e-2)` on one aligned, unmasked case does
not see it.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from tests.patches import patched

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`find`, which occurs once in `file`, becomes `put`; `check` must fail then, on `algorithm`.

    In a kernel `find` is code, looked for within `step` (None: anywhere), as tests/patches.py does.
    """

    mechanism: str
    algorithm: str
    file: str
    find: str
    put: str
    check: str
    blind: bool
    dtype: str = "float16"
    step: str | None = None

    @property
    def source(self) -> str:
        """The patched text."""
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if not self.file.endswith(".py"):
            return patched(text, self.find, self.put, step=self.step)
        assert text.count(self.find) == 1, (
            f"{self.mechanism}: {self.find!r} occurs {text.count(self.find)} times in {self.file}"
        )
        assert "\n" not in self.find, "one line"
        return text.replace(self.find, self.put)

    @property
    def name(self) -> str:
        return self.mechanism.replace(" ", "-").replace(",", "")


def module_from(source: str, like: str) -> ModuleType:
    """A module of patched source, beside the real one."""
    name = f"{like}__mutant"
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))
    sys.modules[name] = module  # dataclasses look their module up
    try:
        exec(compile(source, f"{like} (mutant)", "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module


@contextmanager
def mutated_program(mutant: Mutant) -> Iterator[Any]:
    """The tile program with the bug in it, or the real one on a machine with the bug in it."""
    from simulator import CATALOGUE

    name_of_real = mutant.file.removesuffix(".py").replace("/", ".")
    module = module_from(mutant.source, name_of_real)
    if "/programs/" in mutant.file:
        program = getattr(module, mutant.algorithm)
        program.configured(CATALOGUE[mutant.algorithm].program.configure)
        yield program
        return
    owner_name, name = _changed_method((ROOT / mutant.file).read_text(encoding="utf-8"), mutant.source)
    machine = importlib.import_module(name_of_real)
    owner, code = getattr(machine, owner_name), vars(getattr(module, owner_name))[name].__code__
    real = getattr(owner, name)
    buggy = FunctionType(code, vars(machine), name, real.__defaults__)
    buggy.__kwdefaults__ = real.__kwdefaults__
    setattr(owner, name, buggy)
    try:
        yield CATALOGUE[mutant.algorithm].program
    finally:
        setattr(owner, name, real)


def _changed_method(real: str, patched: str) -> tuple[str, str]:
    """The one method that the patch changes: it alone is put into the real class, so that everybody's types stay the same."""
    found: list[set[tuple[str, str, str]]] = []
    for source in (real, patched):
        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        found.append({(c.name, f.name, ast.dump(f)) for c in classes for f in c.body if isinstance(f, ast.FunctionDef)})
    ((owner, name, _),) = found[1] - found[0]
    return owner, name
