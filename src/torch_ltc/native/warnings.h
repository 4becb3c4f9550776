// Warnings of kernels that run where no function of PyTorch's Python side hands them to Python.

#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "native.h"

namespace torch_ltc {

// The text that PyTorch gives the warning in Python, and whether it is of deprecation.
py::tuple told(const c10::Warning& warning);

}  // namespace torch_ltc
