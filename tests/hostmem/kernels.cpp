// An accelerator made of host memory: its operators are the CPU's, on the very memory of the device.
//
// [Note: one memory, two names] An operator of the device is called again on tensors of the CPU that borrow the memory
// of its arguments. What it returns keeps its memory and becomes the device's; a view becomes a view of the argument.
// So there is one kernel for all operators, which copies nothing, and numbers are those of the CPU bit by bit.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/copy.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <unordered_map>

#include "hostmem.h"

namespace hostmem {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// Return a tensor of a form; with keys of a base it is a view, which inference mode leaves as the base is.
at::Tensor tensor_over(
    c10::Storage storage, c10::DispatchKey key, const at::Tensor& like, c10::DispatchKeySet of_base = {}) {
  auto tensor = of_base.empty()
      ? at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype())
      : at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), of_base, like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  return tensor;
}

void release(void* storage) {
  delete static_cast<c10::Storage*>(storage);
}

// Memory of the CPU that from now on is the device's; it ends with the storage that it came from.
at::DataPtr taken(const c10::Storage& storage, c10::Device device) {
  auto* owner = new c10::Storage(storage);
  return {owner->mutable_data(), owner, &release, device};
}

// One call of an operator on the CPU.
class Borrowing {
 public:
  at::Tensor on_cpu(const at::Tensor& given) {
    if (!given.defined() || given.device().type() != kDevice) {
      if (given.defined()) {
        originals_.emplace(given.unsafeGetTensorImpl(), given);
      }
      return given;
    }
    if (device_.type() != kDevice) {
      device_ = given.device();
    }
    auto& borrowed = borrowed_[given.storage().unsafeGetStorageImpl()];
    if (!borrowed) {
      const auto& storage = given.storage();
      borrowed = c10::Storage(
          c10::make_intrusive<c10::StorageImpl>(
              c10::StorageImpl::use_byte_size_t(),
              storage.nbytes(),
              at::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)),
              c10::GetCPUAllocator(),
              true));
      lent_.emplace(borrowed.unsafeGetStorageImpl(), Lent{storage, given.key_set()});
    }
    auto tensor = tensor_over(borrowed, c10::DispatchKey::CPU, given);
    originals_.emplace(tensor.unsafeGetTensorImpl(), given);
    arguments_.push_back(tensor);
    return tensor;
  }

  c10::IValue on_cpu(const c10::IValue& value) {
    if (value.isTensor()) {
      return on_cpu(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(on_cpu(tensor));
      }
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        tensors.push_back(tensor ? std::optional(on_cpu(*tensor)) : std::nullopt);
      }
      return tensors;
    }
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      device_ = value.toDevice();
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  // Let arguments have the sizes and the memory that their likes on the CPU got, as `out` of an operator does.
  void write_back() {
    for (const auto& [cpu, lent] : lent_) {
      const auto& storage = lent.storage;
      if (cpu->data() != storage.data()) {
        auto owned = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(cpu));
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(taken(owned, storage.device()));
        storage.unsafeGetStorageImpl()->set_nbytes(cpu->nbytes());
      }
    }
    for (const auto& tensor : arguments_) {
      const auto& original = originals_.at(tensor.unsafeGetTensorImpl());
      if (tensor.sizes() != original.sizes() || tensor.strides() != original.strides()) {
        original.unsafeGetTensorImpl()->set_sizes_and_strides(
            tensor.sizes(), tensor.strides(), tensor.storage_offset());
      }
    }
  }

  at::Tensor on_device(const at::Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    if (auto found = originals_.find(result.unsafeGetTensorImpl()); found != originals_.end()) {
      return found->second;
    }
    TORCH_CHECK(result.layout() == c10::kStrided, "hostmem: expected a strided result, got ", result.layout());
    auto* cpu = result.storage().unsafeGetStorageImpl();
    auto found = lent_.find(cpu);
    if (found == lent_.end()) {
      c10::Device device = device_.has_index() ? device_ : c10::Device(kDevice, current_device());
      auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), cpu->nbytes(), taken(result.storage(), device), allocator(), true));
      found = lent_.emplace(cpu, Lent{storage, {}}).first;
      kept_.push_back(result);
    }
    return tensor_over(found->second.storage, c10::DispatchKey::PrivateUse1, result, found->second.keys);
  }

  c10::IValue on_device(const c10::IValue& value) {
    if (value.isTensor()) {
      return on_device(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(on_device(tensor));
      }
      return tensors;
    }
    return value;
  }

 private:
  struct Lent {
    c10::Storage storage;
    c10::DispatchKeySet keys; // of the argument; none where the memory is a result's
  };

  c10::Device device_ = c10::Device(kDevice);
  std::unordered_map<c10::StorageImpl*, c10::Storage> borrowed_; // by the device's storage
  std::unordered_map<c10::StorageImpl*, Lent> lent_; // by the CPU's
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_; // by the CPU's
  std::vector<at::Tensor> arguments_, kept_;
};

void call_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Borrowing borrowing;
  const auto num_arguments = op.schema().arguments().size();
  for (auto i = stack->size() - num_arguments; i < stack->size(); ++i) {
    (*stack)[i] = borrowing.on_cpu((*stack)[i]);
  }
  op.callBoxed(stack);
  borrowing.write_back();
  for (auto i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    (*stack)[i] = borrowing.on_device((*stack)[i]);
  }
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Borrowing borrowing;
  borrowing.on_cpu(target).copy_(borrowing.on_cpu(source), non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.data() == nullptr) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {numel}, {});
}

at::Tensor& set_like(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

bool is_of_one_form(const at::Tensor&, const at::Tensor& other) {
  return other.layout() == c10::kStrided; // so that a parameter that moves here stays the parameter that it was
}

void record_stream(at::Tensor&, c10::Stream) {} // memory is released at once, and by then its work is done

} // namespace

at::Tensor on_cpu(const at::Tensor& tensor) {
  const c10::Device cpu(c10::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(), taken(tensor.storage(), cpu), nullptr, false);
  return tensor.device() == cpu ? tensor : tensor_over(std::move(storage), c10::DispatchKey::CPU, tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_like);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &is_of_one_form);
  // What torch would take apart for a device that it does not know.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&call_on_cpu>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&call_on_cpu>());
}

// A copy takes care of these bits itself, as it does on a CPU.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// Of what autocast rounds, what models of tests use.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
}

} // namespace hostmem
