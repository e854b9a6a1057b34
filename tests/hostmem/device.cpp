// The devices themselves: memory, pinned memory, streams and events. All work is done when a call returns, unless streams
// are late (queues.cpp).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "hostmem.h"

namespace hostmem {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local c10::StreamId stream_of_thread[kNumDevices] = {};
std::atomic<c10::StreamId> num_streams = 0;

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : device_of_thread;
}

// As drivers do: a variable hides the devices of a process.
c10::DeviceIndex num_visible() noexcept {
  const auto* shown = std::getenv("HOSTMEM_VISIBLE_DEVICES");
  return shown == nullptr ? kNumDevices : (std::strlen(shown) + 1) / 2; // "0,1", "0" or ""
}

struct DeviceAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(kDevice, device_of_thread);
    if (is_late()) {
      return kept_memory(num_bytes, device);
    }
    auto memory = c10::GetCPUAllocator()->allocate(num_bytes);
    const auto deleter = memory.get_deleter();
    auto* pointer = memory.get();
    return {pointer, memory.release_context(), deleter, device};
  }

  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kDevice, &device_allocator);

// Memory of the host that counts as pinned: which, is known by its address.
std::mutex pinned_mutex;
std::set<const void*> pinned;

struct PinnedAllocator final : c10::Allocator {
  static void release(void* pointer) {
    const std::lock_guard lock(pinned_mutex);
    pinned.erase(pointer);
    std::free(pointer);
  }

  at::DataPtr allocate(size_t num_bytes) override {
    auto* pointer = std::malloc(std::max<size_t>(num_bytes, 1));
    const std::lock_guard lock(pinned_mutex);
    pinned.insert(pointer);
    return {pointer, pointer, &release, c10::Device(c10::kCPU)};
  }

  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    std::memcpy(target, source, num_bytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Device getDevice() const override {
    return {kDevice, device_of_thread};
  }

  void setDevice(c10::Device device) const override {
    TORCH_CHECK(
        index_of(device) < kNumDevices, "hostmem: expected a device below ", int(kNumDevices), ", got ", device);
    device_of_thread = index_of(device);
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    device_of_thread = index_of(device);
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return num_visible();
  }

  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

  static c10::Stream stream(c10::StreamId id, c10::Device device) noexcept {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, index_of(device)), id);
  }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return stream(stream_of_thread[index_of(device)], device);
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(0, device);
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(++num_streams, device);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(++num_streams, device);
  }

  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    const auto before = getStream(next.device());
    stream_of_thread[next.device_index()] = next.id();
    return before;
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Mark();
    }
    of(*event) = mark(on);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr && is_late()) {
      queue_after(stream, of(event));
    }
  }

  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      wait(of(event));
    }
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    wait(mark(stream));
  }

  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_for_device(device);
  }

  bool queryEvent(void* event) const override {
    return event == nullptr || ask(of(event));
  }

  bool queryStream(const c10::Stream& stream) const override {
    return ask(mark(stream));
  }

 private:
  static Mark& of(void* event) {
    return *static_cast<Mark*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers are drawn from the generator of the CPU, whose operators draw them.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return num_visible() > 0;
  }

  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }

  c10::DeviceIndex deviceCount() const override {
    return num_visible();
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return device_of_thread;
  }

  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kDevice, device});
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kDevice, device}).index();
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? device_of_thread : exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }

  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }

  at::Device getDeviceFromPtr(void*) const override {
    return {kDevice, device_of_thread};
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator of_host;
    return &of_host;
  }

  bool isPinnedPtr(const void* pointer) const override {
    const std::lock_guard lock(pinned_mutex);
    return pinned.contains(pointer);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    auto memory = device_allocator.allocate(num_bytes);
    if (storage.nbytes() > 0 && num_bytes > 0) {
      wait(mark(current_stream(storage.device())));
      std::memcpy(memory.get(), storage.data(), std::min(storage.nbytes(), num_bytes));
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};

const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace

c10::Allocator* allocator() {
  return &device_allocator;
}

c10::DeviceIndex current_device() {
  return device_of_thread;
}

c10::Stream current_stream(c10::Device device) {
  return Guard().getStream(device);
}

} // namespace hostmem
