// Autograd's kernels of composite operators that are recorded as one call each: see device/composite_ops.py, whose
// kernels do what is not done here.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include "native.h"

namespace torch_ltc {
namespace {

constexpr c10::DispatchKeySet kPython(c10::DispatchKey::AutogradPrivateUse2);
constexpr c10::DispatchKeySet kDevice(c10::DispatchKey::PrivateUse1);
// PyTorch's autograd has a derivative for these operators as a whole, which it uses for nested tensors.
const c10::DispatchKeySet kWithDerivative =
    c10::DispatchKeySet(c10::DispatchKey::AutogradNestedTensor) | c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() && !tensor.key_set().has_any(c10::python_ks) &&
      !tensor._fw_grad(0).defined();
}

bool are_plain(const at::Tensor& first, const at::Tensor& second) {
  return first.scalar_type() == second.scalar_type() && is_plain(first) && is_plain(second) &&
      !c10::impl::TorchDispatchModeTLS::any_modes_set();
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

bool is_usual_linear(const at::Tensor& input, const at::Tensor& weight, const c10::IValue& bias) {
  if (!input.defined() || !weight.defined()) {
    return false;
  }
  const auto size = input.sizes(), shape = weight.sizes();
  if (size.size() < 2 || shape.size() != 2 || size.back() != shape[1] || !are_plain(input, weight)) {
    return false;
  }
  if (size.size() > 2 && !is_folded(input)) {
    return false;
  }
  if (bias.isNone() || !bias.toTensor().defined()) {
    return true;
  }
  const at::Tensor& added = bias.toTensor();
  return added.dim() == 1 && added.size(0) == shape[0] && are_plain(added, weight);
}

// True for batches of matrices with the same batch sizes.
bool is_batch_product(const at::Tensor& left, const at::Tensor& right) {
  const auto first = left.sizes(), second = right.sizes();
  const size_t dims = first.size();
  return dims > 2 && dims == second.size() && first.slice(0, dims - 2) == second.slice(0, dims - 2) &&
      first.back() == second[dims - 2];
}

using Choose = c10::DispatchKeySet (*)(const c10::IValue* arguments);

c10::DispatchKeySet forward_keys() {
  return at::GradMode::is_enabled() ? kWithDerivative : kDevice;
}

c10::DispatchKeySet linear_keys(const c10::IValue* arguments) {
  const bool usual = is_usual_linear(arguments[0].toTensor(), arguments[1].toTensor(), arguments[2]);
  return usual ? forward_keys() : kPython;
}

c10::DispatchKeySet matmul_keys(const c10::IValue* arguments) {
  const at::Tensor &left = arguments[0].toTensor(), &right = arguments[1].toTensor();
  const bool usual = left.defined() && right.defined() && is_batch_product(left, right) && are_plain(left, right);
  // PyTorch's derivative of the whole operator is not for complex numbers.
  const bool differs = usual && at::GradMode::is_enabled() && left.is_complex();
  return usual && !differs ? forward_keys() : kPython;
}

// Decomposed when it is differentiated itself.
c10::DispatchKeySet backward_keys(const c10::IValue* arguments) {
  const at::Tensor &first = arguments[0].toTensor(), &second = arguments[1].toTensor();
  const bool plain = first.defined() && second.defined() && are_plain(first, second);
  return !at::GradMode::is_enabled() && plain ? kDevice : kPython;
}

// Sends a call on by other keys.
class Chooser final : public c10::OperatorKernel {
 public:
  Chooser(Choose choose, bool matmul) : choose_(choose), matmul_(matmul) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t n = handle.schema().arguments().size();
    const c10::IValue* arguments = stack->data() + (stack->size() - n);
    if (matmul_) {
      const at::Tensor &left = arguments[0].toTensor(), &right = arguments[1].toTensor();
      if (left.defined() && right.defined() && left.dim() == 2 && right.dim() == 2) {
        at::Tensor product = at::mm(left, right);
        torch::jit::drop(*stack, n);
        stack->emplace_back(std::move(product));
        return;
      }
    }
    handle.redispatchBoxed(choose_(arguments), stack);
  }

 private:
  Choose choose_;
  bool matmul_;
};

void register_composites() {
  // Never destroyed, as the one of the device's kernels.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
  const auto add = [](const char* name, Choose choose, bool matmul) {
    auto kernel = torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Chooser>(choose, matmul));
    library->impl(name, torch::dispatch(c10::DispatchKey::AutogradPrivateUse1, std::move(kernel)));
  };
  add("aten::linear", &linear_keys, false);
  add("aten::matmul", &matmul_keys, true);
  add("aten::linear_backward", &backward_keys, false);
  add("aten::matmul_backward", &backward_keys, false);
}

}  // namespace

void bind_composites(py::module_& module) {
  module.def(
      "register_composites", &register_composites,
      "Register them. What is unusual goes to the kernels that Python has registered under AutogradPrivateUse2.");
}

}  // namespace torch_ltc
