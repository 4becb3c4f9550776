// Memory accounting of all buffers of a program in one pass: see execute/memory.py.

#include "holdings.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "buffer.h"
#include "python_buffer.h"

namespace torch_ltc {

class Holdings {
 public:
  Holdings() = default;
  Holdings(const Holdings&) = delete;
  ~Holdings() {
    while (ring_.next != &ring_) {
      ring_.next->release();
    }
  }

  int64_t size_bytes() const { return size_bytes_; }

  // The most bytes that were held, with those of buffers that Python has not seen.
  int64_t most_bytes() {
    note_most();
    return most_bytes_;
  }

  void forget_most() {
    take_most_unseen_bytes();
    most_bytes_ = size_bytes_ + unseen_bytes();
  }

  int64_t count() const { return count_; }

  void hold(const py::list& made, int64_t run) {
    for (py::handle pair : made) {
      const auto both = py::reinterpret_borrow<py::tuple>(pair);
      put(both[0], both[1], run);
    }
    note_most();
  }

  // Those of these buffers that have data.
  void hold_made(const py::list& buffers, const py::list& makers, int64_t run) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (fields_of(buffers[i]).data != nullptr) {
        put(buffers[i], py::object(makers[i]), run);
      }
    }
    note_most();
  }

  // Give these buffers the plain tensors among the results as their data, and count them. The places of those that the
  // caller has to look at.
  py::list install(const py::list& buffers, const py::list& results, const py::sequence& makers, int64_t run) {
    TORCH_CHECK_VALUE(
        buffers.size() == results.size() && buffers.size() == makers.size(), "as many results and makers as buffers");
    py::list others;
    for (size_t i = 0; i < buffers.size(); ++i) {
      const py::handle buffer = PyList_GET_ITEM(buffers.ptr(), i);
      PyObject* result = PyList_GET_ITEM(results.ptr(), i);
      Fields& fields = fields_of(buffer);
      if (fields.data == result) {
        continue;
      }
      if (!THPVariable_CheckExact(result)) {
        others.append(i);
        continue;
      }
      set_field(fields.data, result);
      set_field(fields.error, nullptr);
      put(buffer, py::object(makers[i]), run);
    }
    note_most();
    return others;
  }

  // The bytes, the maker and the run of each.
  py::list all() const {
    // Before anything is made for Python: that may collect garbage, and buffers may die.
    std::vector<std::tuple<int64_t, py::object, int64_t>> found;
    found.reserve(count_);
    for (const Held* each = ring_.next; each != &ring_; each = each->next) {
      found.emplace_back(each->size_bytes, py::reinterpret_borrow<py::object>(each->maker), each->run);
    }
    py::list all;
    for (auto& [size, maker, run] : found) {
      all.append(py::make_tuple(size, std::move(maker), run));
    }
    return all;
  }

 private:
  friend struct Held;
  // The first and the last one.
  Held ring_;
  int64_t size_bytes_ = 0;
  int64_t count_ = 0;
  int64_t most_bytes_ = 0;

  void note_most() { most_bytes_ = std::max(most_bytes_, size_bytes_ + take_most_unseen_bytes()); }

  static int64_t size_of(py::handle buffer) {
    const Fields& fields = fields_of(buffer);
    if (fields.data != nullptr && THPVariable_CheckExact(fields.data)) {
      const at::Tensor& data = THPVariable_Unpack(fields.data);
      if (data.has_storage()) {
        return std::max(static_cast<int64_t>(data.storage().nbytes()), fields.grown_bytes);
      }
    }
    return buffer.attr("size_bytes").cast<int64_t>();
  }

  // One that is counted already, as a gradient that a replay writes to anew, is counted once.
  void put(py::handle buffer, const py::object& maker, int64_t run) {
    const int64_t size = size_of(buffer);
    Held& held = python_buffer(buffer).held;
    held.release();
    held.in = this;
    held.next = &ring_;
    held.previous = ring_.previous;
    ring_.previous->next = &held;
    ring_.previous = &held;
    held.size_bytes = size;
    held.run = run;
    held.maker = Py_NewRef(maker.ptr());
    size_bytes_ += size;
    ++count_;
  }
};

void Held::release() {
  if (in == nullptr) {
    return;
  }
  in->size_bytes_ -= size_bytes;
  --in->count_;
  in = nullptr;
  previous->next = next;
  next->previous = previous;
  next = previous = this;
  Py_CLEAR(maker);
}

void bind_holdings(py::module_& module) {
  py::class_<Holdings>(module, "Holdings", "Buffers that have their data, with their bytes and what made them.")
      .def(py::init<>())
      .def("hold", &Holdings::hold)
      .def("hold_made", &Holdings::hold_made)
      .def("forget_most", &Holdings::forget_most)
      .def("install", &Holdings::install)
      .def("all", &Holdings::all)
      .def_property_readonly("size_bytes", &Holdings::size_bytes)
      .def_property_readonly("most_bytes", &Holdings::most_bytes)
      .def_property_readonly("count", &Holdings::count);
}

}  // namespace torch_ltc
