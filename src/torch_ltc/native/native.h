// What the files of the extension have in common: one function for each that shows its part to Python.

#pragma once

#include <pybind11/pybind11.h>

namespace torch_ltc {

namespace py = pybind11;

void bind_guard(py::module_& module);
void bind_composites(py::module_& module);
void bind_recorder(py::module_& module);

}  // namespace torch_ltc
