// Autograd's kernels of composite operators that are recorded as one call each: see device/composite_ops.py, whose
// kernels do what is not done here.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul_native.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include "eager.h"
#include "native.h"

namespace torch_ltc {
namespace {

constexpr c10::DispatchKeySet kPythonAutograd(c10::DispatchKey::AutogradPrivateUse2);
constexpr c10::DispatchKeySet kDevice(c10::DispatchKey::PrivateUse1);
// PyTorch's autograd has a derivative for these operators as a whole, which it uses for nested tensors.
const c10::DispatchKeySet kWithDerivative =
    c10::DispatchKeySet(c10::DispatchKey::AutogradNestedTensor) | c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() && !tensor.key_set().has_any(c10::python_ks) &&
      !tensor._fw_grad(0).defined();
}

// A transform's own keys are those of the thread, which keys that a call is redispatched with do not have. Inside of a
// call that a transform has taken apart, the one in front is not included.
bool transforms_run() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode) ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool are_plain(const at::Tensor& first, const at::Tensor& second) {
  return first.scalar_type() == second.scalar_type() && is_plain(first) && is_plain(second) &&
      !c10::impl::TorchDispatchModeTLS::any_modes_set() && !transforms_run();
}

// True when `matmul` with a matrix takes all but the last dimension as one without a copy.
bool is_folded(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return true;
  }
  const auto size = tensor.sizes(), stride = tensor.strides();
  for (size_t i = 0; i + 2 < size.size(); ++i) {
    if (stride[i] != stride[i + 1] * size[i + 1]) {
      return false;
    }
  }
  return true;
}

bool is_usual_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  // Before any size is asked for: those of tensors that are being exported are symbols.
  if (!input.defined() || !weight.defined() || !are_plain(input, weight)) {
    return false;
  }
  const auto size = input.sizes(), shape = weight.sizes();
  if (size.size() < 2 || shape.size() != 2 || size.back() != shape[1]) {
    return false;
  }
  if (size.size() > 2 && !is_folded(input)) {
    return false;
  }
  if (!bias.has_value() || !bias->defined()) {
    return true;
  }
  return are_plain(*bias, weight) && bias->dim() == 1 && bias->size(0) == shape[0];
}

// True for batches of matrices with the same batch sizes.
bool is_batch_product(const at::Tensor& left, const at::Tensor& right) {
  const auto first = left.sizes(), second = right.sizes();
  const size_t dims = first.size();
  return dims > 2 && dims == second.size() && first.slice(0, dims - 2) == second.slice(0, dims - 2) &&
      first.back() == second[dims - 2];
}

c10::DispatchKeySet forward_keys() {
  return at::GradMode::is_enabled() ? kWithDerivative : kDevice;
}

// In an eager region the derivatives of the parts cost less than that of the whole, whose formula is Python's.
bool is_composed() { return at::GradMode::is_enabled() && eager_region().on(); }

// Decomposed when it is differentiated itself.
c10::DispatchKeySet backward_keys(const at::Tensor& first, const at::Tensor& second) {
  const bool plain = first.defined() && second.defined() && are_plain(first, second);
  return !at::GradMode::is_enabled() && plain ? kDevice : kPythonAutograd;
}

template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  static const auto op = find_operator<decltype(linear)>("aten::linear");
  // PyTorch before 2.13 has no derivative for complex numbers.
  const bool differs = at::GradMode::is_enabled() && weight.is_complex();
  const bool usual = !differs && is_usual_linear(input, weight, bias);
  if (usual && is_composed()) {
    return at::native::linear(input, weight, bias);
  }
  return op.redispatch(usual ? forward_keys() : kPythonAutograd, input, weight, bias);
}

at::Tensor matmul(const at::Tensor& left, const at::Tensor& right) {
  static const auto op = find_operator<decltype(matmul)>("aten::matmul");
  if (!left.defined() || !right.defined()) {
    return op.redispatch(kPythonAutograd, left, right);
  }
  if (left.dim() == 2 && right.dim() == 2) {
    return at::mm(left, right);
  }
  const bool usual = are_plain(left, right) && is_batch_product(left, right);
  // PyTorch's derivative of the whole operator is not for complex numbers; and where both gradients are those of one
  // tensor, it adds them in another order than the composition's.
  const bool differs = at::GradMode::is_enabled() && (left.is_complex() || left.is_same(right));
  if (usual && !differs && is_composed()) {
    return at::native::matmul(left, right);
  }
  return op.redispatch(usual && !differs ? forward_keys() : kPythonAutograd, left, right);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> linear_backward(
    const at::Tensor& input, const at::Tensor& grad, const at::Tensor& weight, std::array<bool, 3> mask) {
  static const auto op = find_operator<decltype(linear_backward)>("aten::linear_backward");
  return op.redispatch(backward_keys(input, grad), input, grad, weight, mask);
}

std::tuple<at::Tensor, at::Tensor> matmul_backward(
    const at::Tensor& grad, const at::Tensor& left, const at::Tensor& right, std::array<bool, 2> mask) {
  static const auto op = find_operator<decltype(matmul_backward)>("aten::matmul_backward");
  return op.redispatch(backward_keys(grad, left), grad, left, right, mask);
}

void register_composites() {
  // Never destroyed, as the one of the device's kernels.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
  constexpr auto kKey = c10::DispatchKey::AutogradPrivateUse1;
  library->impl("aten::linear", torch::dispatch(kKey, &linear));
  library->impl("aten::matmul", torch::dispatch(kKey, &matmul));
  library->impl("aten::linear_backward", torch::dispatch(kKey, &linear_backward));
  library->impl("aten::matmul_backward", torch::dispatch(kKey, &matmul_backward));
}

}  // namespace

void bind_composites(py::module_& module) {
  module.def(
      "register_composites", &register_composites,
      "Register them. What is unusual goes to the kernels that Python has registered under AutogradPrivateUse2.");
}

}  // namespace torch_ltc
