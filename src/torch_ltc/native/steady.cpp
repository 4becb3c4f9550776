// A replay in one go, for a call that is a compiled function of tensors and changes no Python state. Where anything is
// other than it was, nothing happens, and Python replays the call.

#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <unordered_set>

#include "eager.h"
#include "recorder.h"
#include "replay.h"

namespace torch_ltc {
namespace {

PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

PyObject* const kAssignments = name("assignments");
PyObject* const kCompiled = name("compiled");
PyObject* const kDropped = name("dropped");
PyObject* const kFlushDenormal = name("flush_denormal");
PyObject* const kMaker = name("maker");
PyObject* const kStandIn = name("stand_in");
PyObject* const kTorchState = name("torch_state");
PyObject* const kWaiting = name("_waiting");

bool is(py::handle object, PyObject* attribute_name, py::handle value) {
  return attribute(object.ptr(), attribute_name).is(value);
}

void set(py::handle object, PyObject* attribute_name, py::handle value) {
  if (PyObject_SetAttr(object.ptr(), attribute_name, value.ptr()) != 0) {
    throw py::error_already_set();
  }
}

// What is returned in one place: a view of an output, or an object.
struct Leaf {
  int64_t output;
  SpecPtr spec;
  py::object value;
};

// Everything that the call consists of. Nothing here refers back to the function that is replayed: the garbage collector
// does not look into it.
class Steady {
 public:
  explicit Steady(const py::dict& parts)
      : call_(parts["call"]),
        unchanged_(parts["unchanged"]),
        entry_(parts["entry"]),
        executable_(parts["executable"]),
        settings_(parts["settings"]),
        assignments_(attribute(settings_.ptr(), kAssignments)),
        recorder_(parts["recorder"]),
        torch_state_(attribute(recorder_.ptr(), kTorchState)),
        executor_(parts["executor"]),
        worker_(parts["worker"]),
        begin_(parts["begin"]),
        end_(parts["end"]),
        inputs_(parts["inputs"]),
        positions_(parts["positions"]),
        specs_(parts["specs"]),
        function_(parts["function"]),
        buffer_class_(parts["buffer_class"]),
        makers_(parts["makers"]),
        rebuild_(parts["rebuild"]),
        note_(parts["note"]),
        unusual_(parts["unusual"]),
        given_(parts["given"].cast<std::vector<std::pair<Py_ssize_t, Py_ssize_t>>>()),
        takes_(parts["takes"].cast<std::vector<Py_ssize_t>>()),
        outputs_(parts["outputs"].cast<std::vector<Py_ssize_t>>()),
        updates_(parts["updates"].cast<std::vector<std::pair<Py_ssize_t, Py_ssize_t>>>()),
        count_(parts["count"].cast<Py_ssize_t>()),
        process_(getpid()) {
    std::unordered_set<Py_ssize_t> positions;
    for (const auto& pair : given_) {
      positions.insert(pair.first);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs_.ptr()); ++i) {
      if (positions.count(i) == 0) {
        kept_.insert(PyList_GET_ITEM(inputs_.ptr(), i));
      }
    }
    for (py::handle spec : parts["output_specs"]) {
      output_specs_.push_back(spec_of(spec));
    }
    for (py::handle item : parts["leaves"]) {
      auto leaf = item.cast<py::tuple>();
      const auto output = leaf[0].cast<int64_t>();
      leaves_.push_back({output, output < 0 ? SpecPtr() : spec_of(leaf[1]), py::object(leaf[1])});
    }
  }

