// bfloat16: __nv_bfloat16 and __nv_bfloat162.
#pragma once
#include "emu_hide_names.h"

#include "small_floats.h"

using __nv_bfloat16 = emulator::SmallFloat<emulator::BF16>;
using __nv_bfloat162 = emulator::SmallPair<emulator::BF16>;
using __nv_bfloat16_raw = emulator::RawFloat<emulator::BF16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
EMU_SMALL_NAMES(nv_bfloat16, nv_bfloat162, bfloat16)
inline nv_bfloat162 make_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }

#define CUDART_INF_BF16 __ushort_as_bfloat16(0x7f80u)
#define CUDART_NAN_BF16 __ushort_as_bfloat16(0x7fffu)
#define CUDART_MAX_NORMAL_BF16 __ushort_as_bfloat16(0x7f7fu)
#define CUDART_MIN_DENORM_BF16 __ushort_as_bfloat16(0x0001u)
#define CUDART_ONE_BF16 __ushort_as_bfloat16(0x3f80u)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16(0u)
#define CUDART_NEG_ZERO_BF16 __ushort_as_bfloat16(0x8000u)

#include "emu_show_names.h"
