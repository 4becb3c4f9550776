// The hit path: compare a call with the ones that came next before, step down, and make the results.

#include "recorder.h"

#include <c10/core/TensorImpl.h>

#include "native.h"

namespace torch_ltc {

// The tensors of a call in argument order, lists opened, with their places in the key; and its run-time numbers.
struct Recorder::Operands {
  static constexpr int64_t kNone = -1;
  static constexpr int64_t kNumber = -2;
  c10::SmallVector<int64_t, 16> values;
  c10::SmallVector<const at::Tensor*, 16> all;
  c10::SmallVector<const at::Tensor*, 16> lazy;
  Numbers numbers;
};

Recorder& recorder() {
  // Never destroyed: storages may end after it.
  static auto* the_recorder = new Recorder();
  return *the_recorder;
}

namespace {

const at::Tensor kNoTensor;

}  // namespace

bool Recorder::input(Buffer& buffer, const at::Tensor& tensor, Operands& found) {
  const bool known = is_input(buffer);
  const int64_t index = known ? buffer.input : static_cast<int64_t>(inputs.size());
  for (Node* child : position->children) {
    if (child->input == index && child->input_spec->matches(*tensor.unsafeGetTensorImpl())) {
      if (!known) {
        buffer.input = index;
        buffer.holders.fetch_add(1);
        inputs.push_back({BufferPtr::reclaim_copy(&buffer), nullptr});
      }
      position = child;
      const int64_t number = count++;
      buffer.remember_view(child->input_spec, base, number);
      found.values.push_back(number - base);
      return true;
    }
  }
  return false;
}

bool Recorder::resolve(const at::Tensor& tensor, Operands& found) {
  if (!tensor.defined()) {
    found.values.push_back(Operands::kNone);
    found.all.push_back(nullptr);
    return true;
  }
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  found.all.push_back(&tensor);
  if (impl->is_wrapped_number()) {
    found.values.push_back(Operands::kNumber);
    return impl->is_cpu();
  }
  if (!impl->has_storage()) {
    return false;
  }
  Buffer* buffer = buffer_of(impl->unsafe_storage());
  if (buffer == nullptr) {
    return false;
  }
  found.lazy.push_back(&tensor);
  const int64_t number = buffer->value_of(*impl, base);
  if (number >= 0) {
    found.values.push_back(number - base);
    return true;
  }
  if (buffer->number >= base) {
    return false;
  }
  if (buffer->number >= 0 || buffer->computed) {
    return input(*buffer, tensor, found);
  }
  if (!define_empty(*buffer) || !buffer->spec->matches(*impl)) {
    return false;
  }
  found.values.push_back(buffer->number - base);
  return true;
}

// Memory that nobody has written to becomes a value when a call takes it. What Python has seen may have got its memory
// meanwhile.
bool Recorder::define_empty(Buffer& buffer) {
  if (buffer.python.load() != nullptr || buffer.data.defined()) {
    return false;
  }
  for (Node* child : position->children) {
    if (child->empty_spec && child->empty_spec == buffer.spec) {
      position = child;
      buffer.number = count++;
      buffers.push_back(BufferPtr::reclaim_copy(&buffer));
      return true;
    }
  }
  return false;
}

// A call that is not recorded here takes no inputs: Python may not record it at all.
void Recorder::go_back(const Mark& mark, const Operands& found) {
  if (count == mark.count) {
    return;
  }
  for (const at::Tensor* tensor : found.lazy) {
    Buffer& buffer = *buffer_of(tensor->unsafeGetTensorImpl()->unsafe_storage());
    if (buffer.views_base == base) {
      buffer.views.drop_from(mark.count);
    }
  }
  for (; inputs.size() > mark.inputs; inputs.pop_back()) {
    inputs.back().buffer->input = -1;
    inputs.back().buffer->holders.fetch_sub(1);
  }
  for (; buffers.size() > mark.buffers; buffers.pop_back()) {
    buffers.back()->number = -1;
  }
  position = mark.position;
  count = mark.count;
}

bool Recorder::operands(const Operator& op, const c10::IValue* arguments, Operands& found) {
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    if (op.arguments[i].kind == Kind::Tensor) {
      if (value.isTensor() ? !resolve(value.toTensor(), found) : !resolve(kNoTensor, found)) {
        return false;
      }
    } else if (op.arguments[i].kind == Kind::Tensors) {
      if (value.isNone()) {
        continue;
      }
      if (!value.isList()) {
        return false;
      }
      // Elements are looked at where they lie: results may be the tensors themselves.
      for (const c10::IValue& item : value.toListRef()) {
        if (item.isTensor() ? !resolve(item.toTensor(), found) : !resolve(kNoTensor, found)) {
          return false;
        }
      }
    }
  }
  return true;
}

