// A call in an eager region: its tensors are replaced by the physical ones, PyTorch's kernel runs, and what it returns
// becomes tensors of the device.

#include "eager.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>

#include "conversion.h"
#include "device.h"
#include "handles.h"
#include "replay.h"

namespace torch_ltc {
namespace {

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

PyObject* const kAssignmentsName = interned("_assignments");
PyObject* const kStandInName = interned("stand_in");
PyObject* const kWaitingName = interned("_waiting");

// Each read lets a region go on for so many calls, and it ends when there are none left. What a loop does not need is
// saved, for a long backward pass after many steps that read, up to some bound; a region begins with a part of it.
constexpr int64_t kCallsOfRead = 64;
constexpr int64_t kMostSaved = 32768;
constexpr int64_t kSavedFirst = 8192;
// And when its calls take longer: then recording costs little, and a compiler may gain more. Each so many-th is timed.
// One that is interrupted by another process counts as ten.
constexpr int64_t kMostNs = 30000;
constexpr int64_t kTimedOf = 17;
// Buffers that know their memory, until all of them forget it.
constexpr size_t kMostKnowing = 4096;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The number that an attribute is; -1 when it is none.
long long_attribute(PyObject* object, PyObject* attribute_name) {
  PyObject* value = PyObject_GetAttr(object, attribute_name);
  if (value == nullptr) {
    PyErr_Clear();
    return -1;
  }
  const long number = PyLong_AsLong(value);
  Py_DECREF(value);
  if (number == -1) {
    PyErr_Clear();
  }
  return number;
}

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

// Keys of a tensor of numbers in memory, whichever the device: not one of Python's classes, sparse, conjugated, nested.
const uint64_t kUsual = c10::full_backend_mask |
    (c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView,
                          c10::DispatchKey::AutogradFunctionality, c10::DispatchKey::AutogradOther}) |
     c10::autocast_dispatch_keyset)
        .raw_repr();

bool is_usual(const at::Tensor& tensor) { return (tensor.key_set().raw_repr() & ~kUsual) == 0; }

// For a few numbers less than what a call of `memcmp` takes.
bool are_same(c10::IntArrayRef left, c10::IntArrayRef right) {
  if (left.size() != right.size()) {
    return false;
  }
  for (size_t i = 0; i < left.size(); ++i) {
    if (left[i] != right[i]) {
      return false;
    }
  }
  return true;
}

bool is_seen_as(const at::Tensor& data, const at::Tensor& tensor) {
  const c10::TensorImpl& left = *data.unsafeGetTensorImpl();
  const c10::TensorImpl& right = *tensor.unsafeGetTensorImpl();
  return left.dtype() == right.dtype() && left.storage_offset() == right.storage_offset() &&
      are_same(left.sizes(), right.sizes()) && are_same(left.strides(), right.strides());
}

at::Tensor seen_as(const at::Tensor& data, const at::Tensor& like, c10::DispatchKeySet keys) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(data.storage()), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The memory that the `Buffer` of Python has; undefined when there is none yet, or it is no plain tensor of the host.
at::Tensor data_of_python(PyObject* python) {
  const Gil gil;
  const Fields& fields = fields_of(python);
  if (fields.data == nullptr || !THPVariable_CheckExact(fields.data) || fields.error != nullptr) {
    return {};
  }
  const at::Tensor& tensor = THPVariable_Unpack(fields.data);
  return tensor.is_cpu() && is_usual(tensor) ? tensor : at::Tensor();
}


// The physical tensor of a tensor of the device; undefined when the call has to be recorded.
at::Tensor physical_of(const at::Tensor& tensor) {
  if (!is_usual(tensor) || !tensor.unsafeGetTensorImpl()->has_storage()) {
    return {};
  }
  Buffer* buffer = buffer_of(tensor.storage());
  at::Tensor data = buffer == nullptr ? at::Tensor() : eager_region().data_of(*buffer);
  if (!data.defined() || is_seen_as(data, tensor)) {
    return data;
  }
  if (buffer->spec && buffer->spec->offset != data.storage_offset()) {
    // Memory of a backend's, which lies elsewhere than it seems to.
    return {};
  }
  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  return needed > data.storage().nbytes() ? at::Tensor() : seen_as(data, tensor, data.key_set());
}

}  // namespace

at::Tensor EagerRegion::data_of(Buffer& buffer) {
  PyObject* python = buffer.python.load();
  if (python == nullptr) {
    return buffer.data;
  }
  if (!buffer.known_data.defined()) {
    buffer.known_data = data_of_python(python);
    if (knowing_.size() >= kMostKnowing) {
      disturb();
    }
    knowing_.emplace_back(BufferPtr::reclaim_copy(&buffer));
  }
  return buffer.known_data;
}

void EagerRegion::disturb() {
  quiet_ = false;
  Locked locked(recorder().lock);
  for (const auto& reference : knowing_) {
    if (BufferPtr buffer = reference.lock()) {
      buffer->known_data.reset();
    }
  }
  knowing_.clear();
}

