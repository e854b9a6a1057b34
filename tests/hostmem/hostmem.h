// What the parts of the device share.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace hostmem {

constexpr c10::DeviceIndex kNumDevices = 2;

c10::Allocator* allocator();
c10::DeviceIndex current_device();
at::Tensor on_cpu(const at::Tensor& tensor); // over the same memory, which it keeps alive

} // namespace hostmem
