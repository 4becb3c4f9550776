// What Python sees of the pending program: buffers, nodes, operators, and where recording stands.

#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "conversion.h"
#include "kernel.h"
#include "native.h"

namespace torch_ltc {
namespace {

struct SpecHandle {
  SpecPtr spec;
};

struct BufferHandle {
  BufferPtr buffer = c10::make_intrusive<Buffer>();
};

PyObject* buffer_class = nullptr;

// The form in C++ of a `Spec` of Python, kept on it.
SpecPtr spec_of(py::handle python) {
  py::object known = python.attr("native");
  if (!known.is_none()) {
    return known.cast<SpecHandle&>().spec;
  }
  auto spec = c10::make_intrusive<Spec>();
  py::object dtype = python.attr("dtype");
  spec->dtype = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  spec->size = python.attr("size").cast<std::vector<int64_t>>();
  spec->stride = python.attr("stride").cast<std::vector<int64_t>>();
  spec->offset = python.attr("offset").cast<int64_t>();
  spec->conj = python.attr("conj").cast<bool>();
  spec->neg = python.attr("neg").cast<bool>();
  spec->contiguous = python.attr("contiguous").cast<bool>();
  spec->size_bytes = python.attr("extent")().cast<size_t>() * spec->dtype.itemsize();
  spec->python = python.inc_ref().ptr();
  python.attr("native") = SpecHandle{spec};
  return spec;
}

// The `Buffer` of Python of a buffer that a storage holds, made at the first call.
py::object python_of(const BufferPtr& buffer) {
  PyObject* known = buffer->python.load();
  if (known == nullptr) {
    py::object made = py::reinterpret_borrow<py::object>(buffer_class)();
    made.cast<BufferHandle&>().buffer = buffer;
    known = made.inc_ref().ptr();
    buffer->python.store(known);
    // Its storage may have ended meanwhile, on a thread without the GIL, and found nothing to let go of.
    release_python(*buffer);
    return made;
  }
  return py::reinterpret_borrow<py::object>(known);
}

Buffer* buffer_of_tensor(PyObject* object) {
  if (!THPVariable_Check(object)) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) {
    return nullptr;
  }
  return buffer_of(tensor.unsafeGetTensorImpl()->unsafe_storage());
}

py::object find_buffer(py::handle object) {
  Buffer* buffer = buffer_of_tensor(object.ptr());
  return buffer == nullptr ? py::none() : python_of(BufferPtr::reclaim_copy(buffer));
}

// The number of a tensor's value, counted from the beginning of the program; -1 when it has none yet, -2 for what is no
// tensor of the device.
int64_t number_of(py::handle object) {
  Buffer* buffer = buffer_of_tensor(object.ptr());
  if (buffer == nullptr) {
    return -2;
  }
  const int64_t number =
      buffer->value_of(*THPVariable_Unpack(object.ptr()).unsafeGetTensorImpl(), recorder().base);
  return number < 0 ? -1 : number - recorder().base;
}

// A storage holds the buffer from now on, and with it the `Buffer` of Python.
const BufferPtr& held(py::handle python) {
  const BufferPtr& buffer = python.cast<BufferHandle&>().buffer;
  if (buffer->python.load() == nullptr) {
    buffer->python.store(python.inc_ref().ptr());
  }
  return buffer;
}

py::object python_new_tensor(py::handle python, py::handle spec, size_t size_bytes) {
  return py::cast(new_tensor(held(python), *spec_of(spec), size_bytes));
}

void attach(py::handle tensor, py::handle python) {
  hold(THPVariable_Unpack(tensor.ptr()).storage(), held(python));
}

Number number_type(py::handle type) {
  if (type.ptr() == reinterpret_cast<PyObject*>(&PyBool_Type)) {
    return Number::Bool;
  }
  if (type.ptr() == reinterpret_cast<PyObject*>(&PyLong_Type)) {
    return Number::Int;
  }
  return type.ptr() == reinterpret_cast<PyObject*>(&PyFloat_Type) ? Number::Float : Number::Complex;
}

c10::IValue number_value(py::handle value) {
  if (PyBool_Check(value.ptr())) {
    return value.cast<bool>();
  }
  if (PyLong_Check(value.ptr())) {
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    return overflow == 0 ? c10::IValue(number) : to_ivalue(value, c10::PyObjectType::get());
  }
  if (PyFloat_Check(value.ptr())) {
    return value.cast<double>();
  }
  return c10::IValue(c10::complex<double>(PyComplex_RealAsDouble(value.ptr()), PyComplex_ImagAsDouble(value.ptr())));
}

Part operand_part(py::handle part) {
  Part made;
  if (part.is_none()) {
    made.is = Part::Is::None;
  } else if (PyLong_CheckExact(part.ptr())) {
    made.is = Part::Is::Value;
    made.value = part.cast<int64_t>();
  } else {
    made.is = Part::Is::Number;
    made.number = number_type(part);
  }
  return made;
}

Part make_part(const Argument& argument, py::handle part, py::handle value, py::handle default_marker) {
  Part made;
  switch (argument.kind) {
    case Kind::Tensor:
      return operand_part(part);
    case Kind::Tensors:
      if (part.is_none()) {
        made.is = Part::Is::None;
        break;
      }
      made.is = Part::Is::Items;
      for (py::handle item : part) {
        made.items.push_back(operand_part(item));
      }
      break;
    case Kind::Scalar:
      if (part.is(default_marker)) {
        made.is = Part::Is::Default;
        break;
      }
      return operand_part(part);
    case Kind::Scalars:
      made.is = Part::Is::Items;
      for (py::handle item : part) {
        made.items.push_back(operand_part(item));
      }
      break;
    case Kind::Static:
      made.is = Part::Is::Equal;
      made.equal = to_ivalue(value, argument.type);
      break;
    case Kind::Device:
      made.is = Part::Is::Device;
      made.value = part.cast<bool>() ? 1 : 0;
      break;
    case Kind::Generator:
    case Kind::Dropped:
      break;
  }
  return made;
}

// `key` has a part for every argument but generators and dropped ones.
void describe_call(
    Node& node, Operator* op, const py::tuple& key, const py::tuple& values, py::handle default_marker,
    const py::list& returns, int64_t made) {
  size_t place = 1;
  std::vector<Part> parts;
  for (size_t i = 0; i < op->arguments.size(); ++i) {
    const Argument& argument = op->arguments[i];
    if (argument.kind == Kind::Generator || argument.kind == Kind::Dropped) {
      parts.emplace_back();
    } else {
      parts.push_back(make_part(argument, key[place++], values[i], default_marker));
    }
  }
  std::vector<Returned> returned;
  for (py::handle item : returns) {
    auto described = item.cast<py::tuple>();
    Returned one;
    one.list = described[0].cast<bool>();
    for (py::handle each : described[1]) {
      auto result = each.cast<py::tuple>();
      Result made_result;
      made_result.is = static_cast<Result::Is>(result[0].cast<int>());
      made_result.of = result[1].cast<int64_t>();
      if (!result[2].is_none()) {
        made_result.spec = spec_of(result[2]);
      }
      one.results.push_back(std::move(made_result));
    }
    returned.push_back(std::move(one));
  }
  node.parts = std::move(parts);
  node.returns = std::move(returned);
  node.made = made;
  node.op = op;
}

Operator* make_operator(
    const std::string& name, const std::string& overload, const std::vector<int>& kinds, bool random, bool located,
    std::vector<size_t> versions) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  auto* op = new Operator();
  op->name = overload.empty() ? name : name + "." + overload;
  op->random = random;
  op->located = located;
  op->versions = std::move(versions);
  const auto& arguments = handle.schema().arguments();
  for (size_t i = 0; i < kinds.size(); ++i) {
    const auto& argument = arguments[i];
    op->arguments.push_back(
        {static_cast<Kind>(kinds[i]), argument.real_type(), argument.default_value().value_or(c10::IValue())});
  }
  return op;
}

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

