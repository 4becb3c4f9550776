// The kernels of the device: one boxed function per overload.

#include "kernel.h"

#include <torch/library.h>

namespace torch_ltc {
namespace {

// Keys of no other use: PrivateUse2 has no tensors, and so no call gets there by itself.
constexpr c10::DispatchKeySet kPython(c10::DispatchKey::PrivateUse2);

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(Operator* op) : op_(op) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (op_->python_only || !recorder().hit(*op_, *stack)) {
      handle.redispatchBoxed(kPython, stack);
    }
  }

 private:
  Operator* op_;
};

}  // namespace

void register_kernel(const std::string& name, Operator* op) {
  // Never destroyed: its end would take the kernels out while the process still computes.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
  library->impl(
      name.c_str(),
      torch::dispatch(
          c10::DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op))));
}

}  // namespace torch_ltc
