// CuPy's complex
#pragma once
#include "../thrust/complex.h"
using thrust::complex;
