// What inline PTX becomes (flashlab/emulator/ptx.py): functions named after the instructions, in the namespace emu_ptx.
// Registers are variables that hold bits. Each instruction reads them as the type that its opcode names.
#pragma once

#include "ptx_scalar.h"
#include "ptx_memory.h"
#include "ptx_matrix.h"
