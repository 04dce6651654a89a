// Counting: which bytes each warp instruction requested.
//
// Lanes run one after the other, so the accesses of one warp instruction come one by one. Accesses belong together if
// they come from the same place in the source and are the same occurrence of it since the lanes of the warp last met.
// This is how a warp that reconverges after each branch would issue them. Then these are counted, as by the hardware's
// counters:
//   bytes        distinct bytes of the warp instruction; for atomics, the bytes of every lane
//   sectors      32-byte pieces of HBM that it touches
//   overlapped   those bytes, if a copy (cp.async) of an asking lane was on its way
//   wavefronts   passes over the 32 banks of SRAM that it takes; `ideal` is without bank conflicts
// The rules for sectors and wavefronts were measured. They are in counts.cpp.
#pragma once
#include "emu_hide_names.h"

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
  unsigned mask = 0, bytes = 0;  // the lanes that take part, and the bytes per lane
  bool overlapped = false;       // a copy of one of these lanes is on its way
  std::uint64_t address[32];
  std::uint64_t partner[32];  // for copies, the address in the other memory
  const char* tensor[32];
};

struct Moved {
  std::uint64_t instructions = 0, bytes = 0, overlapped = 0, sectors = 0, wavefronts = 0, ideal = 0;
};

// What was moved, by step, tensor, space and instruction. The strings live as long as the kernel's library.
struct Ledger {
  std::map<std::tuple<const char*, const char*, Space, Op>, Moved> rows;
  std::uint64_t plain = 0;  // how many accesses came through the compiler's instrumentation

  void account(const WarpInstruction& instruction);
  void add(const char* step, const char* tensor, Space space, Op op, const Moved& moved);
};

// The warp instructions to which more lanes may come.
struct WarpLog {
  std::vector<std::vector<WarpInstruction>> open;  // by site, by occurrence
  std::vector<unsigned> touched;                   // the sites that have any
  void add(Lane& lane, Op op, Space space, std::uint64_t address, unsigned bytes, const char* tensor, Place place,
           std::uint64_t partner = 0);
  void flush(Ledger& ledger);
};

// All places that come from one line of source are one site, however often the compiler has copied the code.
unsigned site_of(Place place);
unsigned sites();

}  // namespace emulator

#include "emu_show_names.h"
