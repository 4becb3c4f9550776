// What a replay relies on, as it was: Python state, shapes of arguments, modes of the thread.

#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "handles.h"
#include "python_buffer.h"

namespace torch_ltc {

#if PY_VERSION_HEX < 0x030E0000
constexpr bool kHasVersions = true;
// A number that changes with every write to the dict.
inline uint64_t version_of(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag; }
#else
constexpr bool kHasVersions = false;
inline uint64_t version_of(PyObject*) { return 0; }
#endif

inline const at::Tensor& tensor_of(py::handle object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), "expected a tensor");
  return THPVariable_Unpack(object.ptr());
}

inline py::object attribute(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object, name);
  if (found == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(found);
}

// The spec of a `Buffer` of Python, borrowed; null when it has none. Asking Python for it takes three times as long.
inline PyObject* spec_of_buffer(PyObject* buffer) {
  const SpecPtr& spec = buffer_of_python(buffer)->spec;
  return spec ? spec->python : nullptr;
}

// All that a program knows of a tensor but its memory.
struct Shape {
  explicit Shape(const at::Tensor& tensor)
      : dtype(tensor.dtype()),
        keys(tensor.key_set()),
        sizes(tensor.sizes().begin(), tensor.sizes().end()),
        strides(tensor.strides().begin(), tensor.strides().end()),
        offset(tensor.storage_offset()),
        requires_grad(tensor.requires_grad()) {}

  bool fits(const at::Tensor& tensor) const {
    return tensor.dtype() == dtype && tensor.key_set() == keys && tensor.sizes() == c10::IntArrayRef(sizes) &&
        tensor.strides() == c10::IntArrayRef(strides) && tensor.storage_offset() == offset &&
        tensor.requires_grad() == requires_grad;
  }

  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
  bool requires_grad;
};

// What Python objects held when they were added. Objects are borrowed: whoever makes this one keeps them alive, in
// places that Python's garbage collector can look into.
class Unchanged {
 public:
  void add_dict(py::dict dict) { dicts_.emplace_back(dict.ptr(), version_of(dict.ptr())); }

  // The list has these values at these places; both are kept by the caller.
  void add_list(py::list list, const std::vector<Py_ssize_t>& places, py::list values) {
    lists_.push_back({list.ptr(), PyList_GET_SIZE(list.ptr()), places, values.ptr()});
  }

  // The dict has these values under these keys, and nothing under the others; all are kept by the caller.
  void add_entries(py::dict dict, py::list keys, py::list values, py::list missing) {
    entries_.push_back({dict.ptr(), keys.ptr(), values.ptr(), missing.ptr()});
  }

  void add_empty(py::handle container) { empty_.push_back(container.ptr()); }

  void add_cell(py::handle cell, py::handle value) {
    TORCH_CHECK_TYPE(PyCell_Check(cell.ptr()), "expected a cell");
    cells_.emplace_back(cell.ptr(), value.ptr());
  }

  void add_tensor(py::handle tensor) { tensors_.emplace_back(tensor.ptr(), Shape(tensor_of(tensor))); }

  // The tensor lies on the storage that it lies on now.
  void add_memory(py::handle tensor) {
    memory_.emplace_back(tensor.ptr(), tensor_of(tensor).storage().unsafeGetStorageImpl());
  }

  // The gradient of `owner` is this very tensor; or, with a bool, there is one or not.
  void add_gradient(py::handle owner, py::handle expected) {
    tensor_of(owner);
    gradients_.emplace_back(owner.ptr(), expected.ptr());
  }

  void forget_dicts() {
    dicts_.clear();
    entries_.clear();
  }

  // Everything.
  bool holds() const {
    const bool written = std::any_of(
        dicts_.begin(), dicts_.end(), [](const auto& each) { return version_of(each.first) != each.second; });
    return !written && rest_holds();
  }

  // The places of dicts that were written to, in the order in which they were added.
  std::vector<size_t> written() const {
    std::vector<size_t> places;
    for (size_t place = 0; place < dicts_.size(); ++place) {
      if (version_of(dicts_[place].first) != dicts_[place].second) {
        places.push_back(place);
      }
    }
    return places;
  }

  // All but the versions of dicts.
  bool rest_holds() const {
    return lists_hold() && entries_hold() && empty_hold() && cells_hold() && gradients_hold() && tensors_hold();
  }

 private:
  struct List {
    PyObject* list;
    Py_ssize_t length;
    std::vector<Py_ssize_t> places;
    PyObject* values;
  };

  struct Entries {
    PyObject* dict;
    PyObject* keys;
    PyObject* values;
    PyObject* missing;
  };

