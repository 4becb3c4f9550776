// Kernels that try the hit path first.

#pragma once

#include <torch/library.h>

#include <string>

#include "recorder.h"

namespace torch_ltc {

// Where the kernels of Python are: PrivateUse2 has no tensors, and so no call gets there by itself.
constexpr c10::DispatchKeySet kPython(c10::DispatchKey::PrivateUse2);

// Run the call in an eager region, or record it; false when Python must do it.
bool take_call(Operator& op, const c10::IValue* arguments, Values* returned);

// Register the kernel of an overload of ATen on the device. Where it does not hit, the one that Python has registered
// under PrivateUse2 does the call.
void register_kernel(Operator* op);

// The kernel of an overload whose signature is one of those that most calls have; nothing for another one.
std::optional<torch::CppFunction> typed_kernel(Operator* op);

}  // namespace torch_ltc
