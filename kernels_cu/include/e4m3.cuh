// What operands of 8 bits (e4m3) change in the kernels of FlashAttention-3. A kernel defines E4M3 as 1 where it has them. Beside
// this header only flash3.cuh asks for that, which takes the tiles and products of fp8.cuh then, and else those of fp16.cuh.
#pragma once

#ifndef E4M3
#define E4M3 0
#endif
#ifndef EXACT_LSE
#define EXACT_LSE 0  // 1: the LSE of 8 bits is that of P before it is rounded
#endif

// A maximum may lag behind by TAU before O and l are rescaled: exponentials then reach 2^TAU. P is multiplied by 2^LARGEST_P, so
// that little of it is below e4m3's least, 2^-9; exp2(3.8 + 5) is just within its 448. Tiles count in 16 bits: PACKED elements.
#if E4M3
constexpr float TAU = 3.8f, LARGEST_P = 5;
constexpr int PACKED = 2;
#else
constexpr float TAU = 8, LARGEST_P = 0;
constexpr int PACKED = 1;
#endif

constexpr int TURNED_KEYS = 128;  // rows of V that a block of flash3_fp8_transpose takes
