"""Runs the CUDA sources on a CPU: built by the machine's own C++ compiler, executed, sanitised and counted.

`emulate` runs an algorithm's own kernels. Below it, `build` makes a library of any `.cu` file, and `Library.launch` runs
one of its kernels on buffers in an `Arena`. The C++ side is
`kernels_cu/emulator`; the documentation's page "The emulator" tells how it works and what it doesn't model.
"""

from flashlab.emulator.build import BuildError, build
from flashlab.emulator.files import Empty, FileRun, emulate_file
from flashlab.emulator.kernels import Emulation, EmulationError, attention, emulate
from flashlab.emulator.library import Arena, Finding, Launched, Library, Line, Moved
from flashlab.emulator.maps import tensor_map
from flashlab.emulator.source import kernels_of

__all__ = [
    "Arena", "BuildError", "Empty", "Emulation", "EmulationError", "FileRun", "Finding", "Launched", "Library", "Line",
    "Moved", "attention", "build", "emulate", "emulate_file", "kernels_of", "tensor_map",
]  # fmt: skip
