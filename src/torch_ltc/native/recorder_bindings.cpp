// What Python sees of the pending program, and of where recording stands.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "conversion.h"
#include "handles.h"
#include "recorder.h"

namespace torch_ltc {
namespace {

void set_node(Recorder& state, py::handle& kept, py::object node) {
  py::object native = node.attr("native");
  state.position = native.is_none() ? nullptr : native.cast<Node*>();
  py::handle before = kept;
  kept = node.release();
  before.dec_ref();
}

// Where recording stands, as Python sees it: the last node that Python set, unless the hit path has gone on since.
struct Place {
  py::handle node;
};
Place place;

// Steps to a child of the present node; each returns the number of the child's first value. All at once: Python may raise
// what a signal's handler raises after any call.

int64_t step_to(Recorder& state, py::object child, int64_t made) {
  const int64_t number = state.count;
  set_node(state, place.node, std::move(child));
  state.count = number + made;
  return number;
}

int64_t step_call(Recorder& state, py::object child, const py::list& numbers) {
  const auto made = child.attr("made").cast<int64_t>();
  std::vector<c10::IValue> given;
  for (py::handle number : numbers) {
    given.push_back(number_value(number));
  }
  state.scalars.insert(
      state.scalars.end(), std::make_move_iterator(given.begin()), std::make_move_iterator(given.end()));
  return step_to(state, std::move(child), made);
}

int64_t input_place(const Recorder& state, py::handle python) {
  const Buffer& buffer = *buffer_of_python(python);
  return state.is_input(buffer) ? buffer.input : static_cast<int64_t>(state.inputs.size());
}

int64_t step_input(Recorder& state, py::object child, py::object python) {
  const BufferPtr buffer = buffer_of_python(python);
  if (!state.is_input(*buffer)) {
    buffer->input = static_cast<int64_t>(state.inputs.size());
    state.inputs.push_back({buffer, python.release().ptr()});
  }
  return step_to(state, std::move(child), 1);
}

int64_t step_empty(Recorder& state, py::object child, py::handle python) {
  const BufferPtr buffer = buffer_of_python(python);
  state.buffers.push_back(buffer);
  return buffer->number = step_to(state, std::move(child), 1);
}

py::list inputs_of(const Recorder& state) {
  py::list found;
  for (const Input& input : state.inputs) {
    found.append(
        input.python != nullptr ? py::reinterpret_borrow<py::object>(input.python) : python_of(input.buffer));
  }
  return found;
}

void release_inputs(Recorder& state) {
  std::vector<Input> inputs;
  inputs.swap(state.inputs);
  for (const Input& input : inputs) {
    input.buffer->forget_views();
    if (input.python != nullptr) {
      Py_DECREF(input.python);
    } else if (input.buffer->holders.fetch_sub(1) == 1) {
      release_python(*input.buffer);
    }
  }
}

// The buffers that the program defines and that somebody holds, and the numbers of their values in the program.
py::tuple live_outputs(const Recorder& state) {
  py::list buffers, numbers;
  for (const BufferPtr& buffer : state.buffers) {
    if (buffer->holders.load() > 0) {
      buffers.append(python_of(buffer));
      numbers.append(buffer->number - state.base);
    }
  }
  return py::make_tuple(buffers, py::tuple(numbers));
}

py::list scalars_of(const Recorder& state) {
  py::list found;
  for (const c10::IValue& value : state.scalars) {
    found.append(to_python(value));
  }
  return found;
}

}  // namespace

void bind_recorder(py::module_& module) {
  py::class_<RecorderLock, std::unique_ptr<RecorderLock, py::nodelete>>(module, "RecorderLock")
      .def("acquire", [](RecorderLock& self) { self.acquire(); return true; })
      .def("release", [](RecorderLock& self) { self.release(); })
      .def("__enter__", [](RecorderLock& self) { self.acquire(); return true; })
      .def("__exit__", [](RecorderLock& self, const py::args&) { self.release(); })
      .def("_is_owned", &RecorderLock::owned)
      .def("_release_save", &RecorderLock::release_all)
      .def("_acquire_restore", &RecorderLock::restore);
  py::class_<Recorder, std::unique_ptr<Recorder, py::nodelete>>(module, "PendingState")
      .def(py::init([] { return &recorder(); }))
      .def_property_readonly("lock", [](Recorder& self) { return &self.lock; }, py::return_value_policy::reference)
      .def_readwrite("base", &Recorder::base)
      .def_readwrite("count", &Recorder::count)
      .def_readwrite("random", &Recorder::random)
      .def_property(
          "node",
          [](Recorder& self) {
            return self.position != nullptr ? py::reinterpret_borrow<py::object>(self.position->python)
                                            : py::reinterpret_borrow<py::object>(place.node);
          },
          [](Recorder& self, py::object node) { set_node(self, place.node, std::move(node)); })
      .def("add_buffer", [](Recorder& self, py::handle made) { self.buffers.push_back(buffer_of_python(made)); })
      .def("live_outputs", &live_outputs)
      .def(
          "new_result",
          [](Recorder& self, py::handle spec, int64_t number) { return self.new_result(spec_of(spec), number); })
      .def(
          "new_view",
          [](Recorder& self, const at::Tensor& base, py::handle spec, int64_t number) {
            return self.new_view(base, spec_of(spec), number);
          })
      .def("is_input", [](const Recorder& self, py::handle of) { return self.is_input(*buffer_of_python(of)); })
      .def("input_place", &input_place)
      .def("step_call", &step_call)
      .def("step_input", &step_input)
      .def("step_empty", &step_empty)
      .def_property_readonly("inputs", &inputs_of)
      .def_property_readonly("scalars", [](const Recorder& self) { return scalars_of(self); })
      .def_property_readonly("scalar_count", [](const Recorder& self) { return self.scalars.size(); })
      .def(
          "clear",
          [](Recorder& self) {
            release_inputs(self);
            self.scalars.clear();
            self.release_buffers();
          })
      .def_readwrite("started", &Recorder::started)
      .def("set_begin", [](Recorder& self, py::object call) { self.begin = call.release().ptr(); })
      .def("set_note_line", [](Recorder& self, py::object call) { self.note_line = call.release().ptr(); })
      .def("take_hits", [](Recorder& self) { return std::exchange(self.hits, 0); });
}

}  // namespace torch_ltc
