"""Runs CUDA sources on a CPU. The machine's own C++ compiler builds them; the emulator runs, sanitises and counts them.

`build` makes a library of any `.cu` file, `Library.launch` runs one of its kernels on buffers in an `Arena`, and
`emulate_file` does both. `run_program` runs a whole program, host code and all. The C++ side is `kernels_cu/emulator`. The
documentation's page "The emulator" says how it works and what it doesn't model. `flashlab.run.emulated` runs
the algorithms' own kernels on it.
"""

from flashlab.base.process import IN_A_BROWSER
from simulator.errors import Unavailable

if IN_A_BROWSER:  # before ctypes is missed
    raise Unavailable(
        "the emulator needs a C++ compiler, and a browser has none: take the notebook to a computer with Linux, as "
        "flashlab's README says"
    )

from flashlab.emulator.build import BuildError, build
from flashlab.emulator.files import Empty, FileRun, Poisoned, emulate_file
from flashlab.emulator.library import Arena, Finding, Launched, Library, Line, Moved
from flashlab.emulator.maps import tensor_map
from flashlab.emulator.programs import ProgramRun, run_program
from flashlab.emulator.source import kernels_of
from flashlab.emulator.textures import Texture

__all__ = [
    "Arena", "BuildError", "Empty", "FileRun", "Finding", "Launched", "Library", "Line", "Moved", "Poisoned", "ProgramRun",
    "Texture", "build", "emulate_file", "kernels_of", "run_program", "tensor_map",
]  # fmt: skip
