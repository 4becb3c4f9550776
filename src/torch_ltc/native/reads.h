// Values of tensors with one element, where nothing is to be waited for.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace torch_ltc {

// The value, where it lies on the host and nothing pending or queued writes to it, and Python was told of the read.
std::optional<at::Scalar> read_at_once(const at::Tensor& tensor);

}  // namespace torch_ltc
