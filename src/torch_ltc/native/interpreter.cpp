// Runs calls of a program with PyTorch's kernels, one after the other, without the GIL. A call that fails, and one that
// is left to Python, ends the run: Python goes on from there.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <variant>

#include "conversion.h"
#include "native.h"

namespace torch_ltc {
namespace {

// As lowering/native_calls.py numbers them.
enum class OperandKind { kConstant, kDefault, kTensor, kTensors, kVarying };

struct Operand {
  OperandKind kind;
  c10::IValue constant;
  // The value of a tensor, or the place among what varies.
  size_t number = 0;
  std::vector<int64_t> numbers;
  c10::TypePtr type;
};

// In place of a value number: a return that makes no value, or an item of a list that is none.
constexpr int64_t kNoValue = -1;
// In place of the length of a list: a return that is none.
constexpr int64_t kSingle = -1;

struct NativeCall {
  std::optional<c10::OperatorHandle> op;
  std::vector<Operand> operands;
  std::vector<int64_t> returns;
  std::vector<int64_t> numbers;
  std::vector<size_t> dead;
};

// Keeps the warnings of kernels, with the call that they come from.
class KeptWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { kept.emplace_back(call, warning); }

  size_t call = 0;
  std::vector<std::pair<size_t, c10::Warning>> kept;
};

// The text that PyTorch gives the warning in Python.
std::string text_of(const c10::Warning& warning) {
  const std::string text = torch::processErrorMsg(warning.msg());
  const c10::SourceLocation& place = warning.source_location();
  if (warning.verbatim() || place.file == nullptr) {
    return text;
  }
  return text + " (Triggered internally at " + place.file + ":" + std::to_string(place.line) + ".)";
}

py::object as_python(const std::exception_ptr& error) {
  torch::translate_exception_to_python(error);
  return py::error_already_set().value();
}

c10::IValue as_list(const std::vector<int64_t>& numbers, const std::vector<at::Tensor>& values, const c10::Type& type) {
  if (type.castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<at::Tensor>> list;
    for (const int64_t number : numbers) {
      list.push_back(number == kNoValue ? std::nullopt : std::make_optional(values[static_cast<size_t>(number)]));
    }
    return list;
  }
  c10::List<at::Tensor> list;
  list.reserve(numbers.size());
  for (const int64_t number : numbers) {
    list.push_back(values.at(static_cast<size_t>(number)));
  }
  return list;
}

class NativeCalls {
 public:
  explicit NativeCalls(std::vector<size_t> outputs) : outputs_(std::move(outputs)) {}

  // A call that Python runs.
  void add_foreign() { calls_.emplace_back(); }

  // A call: its operands as pairs of kind and value, in the order of the schema; the lengths of lists among its returns,
  // the value numbers of these, and the values that end with it.
  void add(
      const std::string& name,
      const std::string& overload,
      const py::list& operands,
      std::vector<int64_t> returns,
      std::vector<int64_t> numbers,
      std::vector<size_t> dead) {
    NativeCall call;
    call.op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const auto& arguments = call.op->schema().arguments();
    TORCH_CHECK(operands.size() == arguments.size(), name, ": operands do not fit the schema");
    const size_t varying = types_.size();
    try {
      for (size_t i = 0; i < arguments.size(); ++i) {
        auto pair = operands[i].cast<py::tuple>();
        call.operands.push_back(operand_of(static_cast<OperandKind>(pair[0].cast<int>()), pair[1], arguments[i]));
      }
    } catch (...) {
      types_.resize(varying);
      throw;
    }
    call.returns = std::move(returns);
    call.numbers = std::move(numbers);
    call.dead = std::move(dead);
    calls_.push_back(std::move(call));
  }

