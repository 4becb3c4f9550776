// Passes over everything that a replay relies on and changes. Each says quickly that all is as it was; what else there
// is to do, and why, Python finds out.

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "native.h"

#include <pybind11/stl.h>

namespace torch_ltc {
namespace {

#if PY_VERSION_HEX < 0x030E0000
constexpr bool kHasVersions = true;
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif
// A number that changes with every write to the dict.
uint64_t version_of(PyObject* dict) { return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag; }
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif
#else
constexpr bool kHasVersions = false;
uint64_t version_of(PyObject*) { return 0; }
#endif

const at::Tensor& tensor_of(py::handle object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), "expected a tensor");
  return THPVariable_Unpack(object.ptr());
}

// Names of a buffer's attributes.
PyObject* const kData = PyUnicode_InternFromString("data");
PyObject* const kError = PyUnicode_InternFromString("error");
PyObject* const kSpec = PyUnicode_InternFromString("spec");

py::object attribute(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object, name);
  if (found == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(found);
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

  void forget_dicts() { dicts_.clear(); }

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
    return lists_hold() && empty_hold() && cells_hold() && gradients_hold() && tensors_hold();
  }

 private:
  struct List {
    PyObject* list;
    Py_ssize_t length;
    std::vector<Py_ssize_t> places;
    PyObject* values;
  };

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
  std::vector<PyObject*> empty_;
  std::vector<std::pair<PyObject*, PyObject*>> cells_;
  std::vector<std::pair<PyObject*, Shape>> tensors_;
  std::vector<std::pair<PyObject*, c10::StorageImpl*>> memory_;
  std::vector<std::pair<PyObject*, PyObject*>> gradients_;
};

// How often a gradient, its memory and its Python object are held.
using Counts = std::tuple<Py_ssize_t, size_t, size_t>;

Counts counts_of(const at::Tensor& gradient) {
  PyObject* python = THPVariable_Wrap(gradient);
  const Py_ssize_t references = Py_REFCNT(python);
  Py_DECREF(python);
  return {references, gradient.use_count(), gradient.storage().use_count()};
}

// The gradients of some tensors, which a replay writes to where nobody else holds them. They are not kept alive; the
// tensors are borrowed, as above.
class HeldGradients {
 public:
  // `single` is a tensor whose gradient nobody else holds.
  HeldGradients(
      const py::list& owners, const std::vector<Py_ssize_t>& positions, py::list specs, const py::object& single)
      : positions_(positions), specs_(specs.ptr()) {
    for (py::handle owner : owners) {
      tensor_of(owner);
      owners_.push_back(owner.ptr());
    }
    alone_ = counts_of(tensor_of(single).unsafeGetTensorImpl()->grad());
  }

  // The gradients are these from now on, with these buffers.
  void note(const py::list& buffers) {
    noted_.clear();
    for (size_t i = 0; i < owners_.size(); ++i) {
      const at::Tensor& gradient = THPVariable_Unpack(owners_[i]).unsafeGetTensorImpl()->grad();
      if (!gradient.defined()) {
        noted_.clear();
        return;
      }
      PyObject* buffer = PyWeakref_NewRef(py::object(buffers[i]).ptr(), nullptr);
      if (buffer == nullptr) {
        throw py::error_already_set();
      }
      noted_.push_back(
          {c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(gradient.getIntrusivePtr()),
           gradient.storage().getWeakStorageImpl(), Shape(gradient), py::reinterpret_steal<py::object>(buffer)});
    }
  }

  // Put the buffers of the gradients into their places of the list; false, and nothing is certain, unless all of them
  // are as noted, and held by their tensors alone.
  bool put(py::list& outputs) const {
    if (noted_.size() != owners_.size()) {
      return false;
    }
    for (size_t i = 0; i < owners_.size(); ++i) {
      const Noted& noted = noted_[i];
      const at::Tensor& gradient = THPVariable_Unpack(owners_[i]).unsafeGetTensorImpl()->grad();
      if (!gradient.defined() || gradient.unsafeGetTensorImpl() != noted.tensor._unsafe_get_target() ||
          gradient.storage().unsafeGetStorageImpl() != noted.storage._unsafe_get_target() ||
          !noted.shape.fits(gradient) || counts_of(gradient) != alone_) {
        return false;
      }
      auto buffer = py::reinterpret_borrow<py::object>(PyWeakref_GetObject(noted.buffer.ptr()));
      if (buffer.is_none() || attribute(buffer.ptr(), kSpec).ptr() != PyList_GET_ITEM(specs_, i)) {
        return false;
      }
      PyList_SetItem(outputs.ptr(), positions_[i], buffer.release().ptr());
    }
    return true;
  }

 private:
  struct Noted {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Shape shape;
    py::object buffer;
  };

  std::vector<PyObject*> owners_;
  std::vector<Py_ssize_t> positions_;
  PyObject* specs_;
  Counts alone_;
  std::vector<Noted> noted_;
};

