// Counting: which bytes each warp instruction asked for.
//
// Lanes run one after the other, so the accesses of one warp instruction come one by one. They belong together when they
// come from the same place in the source, as the same occurrence of it since the warp's lanes last met: how a warp that
// reconverges after every branch would issue them. Then, as the hardware's counters do:
//   bytes        distinct bytes of the warp instruction; atomics: every lane's
//   sectors      32-byte pieces of HBM that it touches
//   wavefronts   passes over the 32 banks of SRAM that it takes; `ideal`: without bank conflicts
// The rules of the last two are measured; counts.cpp tells them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "report.h"

namespace emulator {

struct Lane;
struct Warp;

enum class Op { ld, st, ldgsts, red, atom, ldsm, stsm, gmma, tma_ld, tma_st };
enum class Space { hbm, sram };

struct WarpInstruction {
  Op op;
  Space space;
  const char* step;
  Place place;
  unsigned mask = 0, bytes = 0;  // of a lane
  std::uint64_t address[32];
  std::uint64_t partner[32];  // copies: the address in the other memory
  const char* tensor[32];
};

struct Moved {
  std::uint64_t instructions = 0, bytes = 0, sectors = 0, wavefronts = 0, ideal = 0;
};

// By step, tensor, space and instruction; the strings live as long as the kernel's library.
struct Ledger {
  std::map<std::tuple<const char*, const char*, Space, Op>, Moved> rows;
  std::uint64_t plain = 0;  // accesses that came through the compiler's instrumentation

  void account(const WarpInstruction& instruction);
  void add(const char* step, const char* tensor, Space space, Op op, const Moved& moved);
};

// The warp instructions whose lanes haven't all come yet.
struct WarpLog {
  std::vector<std::vector<WarpInstruction>> open;  // by site, by occurrence
  std::vector<unsigned> touched;                   // sites with any
  void add(Lane& lane, Op op, Space space, std::uint64_t address, unsigned bytes, const char* tensor, Place place,
           std::uint64_t partner = 0);
  void flush(Ledger& ledger);
};

// Places of the same lines of source are one site, however often the compiler copied the code.
unsigned site_of(Place place);
unsigned sites();

}  // namespace emulator
