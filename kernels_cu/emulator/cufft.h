// The types of cuFFT, which kernels beside its calls use.
#pragma once
#include "emu_hide_names.h"

#include "cuComplex.h"

using cufftReal = float;
using cufftDoubleReal = double;
using cufftComplex = cuComplex;
using cufftDoubleComplex = cuDoubleComplex;

#include "emu_show_names.h"
