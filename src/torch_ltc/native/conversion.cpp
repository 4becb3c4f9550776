// Python values as the dispatcher's, and back.

#include "conversion.h"

#include <torch/csrc/jit/python/pybind_utils.h>

namespace torch_ltc {

c10::IValue to_ivalue(pybind11::handle value, const c10::TypePtr& type) {
  return torch::jit::toIValue(value, type);
}

c10::IValue to_operand(pybind11::handle value, const c10::TypePtr& type) {
  const torch::jit::ToIValueAllowNumbersAsTensors allowed(true);
  return torch::jit::toIValue(value, type);
}

pybind11::object to_python(const c10::IValue& value) {
  return torch::jit::toPyObject(value);
}

}  // namespace torch_ltc
