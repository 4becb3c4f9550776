// Arguments of a call, compared with what a node says of them.

#include "compare.h"

#include <c10/core/TensorImpl.h>

#include <algorithm>

#include "device.h"

namespace torch_ltc {

bool is_number(const c10::IValue& value, Number type) {
  switch (type) {
    case Number::Bool:
      return value.isBool();
    case Number::Int:
      return value.isInt();
    case Number::Float:
      return value.isDouble();
    case Number::Complex:
      return value.isComplexDouble();
  }
  return false;
}

c10::IValue wrapped_number(const at::Tensor& tensor) {
  const void* data = tensor.unsafeGetTensorImpl()->data();
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Double:
      return *static_cast<const double*>(data);
    case c10::ScalarType::Long:
      return *static_cast<const int64_t*>(data);
    case c10::ScalarType::Bool:
      return *static_cast<const bool*>(data);
    case c10::ScalarType::ComplexDouble:
      return c10::IValue(*static_cast<const c10::complex<double>*>(data));
    default:
      return {};
  }
}

bool equal(const c10::IValue& left, const c10::IValue& right) {
  if (left.isInt() && right.isInt()) {
    return left.toInt() == right.toInt();
  }
  if (left.isBool() && right.isBool()) {
    return left.toBool() == right.toBool();
  }
  if (left.isDouble() && right.isDouble()) {
    return left.toDouble() == right.toDouble();
  }
  if (left.isNone() || right.isNone()) {
    return left.isNone() && right.isNone();
  }
  if (left.isList() && right.isList()) {
    const auto a = left.toListRef(), b = right.toListRef();
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), &equal);
  }
  if (left.isString() && right.isString()) {
    return left.toStringRef() == right.toStringRef();
  }
  if (left.isComplexDouble() && right.isComplexDouble()) {
    return left.toComplexDouble() == right.toComplexDouble();
  }
  return false;
}

bool is_device(const c10::IValue& value, bool named) {
  if (value.isNone()) {
    return !named;
  }
  if (!named || !value.isDevice()) {
    return false;
  }
  const c10::Device device = value.toDevice();
  return device.type() == kType && is_own(device.index());
}

bool is_here(const c10::IValue& value) {
  if (value.isInt()) {
    return value.toInt() == static_cast<int64_t>(at::kStrided);
  }
  return value.isNone() || value.isBool() || is_device(value, true);
}

bool is_tried(const Node& node, const Numbers& numbers) {
  if (node.any_numbers || numbers.empty()) {
    return true;
  }
  for (const auto& known : node.numbers) {
    if (std::equal(known.begin(), known.end(), numbers.begin(), numbers.end(), &equal)) {
      return true;
    }
  }
  return false;
}

}  // namespace torch_ltc
