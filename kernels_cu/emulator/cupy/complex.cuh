// CuPy's complex
#pragma once
#include "emu_hide_names.h"

#include "../thrust/complex.h"

using thrust::complex;

#include "emu_show_names.h"
