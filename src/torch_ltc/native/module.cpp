// The module torch_ltc._native: what each file of the extension shows to Python.

#include "native.h"

namespace torch_ltc {

// Declared here and not in a header: a new file changes this one alone.
void bind_allocator(py::module_& module);
void bind_attention(py::module_& module);
void bind_buffers(py::module_& module);
void bind_composites(py::module_& module);
void bind_eager(py::module_& module);
void bind_empties(py::module_& module);
void bind_generator(py::module_& module);
void bind_guard(py::module_& module);
void bind_holdings(py::module_& module);
void bind_hooks(py::module_& module);
void bind_interpreter(py::module_& module);
void bind_nodes(py::module_& module);
void bind_reads(py::module_& module);
void bind_recorder(py::module_& module);
void bind_replay(py::module_& module);
void bind_steady(py::module_& module);
void bind_tensors(py::module_& module);

}  // namespace torch_ltc

PYBIND11_MODULE(_native, module) {
  module.doc() = "The part of torch_ltc in C++.";
  torch_ltc::bind_allocator(module);
  torch_ltc::bind_generator(module);
  torch_ltc::bind_guard(module);
  torch_ltc::bind_composites(module);
  torch_ltc::bind_attention(module);
  torch_ltc::bind_buffers(module);
  torch_ltc::bind_eager(module);
  torch_ltc::bind_empties(module);
  torch_ltc::bind_holdings(module);
  torch_ltc::bind_interpreter(module);
  torch_ltc::bind_nodes(module);
  torch_ltc::bind_reads(module);
  torch_ltc::bind_recorder(module);
  torch_ltc::bind_replay(module);
  torch_ltc::bind_hooks(module);
  torch_ltc::bind_steady(module);
  torch_ltc::bind_tensors(module);
}
