// Python values as the dispatcher's, and back. In a file of its own: PyTorch's header takes a minute to compile.

#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <pybind11/pybind11.h>

namespace torch_ltc {

c10::IValue to_ivalue(pybind11::handle value, const c10::TypePtr& type);
// The same; a number may stand where a tensor is expected.
c10::IValue to_operand(pybind11::handle value, const c10::TypePtr& type);
pybind11::object to_python(const c10::IValue& value);

}  // namespace torch_ltc
