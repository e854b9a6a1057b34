// What the parts of the device share.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>

namespace hostmem {

constexpr c10::DeviceIndex kNumDevices = 2;

c10::Allocator* allocator();
c10::DeviceIndex current_device();
c10::Stream current_stream(c10::Device device = c10::Device(c10::DeviceType::PrivateUse1));
at::Tensor on_cpu(const at::Tensor& tensor); // over the same memory, which it keeps alive

// A moment of a stream, as an event records it: so much work was queued.
struct Mark {
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  uint64_t num_queued = 0;
};

bool is_late();
void queue(const c10::Stream& stream, std::function<void()> run);
void queue_after(const c10::Stream& stream, const Mark& mark);
Mark mark(const c10::Stream& stream);
bool is_done(const Mark& mark);
bool ask(const Mark& mark); // as is_done, but something may run first
void wait(const Mark& mark);
void wait_for_device(c10::DeviceIndex device);
void without_modes(const std::function<void()>& run); // as torch was when it was imported, without autograd

// Memory that goes back to the stream on which it was asked for, once the other streams that use it are as far as now.
at::DataPtr kept_memory(size_t num_bytes, c10::Device device);
void use_on(const void* pointer, const c10::Stream& stream);

} // namespace hostmem
