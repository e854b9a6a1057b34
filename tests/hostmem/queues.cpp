// Streams whose work is done later, where HOSTMEM_SEED is set: it waits in a queue of its stream.
//
// [Note: as late as an accelerator] A host that synchronises waits for one stream or event. Until that is reached, any
// stream that may run goes on, as the seed draws it: what neither the host nor a stream waited for may be done or not.

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "hostmem.h"

namespace hostmem {
namespace {

const at::ThreadLocalState state_of_import; // without modes of Python, which must not see what they saw before

struct Task {
  std::function<void()> run; // empty where a stream only waits
  Mark after; // of another stream
};

struct Queue {
  std::deque<Task> tasks;
  uint64_t num_queued = 0, num_done = 0;
};

// All streams of a process. A finished task ends outside the lock, for its tensors may need the interpreter's.
class Queues {
 public:
  Queues() {
    if (const auto* seed = std::getenv("HOSTMEM_SEED")) {
      is_late = true;
      random_.seed(std::strtoul(seed, nullptr, 10));
      eagerness_ = random_() % 3; // 0: nothing runs before somebody waits
    }
  }

  void add(const c10::Stream& stream, Task task) {
    std::vector<Task> finished;
    const std::lock_guard lock(mutex_);
    auto& queue = of(mark_of(stream));
    queue.tasks.push_back(std::move(task));
    ++queue.num_queued;
    if (random_() % 4 < eagerness_) {
      run_any(finished);
    }
  }

  Mark mark(const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    auto mark = mark_of(stream);
    mark.num_queued = of(mark).num_queued;
    return mark;
  }

  bool is_done(const Mark& mark) {
    const std::lock_guard lock(mutex_);
    return is_reached(mark);
  }

  bool ask(const Mark& mark) {
    std::vector<Task> finished;
    const std::lock_guard lock(mutex_);
    run_any(finished);
    return is_reached(mark);
  }

  void wait(const Mark& mark) {
    std::vector<Task> finished;
    const std::lock_guard lock(mutex_);
    while (!is_reached(mark)) {
      run_any(finished);
    }
  }

  void wait_for_device(c10::DeviceIndex device) {
    std::vector<Task> finished;
    const std::lock_guard lock(mutex_);
    for (auto& [key, queue] : queues_) {
      while (key.first == device && !queue.tasks.empty()) {
        run_any(finished);
      }
    }
  }

  bool is_late = false;

 private:
  static Mark mark_of(const c10::Stream& stream) {
    return {stream.device_index(), stream.id(), 0};
  }

  Queue& of(const Mark& mark) {
    return queues_[{mark.device, mark.stream}];
  }

  bool is_reached(const Mark& mark) {
    return of(mark).num_done >= mark.num_queued;
  }

  void run_any(std::vector<Task>& finished) {
    std::vector<Queue*> ready;
    for (auto& [key, queue] : queues_) {
      if (!queue.tasks.empty() && is_reached(queue.tasks.front().after)) {
        ready.push_back(&queue);
      }
    }
    if (ready.empty()) {
      return;
    }
    auto& queue = *ready[random_() % ready.size()];
    finished.push_back(std::move(queue.tasks.front()));
    queue.tasks.pop_front();
    ++queue.num_done; // also of what raises: whoever waits gets the error, once
    if (finished.back().run) {
      without_modes(finished.back().run);
    }
  }

  std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue> queues_;
  std::mt19937 random_;
  unsigned eagerness_ = 0;
};

Queues& queues() {
  static auto* all = new Queues(); // never deleted: memory is released until the very end of a process
  return *all;
}

} // namespace

void without_modes(const std::function<void()>& run) {
  const at::ThreadLocalStateGuard state(state_of_import);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  run();
}

bool is_late() {
  return queues().is_late;
}

void queue(const c10::Stream& stream, std::function<void()> run) {
  queues().add(stream, {std::move(run), {}});
}

void queue_after(const c10::Stream& stream, const Mark& mark) {
  queues().add(stream, {{}, mark});
}

Mark mark(const c10::Stream& stream) {
  return queues().mark(stream);
}

bool is_done(const Mark& mark) {
  return queues().is_done(mark);
}

bool ask(const Mark& mark) {
  return queues().ask(mark);
}

void wait(const Mark& mark) {
  queues().wait(mark);
}

void wait_for_device(c10::DeviceIndex device) {
  queues().wait_for_device(device);
}

} // namespace hostmem
