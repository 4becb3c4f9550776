// What Python sees of operators and nodes.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <set>

#include "conversion.h"
#include "handles.h"
#include "kernel.h"

namespace torch_ltc {

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

namespace {

// Each is compared with a call, one after the other.
constexpr size_t kMostChildren = 16;

Number number_type(py::handle type) {
  if (type.ptr() == reinterpret_cast<PyObject*>(&PyBool_Type)) {
    return Number::Bool;
  }
  if (type.ptr() == reinterpret_cast<PyObject*>(&PyLong_Type)) {
    return Number::Int;
  }
  return type.ptr() == reinterpret_cast<PyObject*>(&PyFloat_Type) ? Number::Float : Number::Complex;
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

Part list_part(py::handle parts) {
  Part made;
  made.is = Part::Is::Items;
  made.items = std::make_unique<std::vector<Part>>();
  for (py::handle part : parts) {
    made.items->push_back(operand_part(part));
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
      return list_part(part);
    case Kind::Scalar:
      if (part.is(default_marker)) {
        made.is = Part::Is::Default;
        break;
      }
      return operand_part(part);
    case Kind::Scalars:
      return list_part(part);
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
  decltype(node.parts) parts;
  for (size_t i = 0; i < op->arguments.size(); ++i) {
    const Argument& argument = op->arguments[i];
    if (argument.kind == Kind::Generator || argument.kind == Kind::Dropped) {
      parts.emplace_back();
    } else {
      parts.push_back(make_part(argument, key[place++], values[i], default_marker));
    }
  }
  bool shares = false;
  decltype(node.returns) returned;
  for (py::handle item : returns) {
    auto described = item.cast<py::tuple>();
    Returned one;
    one.list = described[0].cast<bool>();
    for (py::handle each : described[1]) {
      auto result = each.cast<py::tuple>();
      Result made_result;
      made_result.is = static_cast<Result::Is>(result[0].cast<int>());
      made_result.of = result[1].cast<int64_t>();
      shares = shares || made_result.is == Result::Is::Shared;
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
  node.shares = shares;
  node.op = op;
}

// The argument that a call writes to and returns here, or -1.
int64_t written_argument(const c10::Argument& returned, const std::vector<c10::Argument>& arguments) {
  if (returned.alias_info() == nullptr || !returned.alias_info()->isWrite()) {
    return -1;
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite() && alias->beforeSets() == returned.alias_info()->beforeSets()) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

Operator* make_operator(
    const std::string& name, const std::string& overload, const std::vector<int>& kinds, bool random,
    std::vector<size_t> versions) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  auto* op = new Operator(handle);
  op->name = overload.empty() ? name : name + "." + overload;
  op->random = random;
  op->versions = std::move(versions);
  op->copies = name == "aten::_to_copy" || name == "aten::copy_";
  op->reads = name == "aten::_local_scalar_dense";
  const auto& arguments = handle.schema().arguments();
  for (const c10::Argument& returned : handle.schema().returns()) {
    op->same.push_back(written_argument(returned, arguments));
  }
  const std::set<std::string> of_copies{"layout", "device", "pin_memory", "non_blocking"};
  for (size_t i = 0; i < kinds.size(); ++i) {
    const auto& argument = arguments[i];
    op->writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    op->arguments.push_back(
        {static_cast<Kind>(kinds[i]), argument.real_type(), argument.default_value().value_or(c10::IValue()),
         op->copies && of_copies.count(argument.name()) != 0});
  }
  return op;
}

}  // namespace

void bind_nodes(py::module_& module) {
  py::class_<Operator, std::unique_ptr<Operator, py::nodelete>>(module, "Operator")
      .def(py::init(&make_operator))
      .def("register", [](Operator& self) { register_kernel(&self); })
      .def_readwrite("python_only", &Operator::python_only)
      .def_readwrite("unrecorded", &Operator::unrecorded)
      .def_readwrite("at_once", &Operator::at_once)
      .def_readonly("name", &Operator::name)
      .def_readonly("hits", &Operator::hits)
      .def_readonly("misses", &Operator::misses);
  py::class_<Node>(module, "Node")
      .def(py::init([](py::handle python) {
        auto node = std::make_unique<Node>();
        node->python = python.ptr();
        return node;
      }))
      .def_property_readonly(
          "described", [](const Node& self) { return self.op != nullptr || self.input >= 0 || self.empty_spec; })
      .def(
          "describe_input",
          [](Node& self, int64_t index, py::handle spec) {
            self.input = index;
            self.input_spec = spec_of(spec);
          })
      .def("describe_empty", [](Node& self, py::handle spec) { self.empty_spec = spec_of(spec); })
      .def("describe_call", &describe_call)
      .def_readwrite("located", &Node::located)
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
              if (children.size() == kMostChildren) {
                children.pop_back();
              }
              children.insert(children.begin(), child);
            }
          })
      .def("forget_children", [](Node& self) { self.children.clear(); });
}

}  // namespace torch_ltc
