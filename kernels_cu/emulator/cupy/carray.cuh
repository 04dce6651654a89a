// What CuPy's own header brings along: half, and its name for it.
#pragma once
#include "emu_hide_names.h"

#include "cuda_fp16.h"
using float16 = __half;

#include "emu_show_names.h"
