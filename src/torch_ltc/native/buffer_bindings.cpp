// What Python sees of specs and buffers.

#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "handles.h"
#include "python_buffer.h"
#include "recorder.h"

namespace torch_ltc {
namespace {

// The base of Python's class `Buffer`.
PyTypeObject python_buffer_type{};
// The class itself.
PyTypeObject* buffer_class = nullptr;

PyObject* new_python_buffer(PyTypeObject* type, BufferPtr buffer) {
  PyObject* made = type->tp_alloc(type, 0);
  if (made != nullptr) {
    new (&reinterpret_cast<PythonBuffer*>(made)->fields) Fields();
    new (&reinterpret_cast<PythonBuffer*>(made)->buffer) BufferPtr(std::move(buffer));
    new (&reinterpret_cast<PythonBuffer*>(made)->held) Held();
  }
  return made;
}

// For the class of Python, which the garbage collector looks into.
int visit_python_buffer(PyObject* self, visitproc visit, void* arg) {
  const Fields& fields = reinterpret_cast<PythonBuffer*>(self)->fields;
  Py_VISIT(fields.data);
  Py_VISIT(fields.error);
  Py_VISIT(fields.job);
  Py_VISIT(fields.maker);
  return 0;
}

int clear_python_buffer(PyObject* self) {
  Fields& fields = reinterpret_cast<PythonBuffer*>(self)->fields;
  for (Field* field : {&fields.data, &fields.error, &fields.job, &fields.maker}) {
    set_field(*field, nullptr);
  }
  return 0;
}

void end_of_python_buffer(PyObject* self) {
  auto& ending = *reinterpret_cast<PythonBuffer*>(self);
  if (ending.fields.weak_references != nullptr) {
    PyObject_ClearWeakRefs(self);
  }
  ending.held.release();
  clear_python_buffer(self);
  ending.buffer.~BufferPtr();
  Py_TYPE(self)->tp_free(self);
}

Buffer& in(PyObject* python) { return *reinterpret_cast<PythonBuffer*>(python)->buffer; }

PyObject* get_spec(PyObject* self, void*) {
  return Py_NewRef(in(self).spec ? in(self).spec->python : Py_None);
}

int set_spec(PyObject* self, PyObject* spec, void*) {
  try {
    in(self).spec = spec_of(spec);
    return 0;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  }
  return -1;
}

PyObject* get_number(PyObject* self, void*) { return PyLong_FromLongLong(in(self).number); }

int set_number(PyObject* self, PyObject* number, void*) {
  const int64_t given = PyLong_AsLongLong(number);
  if (given == -1 && PyErr_Occurred()) {
    return -1;
  }
  in(self).number = given;
  return 0;
}

PyObject* get_input(PyObject* self, void*) { return PyLong_FromLongLong(in(self).input); }

// The field that lies so many bytes from the beginning of the fields.
template <typename Type>
Type& field_at(PyObject* self, void* offset) {
  auto* fields = reinterpret_cast<char*>(&reinterpret_cast<PythonBuffer*>(self)->fields);
  return *reinterpret_cast<Type*>(fields + reinterpret_cast<size_t>(offset));
}

PyObject* get_object(PyObject* self, void* offset) {
  PyObject* value = field_at<Field>(self, offset);
  return Py_NewRef(value == nullptr ? Py_None : value);
}

int set_object(PyObject* self, PyObject* value, void* offset) {
  set_field(field_at<Field>(self, offset), value);
  return 0;
}

PyObject* get_integer(PyObject* self, void* offset) { return PyLong_FromLongLong(field_at<int64_t>(self, offset)); }

int set_integer(PyObject* self, PyObject* value, void* offset) {
  const int64_t given = value == nullptr ? 0 : PyLong_AsLongLong(value);
  if (given == -1 && PyErr_Occurred()) {
    return -1;
  }
  field_at<int64_t>(self, offset) = given;
  return 0;
}

PyGetSetDef object_field(const char* name, size_t offset) {
  return {name, &get_object, &set_object, nullptr, reinterpret_cast<void*>(offset)};
}

PyGetSetDef integer_field(const char* name, size_t offset) {
  return {name, &get_integer, &set_integer, nullptr, reinterpret_cast<void*>(offset)};
}

PyGetSetDef python_buffer_attributes[] = {
    {"number", &get_number, &set_number, nullptr, nullptr},
    {"spec", &get_spec, &set_spec, nullptr, nullptr},
    {"input", &get_input, nullptr, nullptr, nullptr},
    object_field("data", offsetof(Fields, data)),
    object_field("error", offsetof(Fields, error)),
    object_field("job", offsetof(Fields, job)),
    object_field("maker", offsetof(Fields, maker)),
    integer_field("grown_bytes", offsetof(Fields, grown_bytes)),
    integer_field("_identity", offsetof(Fields, identity)),
    integer_field("_address", offsetof(Fields, address)),
    integer_field("_address_bytes", offsetof(Fields, address_bytes)),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

template <class Function>
void add_method(const char* name, Function function) {
  const py::handle type(reinterpret_cast<PyObject*>(&python_buffer_type));
  const py::cpp_function method(function, py::name(name), py::is_method(type));
  PyDict_SetItemString(python_buffer_type.tp_dict, name, method.ptr());
}

void make_python_buffer_type() {
  Py_SET_REFCNT(reinterpret_cast<PyObject*>(&python_buffer_type), 1);
  python_buffer_type.tp_name = "torch_ltc._native.Buffer";
  python_buffer_type.tp_basicsize = sizeof(PythonBuffer);
  python_buffer_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE;
  python_buffer_type.tp_new = [](PyTypeObject* type, PyObject*, PyObject*) {
    return new_python_buffer(type, c10::make_intrusive<Buffer>());
  };
  python_buffer_type.tp_dealloc = &end_of_python_buffer;
  python_buffer_type.tp_traverse = &visit_python_buffer;
  python_buffer_type.tp_clear = &clear_python_buffer;
  // The fields come right after the head.
  static_assert(sizeof(PyObject) % alignof(Fields) == 0);
  python_buffer_type.tp_weaklistoffset = sizeof(PyObject) + offsetof(Fields, weak_references);
  python_buffer_type.tp_getset = python_buffer_attributes;
  if (PyType_Ready(&python_buffer_type) < 0) {
    throw py::error_already_set();
  }
  add_method("note_data", [](py::handle self) { in(self.ptr()).computed = true; });
  add_method("value_of", [](py::handle self, py::handle spec, int64_t base) {
    return in(self.ptr()).value_of(spec_of(spec).get(), base);
  });
  add_method("remember_view", [](py::handle self, py::handle spec, int64_t base, int64_t number) {
    in(self.ptr()).remember_view(spec_of(spec), base, number);
  });
  add_method("view_numbers", [](py::handle self, int64_t base) {
    std::vector<int64_t> found;
    if (in(self.ptr()).views_base == base) {
      for (const auto& view : in(self.ptr()).views.all()) {
        found.push_back(view.second);
      }
    }
    return found;
  });
  PyType_Modified(&python_buffer_type);
}

}  // namespace

PythonBuffer& python_buffer(py::handle python) {
  if (!PyObject_TypeCheck(python.ptr(), &python_buffer_type)) {
    throw py::type_error("a Buffer is expected");
  }
  return *reinterpret_cast<PythonBuffer*>(python.ptr());
}

const BufferPtr& buffer_of_python(py::handle python) { return python_buffer(python).buffer; }

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
  // Of those without elements, only some have the strides that a new tensor gets.
  const bool empty = std::find(spec->size.begin(), spec->size.end(), 0) != spec->size.end();
  spec->contiguous = !empty && python.attr("contiguous").cast<bool>();
  spec->size_bytes = python.attr("extent")().cast<size_t>() * spec->dtype.itemsize();
  spec->python = python.inc_ref().ptr();
  python.attr("native") = SpecHandle{spec};
  return spec;
}

namespace {

// Of Python: the spec of a physical tensor; and what is to be done with a buffer that has got its memory.
PyObject* spec_of_data = nullptr;
PyObject* note_adopted = nullptr;

// Give the `Buffer` of Python the memory that an eager region has made.
py::object adopted(const BufferPtr& buffer, py::object made) {
  auto data = py::reinterpret_steal<py::object>(THPVariable_Wrap(buffer->data));
  SpecPtr spec = spec_of(py::handle(spec_of_data)(data));
  set_field(fields_of(made).data, data.ptr());
  {
    // Eager regions look at its memory without the GIL.
    Locked locked(recorder().lock);
    PyObject* known = buffer->python.load();
    if (known != nullptr) {
      // Another thread was quicker.
      return py::reinterpret_borrow<py::object>(known);
    }
    buffer->spec = std::move(spec);
    buffer->python.store(py::object(made).release().ptr());
    buffer->set_data({});
  }
  release_python(*buffer);
  py::handle{note_adopted}(made);
  return made;
}

}  // namespace

py::object python_of(const BufferPtr& buffer) {
  PyObject* known = buffer->python.load();
  if (known == nullptr) {
    py::object made = py::reinterpret_steal<py::object>(new_python_buffer(buffer_class, buffer));
    if (!made) {
      throw py::error_already_set();
    }
    if (buffer->data.defined()) {
      return adopted(buffer, std::move(made));
    }
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
  const BufferPtr& buffer = buffer_of_python(python);
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
  make_python_buffer_type();
  module.attr("Buffer") = py::handle(reinterpret_cast<PyObject*>(&python_buffer_type));
  module.def("set_buffer_class", [](py::object made) {
    buffer_class = reinterpret_cast<PyTypeObject*>(made.release().ptr());
  });
  module.def("set_adopting", [](py::object spec, py::object note) {
    spec_of_data = spec.release().ptr();
    note_adopted = note.release().ptr();
  });
  module.def("find_buffer", &find_buffer);
  module.def("number_of", &number_of);
  module.def("new_tensor", &python_new_tensor);
  module.def("attach", &attach);
}

}  // namespace torch_ltc