// The addresses of tensors at some positions of a list.
class Addresses {
 public:
  Addresses(const py::list& tensors, const std::vector<Py_ssize_t>& positions) : positions_(positions) {
    for (const Py_ssize_t position : positions_) {
      addresses_.push_back(tensor_of(tensors[position]).const_data_ptr());
    }
  }

  bool same(const py::list& tensors) const {
    for (size_t i = 0; i < positions_.size(); ++i) {
      PyObject* tensor = PyList_GET_ITEM(tensors.ptr(), positions_[i]);
      if (!THPVariable_Check(tensor) || THPVariable_Unpack(tensor).const_data_ptr() != addresses_[i]) {
        return false;
      }
    }
    return true;
  }

 private:
  std::vector<Py_ssize_t> positions_;
  std::vector<const void*> addresses_;
};

// The data of buffers whose specs are these; None unless it is plain tensors, and nothing is lost.
py::object plain_data(const py::list& buffers, const py::list& positions, const py::list& specs) {
  const size_t count = positions.size();
  py::list made(count);
  for (size_t i = 0; i < count; ++i) {
    const Py_ssize_t position = PyLong_AsSsize_t(PyList_GET_ITEM(positions.ptr(), i));
    TORCH_CHECK_INDEX(position >= 0 && position < PyList_GET_SIZE(buffers.ptr()), "there is no such input");
    PyObject* buffer = PyList_GET_ITEM(buffers.ptr(), position);
    py::object data = attribute(buffer, kData);
    if (!attribute(buffer, kError).is_none() || attribute(buffer, kSpec).ptr() != PyList_GET_ITEM(specs.ptr(), i) ||
        !THPVariable_CheckExact(data.ptr())) {
      return py::none();
    }
    PyList_SET_ITEM(made.ptr(), i, data.release().ptr());
  }
  return made;
}

// Give all of these objects the attribute.
void set_attribute(const py::list& objects, const py::str& name, const py::object& value) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(objects.ptr()); ++i) {
    if (PyObject_SetAttr(PyList_GET_ITEM(objects.ptr(), i), name.ptr(), value.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
}

// Give each of these objects its own value of the attribute.
void set_attributes(const py::list& objects, const py::str& name, const py::list& values) {
  TORCH_CHECK_VALUE(objects.size() == values.size(), "as many values as objects");
  for (size_t i = 0; i < objects.size(); ++i) {
    if (PyObject_SetAttr(PyList_GET_ITEM(objects.ptr(), i), name.ptr(), PyList_GET_ITEM(values.ptr(), i)) != 0) {
      throw py::error_already_set();
    }
  }
}

// Let the weak references in `last` refer to `outputs`; those that referred to something else are returned.
py::list renew(py::list& last, const py::list& outputs) {
  TORCH_CHECK_VALUE(last.size() == outputs.size(), "as many references as outputs");
  py::list replaced;
  for (size_t i = 0; i < outputs.size(); ++i) {
    PyObject* old = PyList_GET_ITEM(last.ptr(), i);
    PyObject* output = PyList_GET_ITEM(outputs.ptr(), i);
    if (PyWeakref_GetObject(old) != output) {
      replaced.append(py::handle(old));
      last[i] = py::reinterpret_steal<py::object>(PyWeakref_NewRef(output, nullptr));
    }
  }
  return replaced;
}

}  // namespace

void bind_replay(py::module_& module) {
  module.attr("has_dict_versions") = kHasVersions;
  py::class_<Unchanged>(module, "Unchanged", "Python state that a replay relies on, as it was when it was added.")
      .def(py::init<>())
      .def("add_dict", &Unchanged::add_dict)
      .def("add_list", &Unchanged::add_list)
      .def("add_empty", &Unchanged::add_empty)
      .def("add_cell", &Unchanged::add_cell)
      .def("add_tensor", &Unchanged::add_tensor)
      .def("add_memory", &Unchanged::add_memory)
      .def("add_gradient", &Unchanged::add_gradient)
      .def("forget_dicts", &Unchanged::forget_dicts)
      .def("written", &Unchanged::written)
      .def("rest_holds", &Unchanged::rest_holds);
  py::class_<HeldGradients>(module, "HeldGradients", "Gradients that nobody holds but their tensors.")
      .def(py::init<const py::list&, const std::vector<Py_ssize_t>&, py::list, const py::object&>())
      .def("note", &HeldGradients::note)
      .def("put", &HeldGradients::put);
  py::class_<Addresses>(module, "Addresses", "Where tensors of a list lie.")
      .def(py::init<const py::list&, const std::vector<Py_ssize_t>&>())
      .def("same", &Addresses::same);
  module.def("plain_data", &plain_data);
  module.def("set_attribute", &set_attribute);
  module.def("set_attributes", &set_attributes);
  module.def("renew", &renew);
}

}  // namespace torch_ltc