  // Runs the calls from `begin` on, with `values` by number and the values of what varies. The number of calls that have
  // run until now; the error of the next one, or None; warnings as call, text, and whether they are of deprecation.
  // `values` then has the outputs, or, when a call is left, all that is alive.
  py::tuple run(const py::list& values, const py::list& varying, size_t begin) const {
    std::vector<at::Tensor> tensors(values.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      PyObject* value = PyList_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(i));
      if (value != Py_None) {
        tensors[i] = THPVariable_Unpack(value);
      }
    }
    std::vector<c10::IValue> given;
    given.reserve(types_.size());
    try {
      for (size_t i = 0; i < types_.size(); ++i) {
        given.push_back(to_operand(varying[i], types_[i]));
      }
    } catch (const std::exception&) {
      // The call will say what is wrong with it.
      return py::make_tuple(begin, py::none(), py::list());
    }
    KeptWarnings warnings;
    std::exception_ptr error;
    size_t at = begin;
    {
      py::gil_scoped_release released;
      const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
      torch::jit::Stack stack;
      for (; at < calls_.size() && calls_[at].op; ++at) {
        warnings.call = at;
        try {
          run_one(calls_[at], tensors, given, stack);
        } catch (...) {
          error = std::current_exception();
          break;
        }
      }
      stack.clear();
    }
    const bool done = at == calls_.size();
    put(values, tensors, done);
    py::list told;
    for (const auto& [call, warning] : warnings.kept) {
      const bool deprecated = std::holds_alternative<c10::Warning::DeprecationWarning>(warning.type());
      told.append(py::make_tuple(call, text_of(warning), deprecated));
    }
    return py::make_tuple(at, error ? as_python(error) : py::none(), told);
  }

 private:
  Operand operand_of(OperandKind kind, py::handle value, const c10::Argument& argument) {
    Operand made;
    made.kind = kind;
    switch (kind) {
      case OperandKind::kConstant:
        made.constant = to_operand(value, argument.type());
        break;
      case OperandKind::kDefault:
        TORCH_CHECK(argument.default_value().has_value(), argument.name(), " is missing");
        made.kind = OperandKind::kConstant;
        made.constant = *argument.default_value();
        break;
      case OperandKind::kTensor:
        made.number = value.cast<size_t>();
        break;
      case OperandKind::kTensors:
        made.numbers = value.cast<std::vector<int64_t>>();
        made.type = argument.type();
        if (made.type->kind() == c10::TypeKind::OptionalType) {
          made.type = made.type->expectRef<c10::OptionalType>().getElementType();
        }
        TORCH_CHECK(made.type->kind() == c10::TypeKind::ListType, argument.name(), " is no list");
        break;
      case OperandKind::kVarying:
        made.number = types_.size();
        types_.push_back(argument.type());
        break;
    }
    return made;
  }

  static void run_one(
      const NativeCall& call,
      std::vector<at::Tensor>& values,
      const std::vector<c10::IValue>& given,
      torch::jit::Stack& stack) {
    stack.clear();
    for (const Operand& operand : call.operands) {
      switch (operand.kind) {
        case OperandKind::kTensor:
          stack.emplace_back(values[operand.number]);
          break;
        case OperandKind::kTensors:
          stack.push_back(as_list(operand.numbers, values, *operand.type));
          break;
        case OperandKind::kVarying:
          stack.push_back(given[operand.number]);
          break;
        default:
          stack.push_back(operand.constant);
      }
    }
    call.op->callBoxed(stack);
    size_t place = 0;
    for (size_t i = 0; i < call.returns.size(); ++i) {
      if (call.returns[i] == kSingle) {
        const int64_t number = call.numbers[place++];
        if (number != kNoValue) {
          values[static_cast<size_t>(number)] = std::move(stack[i]).toTensor();
        }
        continue;
      }
      const auto list = stack[i].toTensorList();
      for (size_t item = 0; item < static_cast<size_t>(call.returns[i]); ++item) {
        const int64_t number = call.numbers[place++];
        if (number != kNoValue) {
          values[static_cast<size_t>(number)] = list.get(item);
        }
      }
    }
    for (const size_t number : call.dead) {
      values[number].reset();
    }
  }

  void put(const py::list& values, const std::vector<at::Tensor>& tensors, bool done) const {
    const auto put_one = [&](size_t number) {
      const at::Tensor& tensor = tensors[number];
      PyObject* value = tensor.defined() ? THPVariable_Wrap(tensor) : py::none().release().ptr();
      PyList_SetItem(values.ptr(), static_cast<Py_ssize_t>(number), value);
    };
    if (done) {
      std::for_each(outputs_.begin(), outputs_.end(), put_one);
      return;
    }
    for (size_t number = 0; number < tensors.size(); ++number) {
      put_one(number);
    }
  }

  std::vector<size_t> outputs_;
  std::vector<NativeCall> calls_;
  // Of what varies, in the order in which it is given.
  std::vector<c10::TypePtr> types_;
};

}  // namespace

void bind_interpreter(py::module_& module) {
  py::class_<NativeCalls>(module, "NativeCalls")
      .def(py::init<std::vector<size_t>>())
      .def("add", &NativeCalls::add)
      .def("add_foreign", &NativeCalls::add_foreign)
      .def("run", &NativeCalls::run);
}

}  // namespace torch_ltc
