// Nodes of the prefix tree in the form that the hit path compares: made of those of Python, which own them.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/InferenceMode.h>

#include <memory>
#include <string>
#include <vector>

#include "buffer.h"

namespace torch_ltc {

// The part of an argument in a recording: as `Kind` in record/operator.py.
enum class Kind : uint8_t { Tensor, Tensors, Scalar, Scalars, Static, Generator, Device, Dropped };

struct Argument {
  Kind kind;
  c10::TypePtr type;
  c10::IValue default_value;
  // Of a copy: in whatever words it says that the result is a plain tensor of this device, it is the same call.
  bool here = false;
};

// One overload as the recorder sees it.
struct Operator {
  explicit Operator(c10::OperatorHandle of) : handle(of) {}

  c10::OperatorHandle handle;
  std::string name;
  std::vector<Argument> arguments;
  bool random = false;
  // Places of lists of tensors whose versions the device's kernel counts up.
  std::vector<size_t> versions;
  // Calls go to Python, always.
  bool python_only = false;
  // No call is recorded: Python, or an eager region, runs it.
  bool unrecorded = false;
  // An eager region may run it.
  bool at_once = false;
  // It copies between devices; it reads a number.
  bool copies = false;
  bool reads = false;
  // Which arguments it writes to; for each return, the argument that it is, or -1.
  std::vector<bool> writes;
  std::vector<int64_t> same;
  uint64_t hits = 0;
  uint64_t misses = 0;
};

// True for a call that writes to lists with a tensor made in inference mode, outside of it: Python does what eager does
// before it raises.
inline bool writes_in_vain(const Operator& op, const c10::IValue* arguments) {
  if (op.versions.empty() || c10::InferenceMode::is_enabled()) {
    return false;
  }
  for (const size_t place : op.versions) {
    for (const c10::IValue& item : arguments[place].toListRef()) {
      if (item.toTensor().is_inference()) {
        return true;
      }
    }
  }
  return false;
}

// The type of a run-time number.
enum class Number : uint8_t { Bool, Int, Float, Complex };

// One part of a key: what the argument of a call must be to fit.
struct Part {
  enum class Is : uint8_t { Value, None, Number, Default, Equal, Device, Items, Anything };
  Is is = Is::Anything;
  int64_t value = -1;
  Number number = Number::Int;
  c10::IValue equal;
  // Of a list; null for anything else.
  std::unique_ptr<std::vector<Part>> items;
};

// One tensor that a call returns, or a number that is always the same, or nothing.
struct Result {
  enum class Is : uint8_t { Fresh, Shared, View, Same, Nothing, Constant };
  Is is = Is::Nothing;
  SpecPtr spec;
  // The operand that it is or looks at; for Shared, the result whose storage it is on; for Constant, the number.
  int64_t of = -1;
};

// What a call returns in one place: one tensor, or a list.
struct Returned {
  bool list = false;
  c10::SmallVector<Result, 1> results;
};

struct Node {
  // Borrowed: the node of Python owns this one.
  PyObject* python = nullptr;
  // Null: an input, new memory, or a call that always goes to Python.
  Operator* op = nullptr;
  c10::SmallVector<Part, 4> parts;
  c10::SmallVector<Returned, 1> returns;
  int64_t made = 0;
  // Each recording notes its line, for the error that the call may raise.
  bool located = false;
  // Some result is on the storage of another one.
  bool shares = false;
  // Numbers that the call was tried with, unless any will do.
  bool any_numbers = true;
  std::vector<std::vector<c10::IValue>> numbers;
  // For an input.
  int64_t input = -1;
  SpecPtr input_spec;
  // For memory that the next call is the first to write to.
  SpecPtr empty_spec;
  // What came next before, the latest first. Their nodes of Python are children of this one's.
  c10::SmallVector<Node*, 2> children;
};

}  // namespace torch_ltc
