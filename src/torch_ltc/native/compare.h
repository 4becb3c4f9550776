// Arguments of a call, compared with what a node says of them.

#pragma once

#include <c10/util/SmallVector.h>

#include "node.h"

namespace torch_ltc {

using Numbers = c10::SmallVector<c10::IValue, 4>;

bool is_number(const c10::IValue& value, Number type);

// A number that stands in the place of a tensor; nothing for a tensor that is none.
c10::IValue wrapped_number(const at::Tensor& tensor);

bool equal(const c10::IValue& left, const c10::IValue& right);

// True for the device, or for none, as the call must have it.
bool is_device(const c10::IValue& value, bool named);

// True when an argument of a copy says nothing, or names this device or its layout; any bool is no matter there.
bool is_here(const c10::IValue& value);

// True when the call may have these run-time numbers.
bool is_tried(const Node& node, const Numbers& numbers);

}  // namespace torch_ltc
