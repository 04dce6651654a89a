// float16: __half and __half2.
#pragma once
#include "emu_hide_names.h"

#include "small_floats.h"

using __half = emulator::SmallFloat<emulator::F16>;
using __half2 = emulator::SmallPair<emulator::F16>;
using __half_raw = emulator::RawFloat<emulator::F16>;
using half = __half;
using half2 = __half2;
using nv_half = __half;
using nv_half2 = __half2;
EMU_SMALL_NAMES(half, half2, half)
inline half2 make_half2(half x, half y) { return {x, y}; }

#define CUDART_INF_FP16 __ushort_as_half(0x7c00u)
#define CUDART_NAN_FP16 __ushort_as_half(0x7fffu)
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half(0x7bffu)
#define CUDART_MIN_DENORM_FP16 __ushort_as_half(0x0001u)
#define CUDART_ONE_FP16 __ushort_as_half(0x3c00u)
#define CUDART_ZERO_FP16 __ushort_as_half(0u)
#define CUDART_NEG_ZERO_FP16 __ushort_as_half(0x8000u)

#include "emu_show_names.h"
