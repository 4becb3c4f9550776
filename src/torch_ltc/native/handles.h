// Specs and buffers as Python has them.

#pragma once

#include "buffer.h"
#include "native.h"

namespace torch_ltc {

struct SpecHandle {
  SpecPtr spec;
};

// The buffer of a `Buffer` of Python.
const BufferPtr& buffer_of_python(py::handle python);

// The form in C++ of a `Spec` of Python, kept on it.
SpecPtr spec_of(py::handle python);

// The `Buffer` of Python of a buffer that somebody holds, made at the first call.
py::object python_of(const BufferPtr& buffer);

// A number of Python's as the dispatcher has it.
c10::IValue number_value(py::handle value);

}  // namespace torch_ltc
