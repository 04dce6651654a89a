// A lane can be stopped where it calls the runtime. But the compiler may leave a loop that never does: an empty one, or one without
// its loads and stores, which the compiler has moved out. Such a lane is watched from outside, and is stopped by a signal.
#pragma once
#include "emu_hide_names.h"

#include <pthread.h>

#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>

namespace emulator {

struct Block;
struct Lane;
struct Launch;

class Watch {
  struct Seen {
    const Block& block;
    pthread_t thread;
    const Lane* lane;
    std::uint32_t polls;
    double seconds;  // of the processor, when the thread was first seen with this lane and these polls
    Seen(const Block& block, pthread_t thread);
    bool stuck();
    void stop() const;  // if the lane is as it was seen when the signal comes
  };

 public:
  explicit Watch(const Launch& launch);
  ~Watch();

  // The calling thread runs this block while the object lives.
  class Watched {
   public:
    Watched(Watch& watch, const Block& block);
    ~Watched();

   private:
    Watch& watch_;
    std::list<Seen>::iterator seen_;
  };

 private:
  void look();

  const Launch& launch_;
  std::mutex busy_;
  std::condition_variable end_;
  bool over_ = false;
  std::list<Seen> all_;
  std::thread thread_;
};

}  // namespace emulator

#include "emu_show_names.h"
