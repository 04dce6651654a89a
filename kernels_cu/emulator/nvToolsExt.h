// NVTX: a program's marks for a profiler. There is none here.
#pragma once
#include "emu_hide_names.h"

inline int nvtxRangePushA(const char*) { return 0; }
inline int nvtxRangePush(const char*) { return 0; }
inline int nvtxRangePop() { return 0; }
inline void nvtxMarkA(const char*) {}
inline void nvtxMark(const char*) {}
inline unsigned long long nvtxRangeStartA(const char*) { return 0; }
inline void nvtxRangeEnd(unsigned long long) {}

#include "emu_show_names.h"
