// What every file of the extension has: each shows its part to Python by a function that module.cpp calls.

#pragma once

#include <pybind11/pybind11.h>

namespace torch_ltc {

namespace py = pybind11;

}  // namespace torch_ltc