py::list take_list(Recorder& state, bool clear) {
  py::list found;
  for (const Input& input : state.inputs) {
    found.append(
        input.python != nullptr ? py::reinterpret_borrow<py::object>(input.python) : python_of(input.buffer));
  }
  if (clear) {
    std::vector<Input> inputs;
    inputs.swap(state.inputs);
    for (const Input& input : inputs) {
      Py_XDECREF(input.python);
    }
  }
  return found;
}

py::list scalars_of(const Recorder& state) {
  py::list found;
  for (const c10::IValue& value : state.scalars) {
    found.append(to_python(value));
  }
  return found;
}

void bind_buffers(py::module_& module) {
  py::class_<SpecHandle>(module, "Spec").def("is_used", [](const SpecHandle& self) {
    return self.spec.use_count() > 1;
  });
  py::class_<BufferHandle>(module, "Buffer")
      .def(py::init<>())
      .def_property(
          "number", [](const BufferHandle& self) { return self.buffer->number; },
          [](BufferHandle& self, int64_t number) { self.buffer->number = number; })
      .def_property(
          "spec",
          [](const BufferHandle& self) {
            return self.buffer->spec ? py::reinterpret_borrow<py::object>(self.buffer->spec->python) : py::none();
          },
          [](BufferHandle& self, py::handle spec) { self.buffer->spec = spec_of(spec); })
      .def_property_readonly("input", [](const BufferHandle& self) { return self.buffer->input; })
      .def("note_data", [](BufferHandle& self) { self.buffer->computed = true; })
      .def(
          "value_of",
          [](const BufferHandle& self, py::handle spec, int64_t base) {
            return self.buffer->value_of(spec_of(spec).get(), base);
          })
      .def(
          "remember_view",
          [](BufferHandle& self, py::handle spec, int64_t base, int64_t number) {
            self.buffer->remember_view(spec_of(spec), base, number);
          })
      .def("forget_views", [](BufferHandle& self) { self.buffer->forget_views(); })
      .def("view_numbers", [](const BufferHandle& self, int64_t base) {
        std::vector<int64_t> found;
        if (self.buffer->views_base == base) {
          for (const auto& view : self.buffer->views) {
            found.push_back(view.second);
          }
        }
        return found;
      });
  module.def("set_buffer_class", [](py::object made) { buffer_class = made.release().ptr(); });
  module.def("find_buffer", &find_buffer);
  module.def("number_of", &number_of);
  module.def("new_tensor", &python_new_tensor);
  module.def("attach", &attach);
}

