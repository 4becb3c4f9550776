// Values of tensors with one element, where nothing is to be waited for.

#include "reads.h"

#include <torch/csrc/autograd/python_variable.h>

#include "handles.h"
#include "native.h"
#include "python_buffer.h"
#include "recorder.h"

namespace torch_ltc {
namespace {

// Told of a read that began at some time, with its bytes; says whether it may be done here.
PyObject* on_read = nullptr;

template <class Number>
at::Scalar number_at(const char* address) {
  return *reinterpret_cast<const Number*>(address);
}

// Nothing where it has to be waited for, or is of a kind that is seldom read. With the GIL.
std::optional<at::Scalar> number_in(const at::Tensor& tensor) {
  if (tensor.numel() != 1 || tensor.is_conj() || tensor.is_neg()) {
    return {};
  }
  Locked locked(recorder().lock);
  Buffer* found = buffer_of(tensor.storage());
  if (found == nullptr || found->number >= recorder().base || recorder().is_input(*found) || !found->spec) {
    return {};
  }
  const py::object buffer = python_of(BufferPtr::reclaim_copy(found));
  const Fields& fields = fields_of(buffer);
  if (fields.data == nullptr || !THPVariable_CheckExact(fields.data) || fields.job != nullptr ||
      fields.error != nullptr) {
    return {};
  }
  const at::Tensor& data = THPVariable_Unpack(fields.data);
  const size_t item = data.dtype().itemsize();
  const size_t end = (tensor.storage_offset() + 1) * item;
  if (!data.is_cpu() || data.layout() != at::kStrided || data.dtype() != tensor.dtype() || data.is_conj() ||
      data.is_neg() || data.storage().nbytes() < end) {
    return {};
  }
  // The whole of a buffer is its data, wherever that lies on its storage.
  const char* address = found->spec->matches(*tensor.unsafeGetTensorImpl())
      ? static_cast<const char*>(data.const_data_ptr())
      : static_cast<const char*>(data.storage().data()) + end - item;
  switch (data.scalar_type()) {
    case at::kFloat:
      return number_at<float>(address);
    case at::kDouble:
      return number_at<double>(address);
    case at::kLong:
      return number_at<int64_t>(address);
    case at::kBool:
      return number_at<bool>(address);
    default:
      return {};
  }
}

}  // namespace

std::optional<at::Scalar> read_at_once(const at::Tensor& tensor) {
  if (on_read == nullptr || !Py_IsInitialized()) {
    return {};
  }
  const py::gil_scoped_acquire gil;
  const double began_s = now_s();
  std::optional<at::Scalar> number = number_in(tensor);
  if (number && !py::handle(on_read)(tensor.dtype().itemsize(), began_s).cast<bool>()) {
    number.reset();
  }
  return number;
}

void bind_reads(py::module_& module) {
  module.def("set_on_read", [](py::object told) { on_read = told.release().ptr(); });
}

}  // namespace torch_ltc