bool Recorder::fits(const Node& node, const c10::IValue* arguments, Operands& found) const {
  size_t next = 0;
  found.numbers.clear();
  const auto operand_fits = [&](const Part& part) {
    const size_t at = next++;
    switch (part.is) {
      case Part::Is::Value:
        return found.values[at] == part.value;
      case Part::Is::None:
        return found.values[at] == Operands::kNone;
      case Part::Is::Number: {
        if (found.values[at] != Operands::kNumber) {
          return false;
        }
        c10::IValue number = wrapped_number(*found.all[at]);
        if (!is_number(number, part.number)) {
          return false;
        }
        found.numbers.push_back(std::move(number));
        return true;
      }
      default:
        return false;
    }
  };
  for (size_t i = 0; i < node.parts.size(); ++i) {
    const Part& part = node.parts[i];
    const c10::IValue& value = arguments[i];
    if (node.op->arguments[i].here) {
      if (!is_here(value)) {
        return false;
      }
      continue;
    }
    switch (node.op->arguments[i].kind) {
      case Kind::Tensor:
        if (!operand_fits(part)) {
          return false;
        }
        break;
      case Kind::Tensors:
        if (part.is == Part::Is::None) {
          if (!value.isNone()) {
            return false;
          }
          break;
        }
        if (value.isNone() || value.toListRef().size() != part.items->size()) {
          return false;
        }
        for (const Part& item : *part.items) {
          if (!operand_fits(item)) {
            return false;
          }
        }
        break;
      case Kind::Scalar:
        if (part.is == Part::Is::Default) {
          if (!equal(value, node.op->arguments[i].default_value)) {
            return false;
          }
        } else {
          if (!is_number(value, part.number)) {
            return false;
          }
          found.numbers.push_back(value);
        }
        break;
      case Kind::Scalars: {
        if (!value.isList()) {
          return false;
        }
        const auto items = value.toListRef();
        if (items.size() != part.items->size()) {
          return false;
        }
        for (size_t k = 0; k < items.size(); ++k) {
          if (!is_number(items[k], (*part.items)[k].number)) {
            return false;
          }
          found.numbers.push_back(items[k]);
        }
        break;
      }
      case Kind::Static:
        if (!equal(value, part.equal)) {
          return false;
        }
        break;
      case Kind::Device:
        if (!is_device(value, part.value != 0)) {
          return false;
        }
        break;
      case Kind::Generator:
        if (!value.isNone()) {
          return false;
        }
        break;
      case Kind::Dropped:
        break;
    }
  }
  return is_tried(node, found.numbers);
}

at::Tensor Recorder::new_result(const SpecPtr& spec, int64_t number) {
  if (spare.empty()) {
    buffers.emplace_back(c10::make_intrusive<Buffer>());
  } else {
    buffers.push_back(std::move(spare.back()));
    spare.pop_back();
  }
  const BufferPtr& buffer = buffers.back();
  buffer->number = number;
  buffer->spec = spec;
  return new_tensor(buffer, *spec, spec->size_bytes);
}

