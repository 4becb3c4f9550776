// Kernels that try the hit path first.

#pragma once

#include <string>

#include "recorder.h"

namespace torch_ltc {

// Register the kernel of an overload of ATen on the device. Where it does not hit, the one that Python has registered
// under PrivateUse2 does the call.
void register_kernel(const std::string& name, Operator* op);

}  // namespace torch_ltc
