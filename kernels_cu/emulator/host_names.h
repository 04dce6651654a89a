// Stands in for headers of CUDA's libraries for the host, which bring the types of small floats with them.
#pragma once

#include "cuComplex.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"
#include "library_types.h"
