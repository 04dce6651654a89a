// PyCUDA's complex
#pragma once
#include "emu_hide_names.h"

#include "complex_numbers.h"

namespace pycuda {
EMU_COMPLEX_NAMES
}

#include "emu_show_names.h"
