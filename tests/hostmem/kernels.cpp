// An accelerator made of host memory: its operators are the CPU's, on the very memory of the device.
//
// [Note: one memory, two names] An operator of the device is called again on tensors of the CPU that borrow the memory
// of its arguments. What it returns keeps its memory and becomes the device's; a view becomes a view of the argument.
// So there is one kernel for all operators, which copies nothing, and numbers are those of the CPU bit by bit.
//
// [Note: called later] Where streams are late, an operator is first called on tensors without memory, which tells the form of
// what it returns, and again on the memory of its arguments when its turn comes. The host waits for an operator that has
// no kernel for the first call (its form may depend on numbers), that draws numbers, or whose result is no tensor.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/copy.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "hostmem.h"

namespace hostmem {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
using torch::jit::Stack;

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

// One call of an operator on a host: the CPU, or a device without memory.
class Borrowing {
 public:
  explicit Borrowing(c10::DeviceType host) : host_(host) {}

  at::Tensor on_host(const at::Tensor& given) {
    if (!given.defined()) {
      return given;
    }
    if (given.device().type() == kDevice) {
      device_ = given.device();
    } else if (host_ == c10::kCPU || given.dim() == 0) { // a number of the CPU goes with tensors anywhere
      originals_.emplace(given.unsafeGetTensorImpl(), given);
      return given;
    }
    auto& borrowed = borrowed_[given.storage().unsafeGetStorageImpl()];
    if (!borrowed) {
      const auto& storage = given.storage();
      borrowed = c10::Storage(
          c10::make_intrusive<c10::StorageImpl>(
              c10::StorageImpl::use_byte_size_t(),
              storage.nbytes(),
              at::DataPtr(host_ == c10::kCPU ? storage.mutable_data() : nullptr, c10::Device(host_)),
              c10::GetAllocator(host_),
              true));
      lent_.emplace(borrowed.unsafeGetStorageImpl(), Lent{storage, given.key_set()});
    }
    auto tensor = tensor_over(borrowed, host_ == c10::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta, given);
    originals_.emplace(tensor.unsafeGetTensorImpl(), given);
    arguments_.push_back(tensor);
    return tensor;
  }

  c10::IValue on_host(const c10::IValue& value) {
    if (value.isTensor()) {
      return on_host(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        tensors.push_back(on_host(tensor));
      }
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        tensors.push_back(tensor ? std::optional(on_host(*tensor)) : std::nullopt);
      }
      return tensors;
    }
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      device_ = value.toDevice();
      return c10::Device(host_);
    }
    return value;
  }

  // Let arguments have the sizes and the memory that their likes on the host got, as `out` of an operator does.
  void write_back() {
    for (const auto& [of_host, lent] : lent_) {
      const auto& storage = lent.storage;
      const bool is_new = host_ == c10::kCPU ? of_host->data() != storage.data() : of_host->nbytes() != storage.nbytes();
      if (is_new) {
        auto memory = memory_of(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(of_host)), storage.device());
        if (host_ != c10::kCPU && storage.nbytes() > 0) {
          wait(mark(current_stream(storage.device())));
          allocator()->copy_data(memory.get(), storage.data(), std::min(storage.nbytes(), of_host->nbytes()));
        }
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
        storage.unsafeGetStorageImpl()->set_nbytes(of_host->nbytes());
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
    auto* of_host = result.storage().unsafeGetStorageImpl();
    auto found = lent_.find(of_host);
    if (found == lent_.end()) {
      auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), of_host->nbytes(), memory_of(result.storage(), device()), allocator(), true));
      found = lent_.emplace(of_host, Lent{storage, {}}).first;
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

  // Put the results of a call in the place of its arguments.
  void return_on_device(Stack& stack, const Stack& results) {
    for (const auto& result : results) {
      stack.push_back(on_device(result));
    }
  }

  c10::Device device() const {
    return device_.has_index() ? device_ : c10::Device(kDevice, current_device());
  }

 private:
  // Memory of the device, with what a storage of the host has.
  at::DataPtr memory_of(const c10::Storage& storage, c10::Device device) const {
    if (host_ == c10::kCPU && !is_late()) {
      return taken(storage, device);
    }
    auto memory = kept_memory(storage.nbytes(), device);
    if (host_ == c10::kCPU) {
      allocator()->copy_data(memory.get(), storage.data(), storage.nbytes());
    }
    return memory;
  }

  struct Lent {
    c10::Storage storage;
    c10::DispatchKeySet keys; // of the argument; none where the memory is a result's
  };

  c10::DeviceType host_;
  c10::Device device_ = c10::Device(kDevice);
  std::unordered_map<c10::StorageImpl*, c10::Storage> borrowed_; // by the device's storage
  std::unordered_map<c10::StorageImpl*, Lent> lent_; // by the CPU's
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_; // by the CPU's
  std::vector<at::Tensor> arguments_, kept_;
};

Stack popped(Stack& stack, size_t num) {
  Stack values(std::make_move_iterator(stack.end() - num), std::make_move_iterator(stack.end()));
  stack.resize(stack.size() - num);
  return values;
}

