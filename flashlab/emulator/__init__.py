"""Runs the CUDA sources on a CPU: built by the machine's own C++ compiler, executed, sanitised and counted.

`build` makes a library of a `.cu` file, `Library.launch` runs one of its kernels on buffers in an `Arena`. The C++ side is
`kernels_cu/emulator`; the documentation's page "The emulator" tells how it works and what it doesn't model.
"""

from flashlab.emulator.build import BuildError, build, kernels_of
from flashlab.emulator.library import Arena, Finding, Launched, Library, Line, Moved
from flashlab.emulator.tensor_map import tensor_map

__all__ = ["Arena", "BuildError", "Finding", "Launched", "Library", "Line", "Moved", "build", "kernels_of", "tensor_map"]
