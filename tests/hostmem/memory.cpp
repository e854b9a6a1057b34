// Memory of streams whose work is done later: used again as a caching allocator does, with what was last written there.

#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "hostmem.h"

namespace hostmem {
namespace {

struct Block {
  size_t num_bytes;
  c10::Stream asked_on;
  std::vector<c10::Stream> used_on;
};

class Memory {
 public:
  void* get(size_t num_bytes, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    take_back();
    auto& free = free_[{stream.device_index(), stream.id()}];
    const auto found = free.lower_bound(num_bytes);
    if (found == free.end()) {
      auto* pointer = std::aligned_alloc(64, (num_bytes + 63) / 64 * 64);
      blocks_.insert_or_assign(pointer, Block{num_bytes, stream, {}});
      return pointer;
    }
    auto* pointer = found->second;
    free.erase(found);
    return pointer;
  }

  void use(const void* pointer, const c10::Stream& stream) {
    const std::lock_guard lock(mutex_);
    if (auto found = blocks_.find(const_cast<void*>(pointer)); found != blocks_.end()) {
      found->second.used_on.push_back(stream);
    }
  }

  void release(void* pointer) {
    const std::lock_guard lock(mutex_);
    std::vector<Mark> until;
    for (const auto& stream : blocks_.at(pointer).used_on) {
      until.push_back(mark(stream));
    }
    waiting_.push_back({pointer, std::move(until)});
    take_back();
  }

 private:
  struct Waiting {
    void* pointer;
    std::vector<Mark> until;
  };

  void take_back() {
    std::erase_if(waiting_, [this](const Waiting& each) {
      for (const auto& mark : each.until) {
        if (!is_done(mark)) {
          return false;
        }
      }
      auto& block = blocks_.at(each.pointer);
      block.used_on.clear();
      free_[{block.asked_on.device_index(), block.asked_on.id()}].emplace(block.num_bytes, each.pointer);
      return true;
    });
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::multimap<size_t, void*>> free_; // by size
  std::vector<Waiting> waiting_;
};

Memory& memory() {
  static auto* all = new Memory(); // never deleted, as the queues
  return *all;
}

void release(void* pointer) {
  memory().release(pointer);
}

} // namespace

at::DataPtr kept_memory(size_t num_bytes, c10::Device device) {
  auto* pointer = num_bytes == 0 ? nullptr : memory().get(num_bytes, current_stream(device));
  return {pointer, pointer, pointer == nullptr ? &c10::detail::deleteNothing : &release, device};
}

void use_on(const void* pointer, const c10::Stream& stream) {
  memory().use(pointer, stream);
}

} // namespace hostmem
