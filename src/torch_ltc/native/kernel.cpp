// The kernels of the device: a function for each signature that most calls have, one boxed function for all others.

#include "kernel.h"

#include "eager.h"

namespace torch_ltc {
namespace {

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(Operator* op) : op_(op) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t n = op_->arguments.size();
    Values returned;
    if (op_->python_only || !take_call(*op_, stack->data() + (stack->size() - n), &returned)) {
      handle.redispatchBoxed(kPython, stack);
      return;
    }
    torch::jit::drop(*stack, n);
    for (c10::IValue& value : returned) {
      stack->push_back(std::move(value));
    }
  }

 private:
  Operator* op_;
};

}  // namespace

bool take_call(Operator& op, const c10::IValue* arguments, Values* returned) {
  if (eager_region().on() && eager_region().run(op, arguments, returned)) {
    return true;
  }
  return !op.unrecorded && recorder().hit(op, arguments, returned);
}

void register_kernel(Operator* op) {
  // Never destroyed: its end would take the kernels out while the process still computes.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
  std::optional<torch::CppFunction> kernel = typed_kernel(op);
  if (!kernel) {
    kernel = torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op));
  }
  library->impl(op->name.c_str(), torch::dispatch(c10::DispatchKey::PrivateUse1, std::move(*kernel)));
}

}  // namespace torch_ltc
