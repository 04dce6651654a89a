// CUDA's names for the types of data.
#pragma once

#include "driver_types.h"
