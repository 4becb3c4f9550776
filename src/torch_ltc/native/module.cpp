// The module torch_ltc._native: what each file of the extension shows to Python.

#include "native.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The part of torch_ltc in C++.";
  torch_ltc::bind_guard(module);
  torch_ltc::bind_composites(module);
  torch_ltc::bind_recorder(module);
}