  bool entries_hold() const {
    for (const Entries& each : entries_) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(each.keys); ++i) {
        if (PyDict_GetItem(each.dict, PyList_GET_ITEM(each.keys, i)) != PyList_GET_ITEM(each.values, i)) {
          return false;
        }
      }
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(each.missing); ++i) {
        if (PyDict_GetItem(each.dict, PyList_GET_ITEM(each.missing, i)) != nullptr) {
          return false;
        }
      }
    }
    return true;
  }

  bool lists_hold() const {
    for (const List& each : lists_) {
      if (PyList_GET_SIZE(each.list) != each.length) {
        return false;
      }
      for (size_t i = 0; i < each.places.size(); ++i) {
        if (PyList_GET_ITEM(each.list, each.places[i]) != PyList_GET_ITEM(each.values, i)) {
          return false;
        }
      }
    }
    return true;
  }

  bool empty_hold() const {
    for (PyObject* each : empty_) {
      if (PyObject_Size(each) != 0) {
        PyErr_Clear();
        return false;
      }
    }
    return true;
  }

  bool cells_hold() const {
    for (const auto& each : cells_) {
      if (PyCell_GET(each.first) != each.second) {
        return false;
      }
    }
    return true;
  }

  bool gradients_hold() const {
    for (const auto& each : gradients_) {
      const at::Tensor& gradient = THPVariable_Unpack(each.first).unsafeGetTensorImpl()->grad();
      const bool holds = PyBool_Check(each.second) ? gradient.defined() == (each.second == Py_True)
          : each.second == Py_None                 ? !gradient.defined()
                                                   : gradient.is_same(THPVariable_Unpack(each.second));
      if (!holds) {
        return false;
      }
    }
    return true;
  }

  bool tensors_hold() const {
    for (const auto& each : tensors_) {
      if (!each.second.fits(THPVariable_Unpack(each.first))) {
        return false;
      }
    }
    for (const auto& each : memory_) {
      if (THPVariable_Unpack(each.first).storage().unsafeGetStorageImpl() != each.second) {
        return false;
      }
    }
    return true;
  }

  std::vector<std::pair<PyObject*, uint64_t>> dicts_;
  std::vector<List> lists_;
  std::vector<Entries> entries_;
  std::vector<PyObject*> empty_;
  std::vector<std::pair<PyObject*, PyObject*>> cells_;
  std::vector<std::pair<PyObject*, Shape>> tensors_;
  std::vector<std::pair<PyObject*, c10::StorageImpl*>> memory_;
  std::vector<std::pair<PyObject*, PyObject*>> gradients_;
};

// The modes of a thread that decide what a call records.
struct Modes {
  bool operator==(const Modes& other) const {
    return gradients == other.gradients && inference == other.inference && autocast == other.autocast &&
        (!autocast || dtype == other.dtype);
  }

  bool gradients = c10::GradMode::is_enabled();
  bool inference = c10::InferenceMode::is_enabled();
  bool autocast = at::autocast::is_autocast_enabled(at::kPrivateUse1);
  at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kPrivateUse1);
};

// Arguments of a call, tensors of the device alone: their shapes, those of their whole buffers, and the modes.
class SameCall {
 public:
  explicit SameCall(const py::tuple& arguments) {
    for (py::handle argument : arguments) {
      const at::Tensor& tensor = tensor_of(argument);
      Buffer* buffer = buffer_of(tensor.storage());
      TORCH_CHECK_TYPE(buffer != nullptr, "expected a tensor of the device");
      shapes_.emplace_back(Shape(tensor), buffer->spec);
    }
  }

  bool takes(const py::tuple& arguments) const {
    if (arguments.size() != shapes_.size() || !(Modes() == modes_)) {
      return false;
    }
    c10::SmallVector<const Buffer*, 8> buffers;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      PyObject* argument = PyTuple_GET_ITEM(arguments.ptr(), i);
      if (!THPVariable_CheckExact(argument)) {
        return false;
      }
      const at::Tensor& tensor = THPVariable_Unpack(argument);
      if (!shapes_[i].first.fits(tensor)) {
        return false;
      }
      const Buffer* buffer = buffer_of(tensor.storage());
      if (buffer == nullptr || buffer->spec.get() != shapes_[i].second.get()) {
        return false;
      }
      buffers.push_back(buffer);
    }
    std::sort(buffers.begin(), buffers.end());
    return std::adjacent_find(buffers.begin(), buffers.end()) == buffers.end();
  }

 private:
  Modes modes_;
  std::vector<std::pair<Shape, SpecPtr>> shapes_;
};

// True when nothing on this thread changes what a kernel does: no mode, autocast, function transform, nor the inside of a
// function of a tensor class, where kernels in Python would not see those classes.
inline bool has_clean_state() {
  const bool transforms = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  if (transforms || at::impl::PythonTorchFunctionTLS::stack_len() != 0 ||
      at::impl::PythonTorchFunctionTLS::get_disabled_state() != at::impl::TorchFunctionDisabledState::ENABLED ||
      c10::impl::TorchDispatchModeTLS::any_modes_set() || c10::InferenceMode::is_enabled()) {
    return false;
  }
  if (c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset)) {
    return true;
  }
  const auto& devices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  return std::none_of(
      devices.begin(), devices.end(), [](at::DeviceType device) { return at::autocast::is_autocast_enabled(device); });
}

// The data of buffers whose specs are these; None unless it is plain tensors, and nothing is lost.
py::object plain_data(const py::list& buffers, const py::list& positions, const py::list& specs);

}  // namespace torch_ltc