Stack on_host(Borrowing& borrowing, const Stack& given) {
  Stack values;
  for (const auto& value : given) {
    values.push_back(borrowing.on_host(value));
  }
  return values;
}

void call_at_once(const c10::OperatorHandle& op, Stack& stack, const Stack& given) {
  Borrowing cpu(c10::kCPU);
  auto values = on_host(cpu, given);
  op.callBoxed(&values);
  cpu.write_back();
  cpu.return_on_device(stack, values);
}

// A view has the memory of an argument, and needs no turn.
bool is_view(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const auto& each) {
    return each.alias_info() != nullptr && !each.alias_info()->isWrite();
  });
}

// Whether a call writes no element: an empty tensor has any.
bool has_no_work(const c10::FunctionSchema& schema) {
  static const std::set<std::string> empty = {"aten::empty", "aten::empty_strided", "aten::resize_"};
  return empty.contains(schema.name());
}

// Without memory, statistics of 16-bit tensors have 32 bits, as on other devices; the CPU's have 16.
bool is_norm(const c10::FunctionSchema& schema) {
  return schema.name().starts_with("aten::native_") && schema.name().find("_norm") != std::string::npos;
}

bool may_be_late(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto is_generator = [](const auto& each) { return each.type()->str().find("Generator") != std::string::npos; };
  const auto is_tensor = [](const auto& each) { return each.type()->str().find("Tensor") != std::string::npos; };
  const auto &given = schema.arguments(), &returned = schema.returns();
  // Other kernels than torch's own may need the interpreter.
  return op.operator_name().getNamespace() == "aten" && !is_norm(schema) && !op.hasTag(at::Tag::nondeterministic_seeded) &&
      std::none_of(given.begin(), given.end(), is_generator) && std::all_of(returned.begin(), returned.end(), is_tensor);
}

// Tensors of the CPU, which the host may change once a call has returned, as they are now.
Stack as_now(const Stack& given) {
  Stack values = given;
  for (auto& value : values) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu()) {
      value = value.toTensor().clone();
    }
  }
  return values;
}

void collect(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor() && value.toTensor().defined()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      tensors.push_back(tensor);
    }
  }
}

std::vector<at::Tensor> tensors_of(const Stack& values) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) {
    collect(value, tensors);
  }
  return tensors;
}

void queue_call(const c10::OperatorHandle& op, const c10::Stream& stream, const Stack& given, const Stack& results) {
  Borrowing cpu(c10::kCPU);
  auto values = on_host(cpu, as_now(given));
  auto outputs = on_host(cpu, results);
  queue(stream, [op, values = std::move(values), outputs = tensors_of(outputs)]() mutable {
    op.callBoxed(&values);
    const auto found = tensors_of(values);
    for (size_t i = 0; i < found.size(); ++i) {
      const auto &from = found[i], &to = outputs[i];
      TORCH_CHECK(
          from.sizes() == to.sizes() && from.dtype() == to.dtype(),
          "hostmem: ", op.operator_name(), " returned ", from.dtype(), from.sizes(), ", expected ", to.dtype(), to.sizes());
      if (from.data_ptr() != to.data_ptr()) {
        to.copy_(from);
      }
    }
  });
}

// See [Note: called later].
bool call_later(const c10::OperatorHandle& op, Stack& stack, const Stack& given) {
  Borrowing meta(c10::kMeta);
  auto values = on_host(meta, given);
  try {
    without_modes([&] { op.callBoxed(&values); });
  } catch (const std::exception&) {
    return false; // a mistake of the caller is raised by the CPU's kernel
  }
  meta.write_back();
  Stack results;
  meta.return_on_device(results, values);
  if (!has_no_work(op.schema())) {
    queue_call(op, current_stream(meta.device()), given, results);
  }
  stack.insert(stack.end(), results.begin(), results.end());
  return true;
}

void call_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto given = popped(*stack, op.schema().arguments().size());
  if (is_late() && !is_view(op.schema())) {
    if (may_be_late(op) && call_later(op, *stack, given)) {
      return;
    }
    Borrowing device(c10::kCPU);
    on_host(device, given);
    wait(mark(current_stream(device.device())));
  }
  call_at_once(op, *stack, given);
}

// A copy from or to memory of the host that is not pinned is over, for the host, when it returns.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Borrowing cpu(c10::kCPU);
  const bool is_free = non_blocking && (source.is_cpu() ? source : target).is_pinned();
  const auto from = is_late() && source.is_cpu() && !is_free ? source.clone() : source;
  auto run = [to = cpu.on_host(target), from = cpu.on_host(from), non_blocking]() mutable {
    to.copy_(from, non_blocking);
  };
  if (!is_late()) {
    run();
    return target;
  }
  const auto stream = current_stream(cpu.device());
  queue(stream, std::move(run));
  if (target.is_cpu() && !is_free) {
    wait(mark(stream));
  }
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

void record_stream(at::Tensor& self, c10::Stream stream) {
  use_on(self.storage().data(), stream);
}

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
