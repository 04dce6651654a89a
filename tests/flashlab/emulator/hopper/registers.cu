// Two warpgroups: one gives up registers, the other claims them.
#include "warpgroup.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) registers(int* unused) {
  if (warpgroup_id() == 0) {
    release_registers<24>();
  } else {
    claim_registers<256>();
  }
}