bool EagerOperands::add(const at::Tensor& tensor, bool may_be_foreign, at::Tensor& into) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    into = tensor;
    return true;
  }
  if (!tensor.is_privateuseone()) {
    into = tensor;
    return may_be_foreign && tensor.is_cpu() && is_usual(tensor);
  }
  into = physical_of(tensor);
  if (into.defined()) {
    pairs_.emplace_back(&tensor, into.unsafeGetTensorImpl());
  }
  return into.defined();
}

bool EagerOperands::place(std::optional<at::Device>& device, bool copies) {
  if (!device) {
    if (pairs_.empty()) {
      device = at::Device(at::kCPU);
    }
    return true;
  }
  if (device->type() == kType) {
    const bool own = is_own(device->index());
    device = at::Device(at::kCPU);
    return own;
  }
  reads = true;
  return copies && device->is_cpu();
}

at::Tensor EagerOperands::wrap(at::Tensor result) {
  if (!result.defined() || reads) {
    return result;
  }
  for (const auto& [lazy, physical] : pairs_) {
    if (result.unsafeGetTensorImpl() == physical) {
      return *lazy;
    }
  }
  if (!is_usual(result)) {
    return {};
  }
  const c10::StorageImpl* storage = result.storage().unsafeGetStorageImpl();
  for (const auto& [lazy, physical] : pairs_) {
    if (physical->unsafe_storage().unsafeGetStorageImpl() == storage) {
      return seen_as(*lazy, result, lazy->key_set());
    }
  }
  for (const auto& [other, memory] : made_) {
    if (memory == storage) {
      return seen_as(other, result, other.key_set());
    }
  }
  at::Tensor tensor = new_tensor(std::move(result));
  if (several) {
    made_.emplace_back(tensor, storage);
  }
  return tensor;
}

// The stack for the kernel.
struct EagerRegion::Operands : EagerOperands {
  torch::jit::Stack stack;
  // The kernel takes its arguments off the stack.
  c10::SmallVector<at::Tensor, 8> held;

  bool add(const at::Tensor& tensor, bool may_be_foreign, at::Tensor& into) {
    if (!EagerOperands::add(tensor, may_be_foreign, into)) {
      return false;
    }
    held.push_back(into);
    return true;
  }

  bool add_list(const c10::IValue& value, const c10::Type& type) {
    const c10::Type* list = &type;
    if (list->kind() == c10::TypeKind::OptionalType) {
      list = list->castRaw<c10::OptionalType>()->getElementType().get();
    }
    if (!value.isList() || list->kind() != c10::TypeKind::ListType) {
      return false;
    }
    at::Tensor physical;
    if (list->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> made;
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor() && !add(item.toTensor(), false, physical)) {
          return false;
        }
        made.push_back(item.isTensor() ? std::make_optional(physical) : std::nullopt);
      }
      stack.emplace_back(std::move(made));
      return true;
    }
    c10::List<at::Tensor> made;
    for (const c10::IValue& item : value.toListRef()) {
      if (!item.isTensor() || !add(item.toTensor(), false, physical)) {
        return false;
      }
      made.push_back(physical);
    }
    stack.emplace_back(std::move(made));
    return true;
  }
};

EagerRegion& eager_region() {
  // Never destroyed, as the recorder.
  static auto* the_region = new EagerRegion();
  return *the_region;
}

void EagerRegion::begin(
    PyObject* executor, PyObject* worker, PyObject* settings, c10::IValue generator, int64_t most_calls) {
  // Kept for ever: there is one of each in a process.
  Py_XINCREF(executor);
  Py_XINCREF(worker);
  Py_XINCREF(settings);
  executor_ = executor;
  worker_ = worker;
  settings_ = settings;
  assignments_ = long_attribute(settings, kAssignmentsName);
  generator_ = std::move(generator);
  always_ = most_calls < 0;
  left_ = most_calls;
  settled_ = false;
  quiet_ = false;
  saved_ = kSavedFirst;
  timed_ns_ = timed_ = 0;
  ++begun;
  on_ = true;
}

void EagerRegion::end() {
  if (on_.exchange(false)) {
    ++ended;
  }
}

// True when nothing is pending or queued. With the GIL.
bool EagerRegion::is_ready() const {
  return long_attribute(executor_, kWaitingName) == 0 && long_attribute(worker_, kStandInName) == 0;
}

void EagerRegion::note_call(bool reads_value) {
  ++calls;
  if (reads_value) {
    note_read();
  }
  const bool long_calls = timed_ns_ > timed_ * kMostNs + 64 * kMostNs;
  if (!always_ && (long_calls || (left_ == 0 && --saved_ < 0) || (left_ > 0 && --left_ == 0))) {
    end();
  }
}

void EagerRegion::note_read() {
  ++reads;
  saved_ = std::min(saved_ + kCallsOfRead, kMostSaved);
}

// True when nothing is queued. Python is asked if something has happened since it was asked.
bool EagerRegion::begin_call() {
  if (quiet_.load(std::memory_order_acquire)) {
    return true;
  }
  const Gil gil;
  if (!settled_ && settle_ != nullptr) {
    settled_ = true;
    py::handle{settle_}();
    return begin_call();
  }
  if (!always_ && long_attribute(settings_, kAssignmentsName) != assignments_) {
    end();
    return false;
  }
  if (!is_ready()) {
    return false;
  }
  // The GIL is held since Python was asked: who queues something now says so afterwards.
  quiet_ = true;
  return true;
}