at::Tensor Recorder::new_view(const at::Tensor& of, const SpecPtr& spec, int64_t number) const {
  at::Tensor tensor = view_tensor(of, *spec);
  buffer_of(tensor.unsafeGetTensorImpl()->unsafe_storage())->remember_view(spec, base, number);
  return tensor;
}

void Recorder::release_buffers() {
  for (BufferPtr& buffer : buffers) {
    if (buffer.use_count() == 1 && spare.size() < kMostSpare) {
      buffer->reset();
      spare.push_back(std::move(buffer));
    } else {
      buffer->forget_views();
    }
  }
  buffers.clear();
}

at::Tensor Recorder::make(
    const Result& result, int64_t& number, const Operands& found, const Tensors& made) {
  switch (result.is) {
    case Result::Is::Fresh:
      return new_result(result.spec, number++);
    case Result::Is::Shared:
      return new_view(made[result.of], result.spec, number++);
    case Result::Is::View:
      return new_view(*found.lazy[result.of], result.spec, number++);
    case Result::Is::Same:
      return *found.lazy[result.of];
    case Result::Is::Nothing:
    case Result::Is::Constant:
      break;
  }
  return {};
}

void Recorder::results(const Node& node, const Operands& found, Values& into) {
  int64_t number = count;
  Tensors made;
  const auto next = [&](const Result& result) {
    at::Tensor tensor = make(result, number, found, made);
    if (node.shares) {
      made.push_back(tensor);
    }
    return tensor;
  };
  for (const Returned& returned : node.returns) {
    if (returned.list) {
      c10::List<at::Tensor> items;
      items.reserve(returned.results.size());
      for (const Result& result : returned.results) {
        items.push_back(next(result));
      }
      into.emplace_back(std::move(items));
    } else {
      const Result& result = returned.results[0];
      at::Tensor tensor = next(result);
      if (result.is == Result::Is::Constant) {
        into.emplace_back(result.of);
      } else {
        into.emplace_back(std::move(tensor));
      }
    }
  }
}

// What Python is told of a call before it is taken. False when there is no Python any more; raises what a handler of a
// signal raises meanwhile.
bool Recorder::told(const Node& node) const {
  if (started != 0 && !node.located) {
    return true;
  }
  if (!Py_IsInitialized()) {
    return false;
  }
  const py::gil_scoped_acquire gil;
  if (started == 0) {
    py::handle{begin}();
  }
  if (node.located) {
    py::handle{note_line}(py::handle{node.python});
  }
  return true;
}

bool Recorder::hit(Operator& op, const c10::IValue* arguments, Values* returned) {
  Locked locked(lock);
  Operands found;
  Node* taken = nullptr;
  const Mark before{position, count, inputs.size(), buffers.size()};
  if (position != nullptr && !writes_in_vain(op, arguments) && operands(op, arguments, found)) {
    for (Node* child : position->children) {
      if (child->op == &op && fits(*child, arguments, found)) {
        taken = child;
        break;
      }
    }
  }
  const bool made_unseen = taken != nullptr && returned == nullptr && taken->made != 0;
  if (taken == nullptr || made_unseen) {
    ++op.misses;
    go_back(before, found);
    return false;
  }
  const Node* here = position;
  const int64_t next = count;
  try {
    if (!told(*taken) || position != here || count != next) {
      // There is no Python any more; or a finalizer, which Python may call at any time, has recorded something.
      ++op.misses;
      return false;
    }
  } catch (...) {
    if (position == here && count == next) {
      go_back(before, found);
    }
    throw;
  }
  if (returned != nullptr) {
    results(*taken, found, *returned);
  }
  for (c10::IValue& number : found.numbers) {
    scalars.push_back(std::move(number));
  }
  for (const size_t place : op.versions) {
    for (const c10::IValue& item : arguments[place].toListRef()) {
      if (!item.toTensor().is_inference()) {
        item.toTensor().unsafeGetTensorImpl()->bump_version();
      }
    }
  }
  random = random || op.random;
  count += taken->made;
  position = taken;
  ++op.hits;
  ++hits;
  return true;
}

}  // namespace torch_ltc
