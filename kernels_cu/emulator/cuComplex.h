// Complex numbers, as pairs.
#pragma once
#include "emu_hide_names.h"

#include "cuda.h"

using cuFloatComplex = float2;
using cuDoubleComplex = double2;
using cuComplex = cuFloatComplex;

#define EMU_COMPLEX(T, C, F)                                                                              \
  inline T cuCreal##F(C z) { return z.x; }                                                                   \
  inline T cuCimag##F(C z) { return z.y; }                                                                   \
  inline C cuConj##F(C z) { return {z.x, -z.y}; }                                                            \
  inline C cuCadd##F(C a, C b) { return {a.x + b.x, a.y + b.y}; }                                            \
  inline C cuCsub##F(C a, C b) { return {a.x - b.x, a.y - b.y}; }                                            \
  inline C cuCmul##F(C a, C b) { return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }                    \
  inline T cuCabs##F(C z) { return std::hypot(z.x, z.y); }                                                   \
  inline C cuCdiv##F(C a, C b) {                                                                             \
    const T n = b.x * b.x + b.y * b.y;                                                                       \
    return {(a.x * b.x + a.y * b.y) / n, (a.y * b.x - a.x * b.y) / n};                                       \
  }
EMU_COMPLEX(float, cuFloatComplex, f)
EMU_COMPLEX(double, cuDoubleComplex, )
inline cuFloatComplex make_cuFloatComplex(float x, float y) { return {x, y}; }
inline cuDoubleComplex make_cuDoubleComplex(double x, double y) { return {x, y}; }
inline cuComplex make_cuComplex(float x, float y) { return {x, y}; }

#include "emu_show_names.h"
