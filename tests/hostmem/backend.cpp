// The device's own backend of c10d, "hostccl": gloo, on tensors of the CPU that share the device's memory.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "hostmem.h"

// Torch 2.11 has the second name. Inside c10d the one that torch has hides the one out here.
struct PreMulSumSupplement {};
struct NCCLPreMulSumSupplement {};

namespace c10d::hostmem {
using Now = PreMulSumSupplement;
using Before = NCCLPreMulSumSupplement;
using Factor = std::conditional_t<std::is_same_v<Now, ::PreMulSumSupplement>, Before, Now>;
} // namespace c10d::hostmem

namespace hostmem {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Works = c10::intrusive_ptr<c10d::Work>;

// Arguments of a collective as gloo takes them: tensors of the CPU, and all else as it is.
template <class Value>
Value over(const Value& value) {
  if constexpr (std::is_same_v<Value, Tensor>) {
    return on_cpu(value);
  } else if constexpr (std::is_same_v<Value, Tensors> || std::is_same_v<Value, Lists>) {
    Value found;
    for (const auto& each : value) {
      found.push_back(over(each));
    }
    return found;
  } else {
    return value;
  }
}

Tensors flat(const Tensor& tensor) {
  return {tensor};
}

Tensors flat(const Tensors& tensors) {
  return tensors;
}

Tensors flat(const Lists& lists) {
  Tensors all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

template <class Value>
Value times(const Value& value, const at::Scalar& factor) {
  if constexpr (std::is_same_v<Value, Tensor>) {
    return value.mul(factor);
  } else {
    Value found;
    for (const auto& each : value) {
      found.push_back(times(each, factor));
    }
    return found;
  }
}

// The work of gloo, whose results are the device's tensors.
struct DeviceWork final : c10d::Work {
  DeviceWork(Works inner, Tensors outputs)
      : Work(-1, inner->retrieveOpType()), inner(std::move(inner)), outputs(std::move(outputs)) {}

  bool isCompleted() override {
    return inner->isCompleted();
  }

  bool isSuccess() const override {
    return inner->isSuccess();
  }

  std::exception_ptr exception() const override {
    return inner->exception();
  }

  int sourceRank() const override {
    return inner->sourceRank();
  }

  Tensors result() override {
    return outputs;
  }

  void synchronize() override {
    inner->synchronize();
  }

  bool wait(std::chrono::milliseconds timeout) override {
    return inner->wait(timeout);
  }

  void abort() override {
    inner->abort();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return inner->getFuture()->then(
        [outputs = outputs](c10::ivalue::Future& done) {
          done.value(); // which raises what the work raised
          return c10::IValue(outputs);
        },
        c10::ListType::create(c10::TensorType::get()));
  }

  Works inner;
  Tensors outputs;
};

struct DeviceBackend final : c10d::Backend {
  explicit DeviceBackend(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner(std::move(inner)) {}

  const std::string getBackendName() const override {
    return "hostccl";
  }

  void setSequenceNumberForGroup() override {
    inner->setSequenceNumberForGroup();
  }

  uint64_t getSequenceNumberForGroup() override {
    return inner->getSequenceNumberForGroup();
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    inner->setTimeout(timeout);
  }

  Works broadcast(Tensors& outputs, const c10d::BroadcastOptions& options) override {
    return call(&Backend::broadcast, outputs, options);
  }

  Works allreduce(Tensors& outputs, const c10d::AllreduceOptions& options) override {
    return call(&Backend::allreduce, outputs, options);
  }

  Works allreduce_coalesced(Tensors& outputs, const c10d::AllreduceCoalescedOptions& options) override {
    return call(&Backend::allreduce_coalesced, outputs, options);
  }

  Works reduce(Tensors& outputs, const c10d::ReduceOptions& options) override {
    return call(&Backend::reduce, outputs, options);
  }

  Works allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return call(&Backend::allgather, outputs, inputs, options);
  }

  Works _allgather_base(Tensor& outputs, Tensor& inputs, const c10d::AllgatherOptions& options) override {
    return call(&Backend::_allgather_base, outputs, inputs, options);
  }

  Works allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return call(&Backend::allgather_into_tensor_coalesced, outputs, inputs, options);
  }

  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return call(&Backend::gather, outputs, inputs, options);
  }

  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    return call(&Backend::scatter, outputs, inputs, options);
  }

  Works reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    return call(&Backend::reduce_scatter, outputs, inputs, options);
  }

  Works _reduce_scatter_base(Tensor& outputs, Tensor& inputs, const c10d::ReduceScatterOptions& options) override {
    return call(&Backend::_reduce_scatter_base, outputs, inputs, options);
  }

  Works reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return call(&Backend::reduce_scatter_tensor_coalesced, outputs, inputs, options);
  }

  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return call(&Backend::alltoall, outputs, inputs, options);
  }

  Works alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return call(&Backend::alltoall_base, output, input, output_sizes, input_sizes, options);
  }

  Works send(Tensors& tensors, int rank, int tag) override {
    return call(&Backend::send, tensors, rank, tag);
  }

  Works recv(Tensors& tensors, int rank, int tag) override {
    return call(&Backend::recv, tensors, rank, tag);
  }

  Works recvAnysource(Tensors& tensors, int tag) override {
    return call(&Backend::recvAnysource, tensors, tag);
  }

  Works barrier(const c10d::BarrierOptions& options) override {
    auto of_cpu = options;
    of_cpu.device = std::nullopt;
    of_cpu.device_ids.clear();
    return inner->barrier(of_cpu);
  }

  // Call gloo; the first argument is what the collective writes, or sends.
  template <class Method, class Outputs, class... Others>
  Works call(Method method, Outputs& outputs, Others&... others) {
    wait(mark(current_stream()));
    auto arguments = std::make_tuple(over(outputs), over(others)...);
    auto& options = std::get<sizeof...(Others)>(arguments);
    if constexpr (requires { options.reduceOp; }) {
      multiply(std::get<sizeof...(Others) - 1>(arguments), options, sizeof...(Others) == 1);
    }
    auto work = std::apply([&](auto&... given) { return (inner.get()->*method)(given...); }, arguments);
    if constexpr (requires { options.asyncOp; }) {
      if (!options.asyncOp) { // as nccl does
        work->wait();
        return nullptr;
      }
    }
    return c10::make_intrusive<DeviceWork>(std::move(work), flat(outputs));
  }

  // Multiply what is to be summed, as gloo does not: in place where the sum goes, else in a copy.
  template <class Summed, class Options>
  static void multiply(Summed& summed, Options& options, bool is_in_place) {
    if (options.reduceOp != c10d::ReduceOp::PREMUL_SUM) {
      return;
    }
    const auto* given = static_cast<const c10d::hostmem::Factor*>(options.reduceOp.supplement_.get());
    const at::Scalar factor =
        given->tensor_factor.defined() ? over(given->tensor_factor).item() : at::Scalar(given->double_factor);
    auto product = times(summed, factor);
    if (is_in_place) {
      const auto to = flat(summed), from = flat(product);
      for (size_t i = 0; i < to.size(); ++i) {
        to[i].copy_(from[i]);
      }
    } else {
      summed = std::move(product);
    }
    options.reduceOp = c10d::ReduceOp::SUM;
  }

  c10::intrusive_ptr<c10d::Backend> inner;
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<DeviceBackend, c10d::Backend, c10::intrusive_ptr<DeviceBackend>>(m, "DeviceBackend")
      .def(pybind11::init<c10::intrusive_ptr<c10d::Backend>>());
}

} // namespace hostmem