void bind_nodes(py::module_& module) {
  py::class_<Operator, std::unique_ptr<Operator, py::nodelete>>(module, "Operator")
      .def(py::init(&make_operator))
      .def("register", [](Operator& self) { register_kernel(self.name, &self); })
      .def_readwrite("python_only", &Operator::python_only)
      .def_readonly("name", &Operator::name)
      .def_readonly("hits", &Operator::hits)
      .def_readonly("misses", &Operator::misses);
  py::class_<Node>(module, "Node")
      .def(py::init([](py::handle python) {
        auto node = std::make_unique<Node>();
        node->python = python.ptr();
        return node;
      }))
      .def_property_readonly("described", [](const Node& self) { return self.op != nullptr || self.input >= 0; })
      .def(
          "describe_input",
          [](Node& self, int64_t index, py::handle spec) {
            self.input = index;
            self.input_spec = spec_of(spec);
          })
      .def("describe_call", &describe_call)
      .def(
          "set_numbers",
          [](Node& self, py::object tried) {
            self.any_numbers = tried.is_none();
            self.numbers.clear();
            if (!self.any_numbers) {
              for (py::handle numbers : tried) {
                std::vector<c10::IValue> known;
                for (py::handle number : numbers) {
                  known.push_back(number_value(number));
                }
                self.numbers.push_back(std::move(known));
              }
            }
          })
      .def(
          "expect",
          [](Node& self, Node* child) {
            auto& children = self.children;
            const auto at = std::find(children.begin(), children.end(), child);
            if (at != children.end()) {
              std::rotate(children.begin(), at, at + 1);
            } else {
              children.insert(children.begin(), child);
            }
          })
      .def("forget_children", [](Node& self) { self.children.clear(); });
}

void bind_state(py::module_& module) {
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
      .def("add_buffer", [](Recorder& self, BufferHandle& made) { self.buffers.push_back(made.buffer); })
      .def(
          "live_buffers",
          [](Recorder& self) {
            py::list found;
            for (const BufferPtr& buffer : self.buffers) {
              if (buffer->storages.load() > 0) {
                found.append(python_of(buffer));
              }
            }
            return found;
          })
      .def("is_input", [](const Recorder& self, const BufferHandle& of) { return self.is_input(*of.buffer); })
      .def(
          "add_input",
          [](Recorder& self, py::object python) {
            BufferPtr buffer = python.cast<BufferHandle&>().buffer;
            if (!self.is_input(*buffer)) {
              buffer->input = static_cast<int64_t>(self.inputs.size());
              self.inputs.push_back({buffer, c10::Storage(), python.release().ptr()});
            }
            return buffer->input;
          })
      .def_property_readonly("inputs", [](Recorder& self) { return take_list(self, false); })
      .def_property_readonly("scalars", [](const Recorder& self) { return scalars_of(self); })
      .def_property_readonly("scalar_count", [](const Recorder& self) { return self.scalars.size(); })
      .def(
          "add_scalars",
          [](Recorder& self, const py::list& numbers) {
            for (py::handle number : numbers) {
              self.scalars.push_back(number_value(number));
            }
          })
      .def(
          "clear",
          [](Recorder& self) {
            take_list(self, true);
            self.scalars.clear();
            std::vector<BufferPtr> buffers;
            buffers.swap(self.buffers);
          })
      .def("set_note_line", [](Recorder& self, py::object call) { self.note_line = call.release().ptr(); })
      .def("take_hits", [](Recorder& self) { return std::exchange(self.hits, 0); });
}

}  // namespace

void bind_recorder(py::module_& module) {
  bind_buffers(module);
  bind_nodes(module);
  bind_state(module);
}

}  // namespace torch_ltc
