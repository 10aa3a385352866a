// A loop shared between the thread that XLA runs an operation on and its intra-operation pool.
#pragma once

#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

namespace shardstream {

// How many threads compute in this process right now. Several devices of one process share its cores, and each runs
// its operations on a thread of its own: helpers join only while a core is free.
inline std::atomic<int64_t>& Busy() {
  static std::atomic<int64_t> busy{0};
  return busy;
}

// The cores that this thread may run on now: a run can be held to some of them, and threads that shared one core would
// wait for each other's turns.
inline int64_t Cores() {
#ifdef __linux__
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
#endif
  static const int64_t all = std::max(1u, std::thread::hardware_concurrency());
  return all;
}

// Calls run(i) for i in [0, pieces), each thread along a range of its own: neighbouring pieces follow each other on one
// thread, and what one asks the memory for ahead of time is what it reads next. A thread that is done goes on with
// what others have not begun. A helper that comes late finds nothing left and touches nothing of the caller's.
//
// What a run throws is thrown again here, once no thread is inside one: the first of them, and pieces not begun by then
// are left out.
//
// Pool is xla::ffi::ThreadPool, or anything with its num_threads() and Schedule(f).
template <typename Pool, typename Run>
void Parallel(Pool& pool, int64_t pieces, const Run& run) {
  const int64_t cores = Cores();
  const int64_t threads = std::min({static_cast<int64_t>(pool.num_threads()), cores, pieces});
  if (threads <= 1) {
    for (int64_t i = 0; i < pieces; ++i) run(i);
    return;
  }
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Shared {
    explicit Shared(int64_t threads) : ranges(new Range[threads]) {}
    std::unique_ptr<Range[]> ranges;
    std::atomic<int64_t> done{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // of whoever set failed
  };
  auto shared = std::make_shared<Shared>(threads);
  for (int64_t t = 0; t < threads; ++t) {
    shared->ranges[t].next = pieces * t / threads;
    shared->ranges[t].end = pieces * (t + 1) / threads;
  }
  // An exception that left a helper would end the process, and one that left the caller would take `run` from helpers.
  const auto take = [threads](Shared& state, int64_t first, const Run* run) noexcept {
    for (int64_t t = 0; t < threads; ++t) {
      Range& range = state.ranges[(first + t) % threads];
      for (;;) {
        const int64_t i = range.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= range.end) break;
        try {
          if (!state.failed.load(std::memory_order_relaxed)) (*run)(i);
        } catch (...) {
          if (!state.failed.exchange(true)) state.error = std::current_exception();
        }
        state.done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  Busy().fetch_add(1, std::memory_order_relaxed);
  try {
    for (int64_t t = 1; t < threads; ++t) {
      pool.Schedule([shared, take, t, cores, run = &run] {
        if (Busy().fetch_add(1, std::memory_order_relaxed) < cores) take(*shared, t, run);
        Busy().fetch_sub(1, std::memory_order_relaxed);
      });
    }
  } catch (...) {  // no memory for a task: those that are under way do the work
  }
  take(*shared, 0, &run);
  Busy().fetch_sub(1, std::memory_order_relaxed);
  // What is left is in the hands of helpers, each at its last piece.
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < pieces; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
  if (shared->failed) std::rethrow_exception(std::exchange(shared->error, nullptr));
}

}  // namespace shardstream
