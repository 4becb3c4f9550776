// What every file of the extension has: each shows its part to Python by a function that module.cpp calls.

#pragma once

#include <pybind11/pybind11.h>

#include <chrono>

namespace torch_ltc {

namespace py = pybind11;

// As `time.perf_counter`.
inline double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace torch_ltc
