// A `Buffer` of Python: a buffer, and what Python keeps with it, in fields that passes over many of them read directly.

#pragma once

#include <cstdint>

#include "buffer.h"
#include "holdings.h"
#include "native.h"

namespace torch_ltc {

// A reference to an object of Python's; None is null here.
using Field = PyObject*;

inline void set_field(Field& field, PyObject* value) {
  PyObject* before = field;
  field = value == nullptr || value == Py_None ? nullptr : Py_NewRef(value);
  Py_XDECREF(before);
}

// What the attributes are: see record/buffer.py.
struct Fields {
  PyObject* weak_references = nullptr;
  Field data = nullptr;
  Field error = nullptr;
  Field job = nullptr;
  Field maker = nullptr;
  int64_t grown_bytes = 0;
  int64_t identity = 0;
  int64_t address = 0;
  int64_t address_bytes = 0;
};

// Not a class of pybind11: one is made for each output of a program, and pybind11 takes a microsecond to make one.
struct PythonBuffer {
  PyObject_HEAD;
  Fields fields;
  BufferPtr buffer;
  Held held;
};

PythonBuffer& python_buffer(py::handle python);

inline Fields& fields_of(py::handle python) { return python_buffer(python).fields; }

}  // namespace torch_ltc
