// JSON documents, as far as the emulator writes any.
#pragma once
#include "emu_hide_names.h"

#include <cstdint>
#include <string>

#include "counts.h"
#include "report.h"
#include "thread.h"

namespace emulator {

struct Writer {
  std::string text = "{";

  void string(const std::string& value);
  void key(const char* name);
  void field(const char* name, const std::string& value) { key(name), string(value); }
  void field(const char* name, std::uint64_t value) { key(name), text += std::to_string(value); }
  void field(const char* name, std::int64_t value) { key(name), text += std::to_string(value); }
  void field(const char* name, const uint3& v);
  void place(const char* name, Place place);  // in bytes from the start of the kernel's library, -1: none
  void findings(const char* name, const Findings& findings);
  void moved(const Ledger& ledger);
  template <class List, class Each>
  void list(const char* name, const List& items, Each each) {
    key(name);
    text += '[';
    for (const auto& item : items) {
      if (text.back() != '[') text += ',';
      text += '{', each(item), text += '}';
    }
    text += ']';
  }
};

}  // namespace emulator

#include "emu_show_names.h"
