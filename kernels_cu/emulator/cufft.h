// The types of cuFFT, which kernels beside its calls use.
#pragma once

#include "cuComplex.h"

using cufftReal = float;
using cufftDoubleReal = double;
using cufftComplex = cuComplex;
using cufftDoubleComplex = cuDoubleComplex;
