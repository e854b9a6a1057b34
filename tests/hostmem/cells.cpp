// The cell of an LSTM in one operator: torch asks a device for it, and a CPU has none to borrow.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace hostmem {
namespace {

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Maybe = const std::optional<at::Tensor>&;

bool is_there(Maybe tensor) {
  return tensor.has_value() && tensor->defined();
}

// Gates lie side by side: input, forget, cell, output. The workspace holds them as they were applied.
Three lstm_cell(
    const at::Tensor& of_input, const at::Tensor& of_hidden, const at::Tensor& cell, Maybe input_bias, Maybe hidden_bias) {
  auto gates = of_input + of_hidden;
  if (is_there(input_bias)) {
    gates = gates + *input_bias + *hidden_bias;
  }
  const auto parts = gates.chunk(4, 1);
  const auto input = parts[0].sigmoid(), forget = parts[1].sigmoid(), fresh = parts[2].tanh(), output = parts[3].sigmoid();
  const auto next = forget * cell + input * fresh;
  return {output * next.tanh(), next, at::cat({input, forget, fresh, output}, 1)};
}

Three lstm_cell_backward(
    Maybe of_hidden, Maybe of_next, const at::Tensor& cell, const at::Tensor& next, const at::Tensor& workspace, bool has_bias) {
  if (!is_there(of_hidden) && !is_there(of_next)) {
    return {};
  }
  const auto gates = workspace.chunk(4, 1);
  const auto &input = gates[0], &forget = gates[1], &fresh = gates[2], &output = gates[3];
  const auto shown = next.tanh();
  const auto hidden = is_there(of_hidden) ? *of_hidden : at::zeros_like(next);
  auto through = hidden * output * (1 - shown * shown);
  if (is_there(of_next)) {
    through = through + *of_next;
  }
  const auto of_gates = at::cat(
      {through * fresh * input * (1 - input),
       through * cell * forget * (1 - forget),
       through * input * (1 - fresh * fresh),
       hidden * shown * output * (1 - output)},
      1);
  return {of_gates, through * forget, has_bias ? of_gates.sum(0) : at::Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
}

} // namespace hostmem
