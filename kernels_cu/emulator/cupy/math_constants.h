// CuPy's copy of CUDA's header
#pragma once
#include "../math_constants.h"
