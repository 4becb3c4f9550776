// What Python sees of specs and buffers.

#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "handles.h"
#include "recorder.h"

namespace torch_ltc {
namespace {

PyObject* buffer_class = nullptr;

}  // namespace

SpecPtr spec_of(py::handle python) {
  py::object known = python.attr("native");
  if (!known.is_none()) {
    return known.cast<SpecHandle&>().spec;
  }
  auto spec = c10::make_intrusive<Spec>();
  py::object dtype = python.attr("dtype");
  spec->dtype = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  for (py::handle length : python.attr("size")) {
    spec->size.push_back(length.cast<int64_t>());
  }
  for (py::handle step : python.attr("stride")) {
    spec->stride.push_back(step.cast<int64_t>());
  }
  spec->offset = python.attr("offset").cast<int64_t>();
  spec->conj = python.attr("conj").cast<bool>();
  spec->neg = python.attr("neg").cast<bool>();
  spec->contiguous = python.attr("contiguous").cast<bool>();
  spec->size_bytes = python.attr("extent")().cast<size_t>() * spec->dtype.itemsize();
  spec->python = python.inc_ref().ptr();
  python.attr("native") = SpecHandle{spec};
  return spec;
}

py::object python_of(const BufferPtr& buffer) {
  PyObject* known = buffer->python.load();
  if (known == nullptr) {
    py::object made = py::reinterpret_borrow<py::object>(buffer_class)();
    made.cast<BufferHandle&>().buffer = buffer;
    known = made.inc_ref().ptr();
    buffer->python.store(known);
    // Its storage may have ended meanwhile, on a thread without the GIL, and found nothing to let go of.
    release_python(*buffer);
    return made;
  }
  return py::reinterpret_borrow<py::object>(known);
}

namespace {

Buffer* buffer_of_tensor(PyObject* object) {
  if (!THPVariable_Check(object)) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) {
    return nullptr;
  }
  return buffer_of(tensor.unsafeGetTensorImpl()->unsafe_storage());
}

py::object find_buffer(py::handle object) {
  Buffer* buffer = buffer_of_tensor(object.ptr());
  return buffer == nullptr ? py::none() : python_of(BufferPtr::reclaim_copy(buffer));
}

// The number of a tensor's value, counted from the beginning of the program; -1 when it has none yet, -2 for what is no
// tensor of the device.
int64_t number_of(py::handle object) {
  Buffer* buffer = buffer_of_tensor(object.ptr());
  if (buffer == nullptr) {
    return -2;
  }
  const int64_t number =
      buffer->value_of(*THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl(), recorder().base);
  return number < 0 ? -1 : number - recorder().base;
}

// A storage holds the buffer from now on, and with it the `Buffer` of Python.
const BufferPtr& held(py::handle python) {
  const BufferPtr& buffer = python.cast<BufferHandle&>().buffer;
  if (buffer->python.load() == nullptr) {
    buffer->python.store(python.inc_ref().ptr());
  }
  return buffer;
}

py::object python_new_tensor(py::handle python, py::handle spec, size_t size_bytes) {
  return py::cast(new_tensor(held(python), *spec_of(spec), size_bytes));
}

void attach(py::handle tensor, py::handle python) {
  hold(THPVariable_Unpack(tensor.ptr()).storage(), held(python));
}

}  // namespace

void bind_buffers(py::module_& module) {
  py::class_<SpecHandle>(module, "Spec").def("is_used", [](const SpecHandle& self) {
    return self.spec.use_count() > 1;
  });
  py::class_<BufferHandle>(module, "Buffer")
      .def(py::init<>())
      .def_property(
          "number", [](const BufferHandle& self) { return self.buffer->number; },
          [](BufferHandle& self, int64_t number) { self.buffer->number = number; })
      .def_property(
          "spec",
          [](const BufferHandle& self) {
            return self.buffer->spec ? py::reinterpret_borrow<py::object>(self.buffer->spec->python) : py::none();
          },
          [](BufferHandle& self, py::handle spec) { self.buffer->spec = spec_of(spec); })
      .def_property_readonly("input", [](const BufferHandle& self) { return self.buffer->input; })
      .def("note_data", [](BufferHandle& self) { self.buffer->computed = true; })
      .def(
          "value_of",
          [](const BufferHandle& self, py::handle spec, int64_t base) {
            return self.buffer->value_of(spec_of(spec).get(), base);
          })
      .def(
          "remember_view",
          [](BufferHandle& self, py::handle spec, int64_t base, int64_t number) {
            self.buffer->remember_view(spec_of(spec), base, number);
          })
      .def("forget_views", [](BufferHandle& self) { self.buffer->forget_views(); })
      .def("view_numbers", [](const BufferHandle& self, int64_t base) {
        std::vector<int64_t> found;
        if (self.buffer->views_base == base) {
          for (const auto& view : self.buffer->views) {
            found.push_back(view.second);
          }
        }
        return found;
      });
  module.def("set_buffer_class", [](py::object made) { buffer_class = made.release().ptr(); });
  module.def("find_buffer", &find_buffer);
  module.def("number_of", &number_of);
  module.def("new_tensor", &python_new_tensor);
  module.def("attach", &attach);
}

}  // namespace torch_ltc