bool EagerRegion::may_run(const Operator& op) {
  return op.at_once && Py_IsInitialized() && has_clean_state() && begin_call();
}

bool EagerRegion::is_undisturbed() const {
  return recorder().started == 0 && recorder().inputs.empty() && quiet_.load(std::memory_order_acquire);
}

EagerRegion::Running::Running(EagerRegion& region)
    : region_(region), began_ns_(region.calls % kTimedOf == 0 ? now_ns() : 0) {}

EagerRegion::Running::~Running() {
  if (began_ns_ != 0) {
    region_.timed_ns_ += std::min(now_ns() - began_ns_, 10 * kMostNs);
    ++region_.timed_;
  }
}

bool EagerRegion::resolve(Operator& op, const c10::IValue* arguments, Operands& found) {
  Locked locked(recorder().lock);
  if (!is_undisturbed()) {
    return false;
  }
  const size_t count = op.arguments.size();
  found.stack.reserve(count);
  at::Tensor physical;
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = arguments[i];
    switch (op.arguments[i].kind) {
      case Kind::Tensor:
        if (!value.isTensor()) {
          if (!value.isNone()) {
            return false;
          }
          found.stack.emplace_back();
        } else {
          if (!found.add(value.toTensor(), op.copies && !op.writes[i], physical)) {
            return false;
          }
          found.stack.emplace_back(physical);
        }
        break;
      case Kind::Tensors:
        if (value.isNone()) {
          found.stack.emplace_back();
        } else if (!found.add_list(value, *op.arguments[i].type)) {
          return false;
        }
        break;
      case Kind::Device: {
        auto device = value.toOptional<at::Device>();
        if (!found.place(device, op.copies)) {
          return false;
        }
        found.stack.emplace_back(device);
        break;
      }
      case Kind::Generator:
        if (!value.isNone()) {
          return false;
        }
        found.stack.push_back(op.random ? generator_ : value);
        break;
      case Kind::Dropped:
        found.stack.emplace_back();
        break;
      default:
        found.stack.push_back(value);
    }
  }
  note_call(found.reads || op.reads);
  return true;
}

bool EagerRegion::run(Operator& op, const c10::IValue* arguments, Values* returned) {
  if (writes_in_vain(op, arguments) || !may_run(op)) {
    return false;
  }
  Operands found;
  if (!resolve(op, arguments, found)) {
    return false;
  }
  {
    const Running running(*this);
    op.handle.callBoxed(found.stack);
  }
  for (const size_t place : op.versions) {
    for (const c10::IValue& item : arguments[place].toListRef()) {
      if (!item.toTensor().is_inference()) {
        item.toTensor().unsafeGetTensorImpl()->bump_version();
      }
    }
  }
  if (returned == nullptr) {
    return true;
  }
  found.several = found.stack.size() > 1 || (found.stack.size() == 1 && found.stack[0].isTensorList());
  for (size_t i = 0; i < found.stack.size(); ++i) {
    c10::IValue& result = found.stack[i];
    if (op.same[i] >= 0) {
      returned->emplace_back(arguments[op.same[i]]);
    } else if (result.isTensor()) {
      const at::Tensor& tensor = result.toTensor();
      at::Tensor made = found.wrap(tensor);
      if (tensor.defined() && !made.defined()) {
        // A layout that the device has not: Python does the call, of which nothing is left.
        TORCH_CHECK(!op.random && !op.handle.schema().is_mutable(), op.name, ": its result is no plain tensor");
        returned->clear();
        return false;
      }
      returned->emplace_back(std::move(made));
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> items;
      for (const at::Tensor& tensor : result.toTensorVector()) {
        items.push_back(found.wrap(tensor));
      }
      returned->emplace_back(std::move(items));
    } else {
      returned->push_back(std::move(result));
    }
  }
  return true;
}

void bind_eager(py::module_& module) {
  module.def("begin_eager", [](py::handle executor, py::handle worker, py::handle settings, py::handle generator,
                               int64_t most_calls) {
    eager_region().begin(
        executor.ptr(), worker.ptr(), settings.ptr(), to_ivalue(generator, c10::GeneratorType::get()), most_calls);
  });
  module.def("set_settle", [](py::object settle) { eager_region().set_settle(settle.release().ptr()); });
  module.def("disturb_eager", [] { eager_region().disturb(); });
  module.def("end_eager", [] { eager_region().end(); });
  module.def("suspend_eager", [](int more) { eager_region().suspend(more); });
  module.def("note_eager_read", [] { eager_region().note_read(); });
  module.def("is_eager", [] { return eager_region().on(); });
  module.def("eager_figures", [] {
    const EagerRegion& region = eager_region();
    return py::make_tuple(region.begun, region.ended, region.calls, region.reads);
  });
  module.def("unseen_bytes", &unseen_bytes);
}

}  // namespace torch_ltc
