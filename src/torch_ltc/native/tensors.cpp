// Tensors of the device on new storages.

#include <ATen/core/Tensor.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "device.h"
#include "native.h"
#include "storage.h"

namespace torch_ltc {
namespace {

at::Tensor make_tensor(c10::Storage&& storage, caffe2::TypeMeta dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// The numbers of a tuple; false, with a Python error set, when it holds something else.
bool numbers_of(PyObject* tuple, c10::SmallVector<int64_t, 6>& numbers) {
  const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
  for (Py_ssize_t place = 0; place < count; ++place) {
    numbers.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, place)));
  }
  return PyErr_Occurred() == nullptr;
}

// empty_tensor(size: tuple, dtype): called for each result that is recorded, hence no pybind11.
PyObject* empty_tensor(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || !PyTuple_Check(arguments[0]) || !THPDtype_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "empty_tensor(size: tuple, dtype: torch.dtype)");
    return nullptr;
  }
  c10::SmallVector<int64_t, 6> size;
  if (!numbers_of(arguments[0], size)) {
    return nullptr;
  }
  const auto dtype = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(arguments[1])->scalar_type);
  size_t count_elements = 1;
  for (const int64_t length : size) {
    count_elements *= static_cast<size_t>(length);
  }
  at::Tensor tensor = make_tensor(make_storage(count_elements * dtype.itemsize()), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return THPVariable_Wrap(tensor);
  END_HANDLE_TH_ERRORS
}

py::object empty_strided(
    const py::tuple& size, const py::tuple& stride, int64_t offset, const py::object& dtype, size_t size_bytes) {
  c10::SmallVector<int64_t, 6> sizes;
  c10::SmallVector<int64_t, 6> strides;
  if (!numbers_of(size.ptr(), sizes) || !numbers_of(stride.ptr(), strides)) {
    throw py::error_already_set();
  }
  const auto kind = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  at::Tensor tensor = make_tensor(make_storage(size_bytes), kind);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

PyMethodDef kEmptyTensor = {
    "empty_tensor", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&empty_tensor)), METH_FASTCALL,
    "A contiguous tensor of the device on a new storage."};

}  // namespace

void bind_tensors(py::module_& module) {
  module.add_object("empty_tensor", py::reinterpret_steal<py::object>(PyCFunction_New(&kEmptyTensor, nullptr)));
  module.def("empty_strided", &empty_strided, py::arg("size"), py::arg("stride"), py::arg("offset"), py::arg("dtype"),
             py::arg("size_bytes"), "A tensor of the device of any strides on a new storage of so many bytes.");
}

}  // namespace torch_ltc
