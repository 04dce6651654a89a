#include "json.h"

#include <cstdio>

#include "launch.h"

namespace emulator {

namespace {

const char* const OPS[] = {"ld", "st", "ldgsts", "red", "atom", "ldsm", "stsm", "gmma", "tma_ld", "tma_st"};

}  // namespace

void Writer::string(const std::string& value) {
  text += '"';
  for (unsigned char c : value) {
    char escaped[8];
    if (c == '"' || c == '\\') text += '\\', text += static_cast<char>(c);
    else if (c < 0x20) std::snprintf(escaped, sizeof escaped, "\\u%04x", c), text += escaped;
    else text += static_cast<char>(c);
  }
  text += '"';
}

void Writer::key(const char* name) {
  if (text.back() != '{') text += ',';
  string(name);
  text += ':';
}

void Writer::field(const char* name, const uint3& v) {
  key(name);
  text += "[" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + "]";
}

void Writer::place(const char* name, Place place) {
  field(name, static_cast<std::int64_t>(place ? static_cast<const char*>(place) - image_base() : -1));
}

void Writer::findings(const char* name, const Findings& findings) {
  list(name, findings.list, [&](const Finding& finding) {
    field("kind", finding.kind);
    field("message", finding.message);
    place("place", finding.place);
    field("step", finding.step);
    field("block", finding.block);
    field("thread", finding.thread);
    field("space", finding.space);
    field("tensor", finding.tensor);
    field("offset", finding.offset);
    field("bytes", static_cast<std::int64_t>(finding.bytes));
    field("times", finding.times);
    if (!finding.has_other) return;
    place("other_place", finding.other);
    field("other_block", finding.other_block);
    field("other_thread", finding.other_thread);
  });
}

void Writer::moved(const Ledger& ledger) {
  list("moved", ledger.rows, [&](const auto& row) {
    const auto& [step, tensor, space, op] = row.first;
    field("step", step);
    field("tensor", tensor);
    field("space", space == Space::hbm ? "hbm" : "sram");
    field("op", OPS[static_cast<int>(op)]);
    field("instructions", row.second.instructions);
    field("bytes", row.second.bytes);
    field("overlapped", row.second.overlapped);
    field("sectors", row.second.sectors);
    field("wavefronts", row.second.wavefronts);
    field("ideal", row.second.ideal);
  });
}

}  // namespace emulator
