// Passes over everything that a replay relies on and changes. Each says quickly that all is as it was; what else there
// is to do, and why, Python finds out.

#include "replay.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/intrusive_ptr.h>
#include <pybind11/stl.h>

#include <tuple>

#include "recorder.h"

namespace torch_ltc {
namespace {

// Names of other attributes of a buffer.

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
      if (buffer.is_none() || spec_of_buffer(buffer.ptr()) != PyList_GET_ITEM(specs_, i)) {
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

// Where a tensor lies. One without elements says nothing of that: it may be resized, or seen as more of its memory.
const void* address_of(const at::Tensor& tensor) {
  const void* address = tensor.const_data_ptr();
  return address != nullptr ? address : tensor.storage().data();
}

// The addresses of tensors at some positions of a list.
class Addresses {
 public:
  Addresses(const py::list& tensors, const std::vector<Py_ssize_t>& positions) : positions_(positions) {
    for (const Py_ssize_t position : positions_) {
      addresses_.push_back(address_of(tensor_of(tensors[position])));
    }
  }

  bool same(const py::list& tensors) const {
    for (size_t i = 0; i < positions_.size(); ++i) {
      PyObject* tensor = PyList_GET_ITEM(tensors.ptr(), positions_[i]);
      if (!THPVariable_Check(tensor) || address_of(THPVariable_Unpack(tensor)) != addresses_[i]) {
        return false;
      }
    }
    return true;
  }

 private:
  std::vector<Py_ssize_t> positions_;
  std::vector<const void*> addresses_;
};

}  // namespace

py::object plain_data(const py::list& buffers, const py::list& positions, const py::list& specs) {
  const size_t count = positions.size();
  py::list made(count);
  for (size_t i = 0; i < count; ++i) {
    const Py_ssize_t position = PyLong_AsSsize_t(PyList_GET_ITEM(positions.ptr(), i));
    TORCH_CHECK_INDEX(position >= 0 && position < PyList_GET_SIZE(buffers.ptr()), "there is no such input");
    PyObject* buffer = PyList_GET_ITEM(buffers.ptr(), position);
    const Fields& fields = fields_of(buffer);
    if (fields.data == nullptr || !THPVariable_CheckExact(fields.data) || fields.error != nullptr ||
        spec_of_buffer(buffer) != PyList_GET_ITEM(specs.ptr(), i)) {
      return py::none();
    }
    PyList_SET_ITEM(made.ptr(), i, Py_NewRef(fields.data));
  }
  return made;
}

namespace {

// Call a function below autograd, with grad mode on: as kernels are called.
py::object call_below_autograd(const py::object& function, const py::args& arguments) {
  at::AutoDispatchBelowAutograd below;
  c10::AutoGradMode with_gradients(true);
  return function(*arguments);
}

// Add to tensors on the host that hold one number each, as an optimizer counts its steps; false, and nothing is done,
// where one of them is of another kind.
bool count_up(const py::list& tensors, double step) {
  for (py::handle each : tensors) {
    const at::Tensor& tensor = tensor_of(each);
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.scalar_type() != at::kFloat ||
        tensor.numel() != 1 || tensor.is_inference() || tensor.requires_grad()) {
      return false;
    }
  }
  for (py::handle each : tensors) {
    const at::Tensor& tensor = tensor_of(each);
    *tensor.mutable_data_ptr<float>() += static_cast<float>(step);
    tensor.unsafeGetTensorImpl()->bump_version();
  }
  return true;
}

// The job that defines these buffers, or writes to them.
void set_jobs(const py::list& buffers, const py::object& job) {
  for (py::handle buffer : buffers) {
    set_field(fields_of(buffer).job, job.ptr());
  }
}

// What makes each of these buffers.
void set_makers(const py::list& buffers, const py::sequence& makers) {
  TORCH_CHECK_VALUE(buffers.size() == makers.size(), "as many makers as buffers");
  for (size_t i = 0; i < buffers.size(); ++i) {
    set_field(fields_of(PyList_GET_ITEM(buffers.ptr(), i)).maker, py::object(makers[i]).ptr());
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
      .def("add_entries", &Unchanged::add_entries)
      .def("add_empty", &Unchanged::add_empty)
      .def("add_cell", &Unchanged::add_cell)
      .def("add_tensor", &Unchanged::add_tensor)
      .def("add_memory", &Unchanged::add_memory)
      .def("add_gradient", &Unchanged::add_gradient)
      .def("forget_dicts", &Unchanged::forget_dicts)
      .def("holds", &Unchanged::holds)
      .def("written", &Unchanged::written)
      .def("rest_holds", &Unchanged::rest_holds);
  py::class_<HeldGradients>(module, "HeldGradients", "Gradients that nobody holds but their tensors.")
      .def(py::init<const py::list&, const std::vector<Py_ssize_t>&, py::list, const py::object&>())
      .def("note", &HeldGradients::note)
      .def("put", &HeldGradients::put);
  py::class_<Addresses>(module, "Addresses", "Where tensors of a list lie.")
      .def(py::init<const py::list&, const std::vector<Py_ssize_t>&>())
      .def("same", &Addresses::same);
  py::class_<SameCall>(module, "SameCall", "Arguments of a call that is replayed, and the modes of its thread.")
      .def(py::init<const py::tuple&>())
      .def("takes", &SameCall::takes);
  module.def("has_clean_state", &has_clean_state);
  module.def("call_below_autograd", &call_below_autograd);
  module.def("plain_data", &plain_data);
  module.def("count_up", &count_up);
  module.def("set_jobs", &set_jobs);
  module.def("set_makers", &set_makers);
  module.def("renew", &renew);
}

}  // namespace torch_ltc
