// Everything of it that kernels use is in cuda.h.
#pragma once

#include "cuda.h"
