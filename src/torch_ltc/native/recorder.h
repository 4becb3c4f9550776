// The pending program, and the hit path: a call that is the expected next one is recorded here.

#pragma once

#include <ATen/core/stack.h>

#include "compare.h"
#include "lock.h"
#include "node.h"

namespace torch_ltc {

// An input of the pending program, which is one of the buffer's holders; of one that never had a storage, the program
// holds the `Buffer` of Python instead. Not the storage: autograd writes into gradients whose storage nobody else has.
struct Input {
  BufferPtr buffer;
  PyObject* python = nullptr;
};

using Values = c10::SmallVector<c10::IValue, 4>;

class Recorder {
 public:
  RecorderLock lock;
  // The number of the first value of the pending program, and of the next one.
  int64_t base = 0;
  int64_t count = 0;
  bool random = false;
  // Where recording stands; null when only Python knows.
  Node* position = nullptr;
  // Of the pending program, and of earlier ones to be used again.
  std::vector<BufferPtr> buffers;
  std::vector<BufferPtr> spare;
  std::vector<Input> inputs;
  std::vector<c10::IValue> scalars;
  uint64_t hits = 0;
  // When the first call of the pending program was recorded, in seconds; 0 before that.
  double started = 0;
  // Called with the GIL: at the first call of a program; and with the node of Python, to note the line of a call that
  // may fail.
  PyObject* begin = nullptr;
  PyObject* note_line = nullptr;

  // Record the call; false when Python must do it. A call that returns what it writes, or nothing, needs no `returned`.
  bool hit(Operator& op, const c10::IValue* arguments, Values* returned);

  // A new tensor, or a view, that is the value with this number.
  at::Tensor new_result(const SpecPtr& spec, int64_t number);
  at::Tensor new_view(const at::Tensor& of, const SpecPtr& spec, int64_t number) const;

  // The pending program has ended: nobody needs its buffers any more but those who hold them.
  void release_buffers();

  bool is_input(const Buffer& buffer) const {
    return buffer.input >= 0 && buffer.input < static_cast<int64_t>(inputs.size()) &&
        inputs[buffer.input].buffer.get() == &buffer;
  }

 private:
  static constexpr size_t kMostSpare = 1 << 14;
  struct Operands;
  // Where recording stood before a call.
  struct Mark {
    Node* position;
    int64_t count;
    size_t inputs;
    size_t buffers;
  };
  using Tensors = c10::SmallVector<at::Tensor, 4>;
  bool resolve(const at::Tensor& tensor, Operands& found);
  bool input(Buffer& buffer, const at::Tensor& tensor, Operands& found);
  bool define_empty(Buffer& buffer);
  void go_back(const Mark& mark, const Operands& found);
  bool operands(const Operator& op, const c10::IValue* arguments, Operands& found);
  bool fits(const Node& node, const c10::IValue* arguments, Operands& found) const;
  at::Tensor make(const Result& result, int64_t& number, const Operands& found, const Tensors& made);
  bool told(const Node& node) const;
  void results(const Node& node, const Operands& found, Values& into);
};

Recorder& recorder();

}  // namespace torch_ltc