  // The result of the call; None when nothing has happened.
  py::object run(const py::tuple& arguments) {
    if (!call_.cast<const SameCall&>().takes(arguments) || !unchanged_.cast<const Unchanged&>().holds() ||
        !has_clean_state() || !is(entry_, kCompiled, executable_) || !is(executable_, kDropped, py::handle(Py_False)) ||
        !same_number(settings_, kAssignments, assignments_) || !is(recorder_, kTorchState, torch_state_) ||
        !is(executor_, kFlushDenormal, py::handle(Py_False)) || getpid() != process_) {
      return py::none();
    }
    const double began_s = now_s();
    auto inputs = py::reinterpret_steal<py::list>(PyList_GetSlice(inputs_.ptr(), 0, PyList_GET_SIZE(inputs_.ptr())));
    for (const auto& [position, argument] : given_) {
      const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(arguments.ptr(), argument));
      py::object buffer = python_of(BufferPtr::reclaim_copy(buffer_of(tensor.storage())));
      if (kept_.count(buffer.ptr()) != 0) {
        return py::none();
      }
      inputs[position] = std::move(buffer);
    }
    std::vector<py::object> buffers;
    double took_s = 0;
    bool failed = false;
    py::object interrupt = py::none();
    {
      Locked locked(recorder().lock);
      py::object held = plain_data(inputs, positions_, specs_);
      if (held.is_none()) {
        return py::none();
      }
      const py::int_ thread(PyThread_get_thread_ident());
      // The GIL is held between the question and the answer: whoever queues something now finds a stand-in.
      if (recorder().started != 0 || !is_zero(executor_, kWaiting) || !is_zero(worker_, kStandIn)) {
        return py::none();
      }
      set(worker_, kStandIn, thread);
      eager_region().disturb();
      const StandIn stand_in{end_, interrupt};
      begin_();
      py::tuple given(takes_.size());
      for (size_t i = 0; i < takes_.size(); ++i) {
        given[i] = held[py::int_(takes_[i])];
      }
      const double launched_s = now_s();
      py::object results;
      py::object error = py::none();
      try {
        at::AutoDispatchBelowAutograd below;
        c10::AutoGradMode with_gradients(true);
        results = function_(*given);
      } catch (py::error_already_set& raised) {
        results = py::none();
        error = raised.value();
      }
      took_s = now_s() - launched_s;
      for (size_t i = 0; i < output_specs_.size(); ++i) {
        buffers.push_back(new_buffer(i));
      }
      if (error.is_none() && fit(given, results)) {
        for (size_t i = 0; i < buffers.size(); ++i) {
          set_field(fields_of(buffers[i]).data, PyList_GET_ITEM(results.ptr(), outputs_[i]));
        }
      } else {
        failed = unusual_(inputs, py::cast(buffers), held, results, error).cast<bool>();
      }
    }
    py::object result = returned(buffers, arguments);
    note_(py::cast(buffers), began_s, took_s, failed);
    if (!interrupt.is_none()) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(interrupt.ptr())), interrupt.ptr());
      throw py::error_already_set();
    }
    return result;
  }

 private:
  // Ends what `begin_here` has begun.
  struct StandIn {
    const py::object& end;
    // What the handler of a signal raised meanwhile.
    py::object& interrupt;
    ~StandIn() {
      for (int attempt = 0; attempt < 2; ++attempt) {
        try {
          end();
          return;
        } catch (py::error_already_set& error) {
          interrupt = error.value();
        }
      }
    }
  };

  static bool same_number(py::handle object, PyObject* attribute_name, py::handle number) {
    return attribute(object.ptr(), attribute_name).equal(number);
  }

  static bool is_zero(py::handle object, PyObject* attribute_name) {
    return PyObject_IsTrue(attribute(object.ptr(), attribute_name).ptr()) == 0;
  }

  // True when these results are to be passed on as they are: updated inputs were written in place.
  bool fit(const py::tuple& given, const py::object& results) const {
    if (!PyList_CheckExact(results.ptr()) || PyList_GET_SIZE(results.ptr()) != count_) {
      return false;
    }
    for (const auto& [taken, place] : updates_) {
      if (PyList_GET_ITEM(results.ptr(), place) != PyTuple_GET_ITEM(given.ptr(), taken)) {
        return false;
      }
    }
    return true;
  }

  py::object new_buffer(size_t output) const {
    py::object made = buffer_class_();
    Buffer& buffer = *buffer_of_python(made);
    buffer.number = 0;
    buffer.spec = output_specs_[output];
    set_field(fields_of(made).maker, PyList_GET_ITEM(makers_.ptr(), output));
    return made;
  }

  at::Tensor whole(const py::object& python, size_t output) const {
    const BufferPtr& buffer = buffer_of_python(python);
    if (buffer->python.load() == nullptr) {
      buffer->python.store(py::object(python).release().ptr());
    }
    PyObject* data = fields_of(python).data;
    const Spec& spec = *output_specs_[output];
    const bool is_tensor = data != nullptr && THPVariable_Check(data);
    const size_t size_bytes = is_tensor ? THPVariable_Unpack(data).storage().nbytes() : spec.size_bytes;
    return new_tensor(buffer, spec, size_bytes);
  }

  py::object returned(const std::vector<py::object>& buffers, const py::tuple& arguments) const {
    std::vector<at::Tensor> bases(buffers.size());
    std::vector<bool> given_away(buffers.size());
    py::list made;
    for (const Leaf& leaf : leaves_) {
      if (leaf.output < 0) {
        made.append(leaf.output == kConstant ? leaf.value : py::object(arguments[kFirstArgument - leaf.output]));
        continue;
      }
      at::Tensor& base = bases[leaf.output];
      if (!base.defined()) {
        base = whole(buffers[leaf.output], leaf.output);
      }
      const bool itself = leaf.spec == output_specs_[leaf.output] && !given_away[leaf.output];
      given_away[leaf.output] = given_away[leaf.output] || itself;
      const at::Tensor tensor = itself ? base : view_tensor(base, *leaf.spec);
      made.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
    }
    return rebuild_(made);
  }

  // In place of an output: an object, or the argument at a place counted from there.
  static constexpr int64_t kConstant = -1;
  static constexpr int64_t kFirstArgument = -2;

  py::object call_, unchanged_, entry_, executable_, settings_, assignments_, recorder_, torch_state_;
  py::object executor_, worker_, begin_, end_;
  py::list inputs_, positions_, specs_;
  py::object function_, buffer_class_;
  py::list makers_;
  py::object rebuild_, note_, unusual_;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> given_;
  // The buffers that stay, which no argument may be.
  std::unordered_set<PyObject*> kept_;
  std::vector<Py_ssize_t> takes_, outputs_;
  std::vector<std::pair<Py_ssize_t, Py_ssize_t>> updates_;
  Py_ssize_t count_;
  pid_t process_;
  std::vector<SpecPtr> output_specs_;
  std::vector<Leaf> leaves_;
};

}  // namespace

void bind_steady(py::module_& module) {
  py::class_<Steady>(module, "Steady", "A replay in one go.").def(py::init<const py::dict&>()).def("run", &Steady::run);
}

}  // namespace torch_ltc
