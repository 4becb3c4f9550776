// The pending program, and the hit path: a call that is the expected next one is recorded here.

#pragma once

#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "lock.h"
#include "node.h"

namespace torch_ltc {

// An input of the pending program. The storage keeps the buffer and its data; one that never had a storage is held as
// the `Buffer` of Python.
struct Input {
  BufferPtr buffer;
  c10::Storage storage;
  PyObject* python = nullptr;
};

class Recorder {
 public:
  RecorderLock lock;
  // The number of the first value of the pending program, and of the next one.
  int64_t base = 0;
  int64_t count = 0;
  bool random = false;
  // Where recording stands; null when only Python knows.
  Node* position = nullptr;
  std::vector<BufferPtr> buffers;
  std::vector<Input> inputs;
  std::vector<c10::IValue> scalars;
  uint64_t hits = 0;
  // Called with the GIL and the node of Python, to note the line of a call that may fail.
  PyObject* note_line = nullptr;

  // Record the call on top of the stack and put its results there; false when Python must do it.
  bool hit(Operator& op, torch::jit::Stack& stack);

  bool is_input(const Buffer& buffer) const {
    return buffer.input >= 0 && buffer.input < static_cast<int64_t>(inputs.size()) &&
        inputs[buffer.input].buffer.get() == &buffer;
  }

 private:
  struct Operands;
  using Tensors = c10::SmallVector<at::Tensor, 4>;
  using Values = c10::SmallVector<c10::IValue, 4>;
  bool resolve(const at::Tensor& tensor, Operands& found);
  bool input(Buffer& buffer, const at::Tensor& tensor, Operands& found);
  bool operands(const Operator& op, const c10::IValue* arguments, Operands& found);
  bool fits(const Node& node, const c10::IValue* arguments, Operands& found) const;
  at::Tensor make(const Result& result, int64_t& number, const Operands& found, const Tensors& made);
  bool note(const Node& node) const;
  void results(const Node& node, const Operands& found, Values& into);
};

Recorder& recorder();

}  // namespace torch_ltc
