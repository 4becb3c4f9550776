// Tensors that nobody has written to: made here where Python has made one of the same shape before.

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/MemoryFormat.h>
#include <torch/library.h>

#include "device.h"
#include "eager.h"
#include "handles.h"
#include "kernel.h"

namespace torch_ltc {
namespace {

constexpr size_t kMostShapes = 4096;

// The specs of such tensors, by a hash of their sizes. Guarded by the recorder's lock; emptied with the GIL held, because
// the end of a spec needs it.
std::unordered_multimap<size_t, SpecPtr>& shapes() {
  static auto* the_shapes = new std::unordered_multimap<size_t, SpecPtr>();
  return *the_shapes;
}

size_t hash_of_sizes(c10::IntArrayRef size) {
  size_t hash = size.size();
  for (const int64_t length : size) {
    hash = hash * 1000003 + static_cast<size_t>(length);
  }
  return hash;
}

const SpecPtr* find_shape(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype) {
  const auto [begin, end] = shapes().equal_range(hash_of_sizes(size));
  for (auto place = begin; place != end; ++place) {
    const Spec& spec = *place->second;
    if (spec.dtype == dtype && size == c10::IntArrayRef(spec.size) && stride == c10::IntArrayRef(spec.stride)) {
      return &place->second;
    }
  }
  return nullptr;
}

void remember_shape(py::handle python) {
  const SpecPtr spec = spec_of(python);
  Locked locked(recorder().lock);
  if (find_shape(spec->size, spec->stride, c10::typeMetaToScalarType(spec->dtype)) != nullptr) {
    return;
  }
  if (shapes().size() >= kMostShapes) {
    shapes().clear();
  }
  shapes().emplace(hash_of_sizes(spec->size), spec);
}

bool is_filled() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

// A new tensor; undefined where Python must make it.
at::Tensor make_empty(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device) {
  const bool own = !device || (device->type() == kType && is_own(device->index()));
  if (layout.value_or(at::kStrided) != at::kStrided || !own || eager_region().on() || is_filled()) {
    return {};
  }
  const at::ScalarType wanted = dtype ? *dtype : at::get_default_dtype_as_scalartype();
  Locked locked(recorder().lock);
  const SpecPtr* found = find_shape(size, stride, wanted);
  if (found == nullptr) {
    return {};
  }
  auto buffer = c10::make_intrusive<Buffer>();
  buffer->spec = *found;
  return new_tensor(buffer, **found, (*found)->size_bytes);
}

// Made by Python.
template <class... Given>
at::Tensor make_elsewhere(Operator& op, const Given&... given) {
  torch::jit::Stack stack{c10::IValue(given)...};
  op.handle.redispatchBoxed(kPython, &stack);
  return std::move(stack[0]).toTensor();
}

Operator* the_empty = nullptr;
Operator* the_empty_strided = nullptr;

// Made in an eager region, by `make` on the physical device; undefined when there is none.
template <class Make>
at::Tensor make_at_once(
    const Operator& op, std::optional<at::Layout> layout, std::optional<at::Device> device, const Make& make) {
  EagerRegion& region = eager_region();
  if (!region.on() || layout.value_or(at::kStrided) != at::kStrided || !region.may_run(op)) {
    return {};
  }
  {
    Locked locked(recorder().lock);
    if (!region.is_undisturbed() || !EagerOperands().place(device, /*copies=*/false)) {
      return {};
    }
    region.note_call(/*reads=*/false);
  }
  const EagerRegion::Running running(region);
  return new_tensor(make());
}

using Lengths = c10::SmallVector<int64_t, 5>;

Lengths row_major_strides(c10::IntArrayRef size) {
  Lengths stride(size.size());
  int64_t step = 1;
  for (size_t i = size.size(); i-- > 0;) {
    stride[i] = step;
    step *= std::max<int64_t>(size[i], 1);
  }
  return stride;
}

at::Tensor lazy_empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  at::Tensor made = make_at_once(
      *the_empty, layout, device, [&] { return at::empty(size, dtype, at::kStrided, at::kCPU, false, format); });
  if (made.defined()) {
    return made;
  }
  const at::MemoryFormat wanted = format.value_or(at::MemoryFormat::Contiguous);
  if (wanted == at::MemoryFormat::Contiguous) {
    made = make_empty(size, row_major_strides(size), dtype, layout, device);
  } else if (wanted == at::MemoryFormat::ChannelsLast && size.size() == 4) {
    made = make_empty(size, c10::get_channels_last_strides_2d(size), dtype, layout, device);
  }
  return made.defined() ? made : make_elsewhere(*the_empty, size, dtype, layout, device, pinned, format);
}

at::Tensor lazy_empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pinned) {
  at::Tensor made = make_at_once(*the_empty_strided, layout, device, [&] {
    return at::empty_strided(size, stride, dtype, at::kStrided, at::kCPU, false);
  });
  if (!made.defined()) {
    made = make_empty(size, stride, dtype, layout, device);
  }
  return made.defined() ? made : make_elsewhere(*the_empty_strided, size, stride, dtype, layout, device, pinned);
}

void register_empties(Operator* empty_operator, Operator* strided_operator) {
  the_empty = empty_operator;
  the_empty_strided = strided_operator;
  // Never destroyed, as the one of the other kernels.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
  constexpr auto kKey = c10::DispatchKey::PrivateUse1;
  library->impl("aten::empty.memory_format", torch::dispatch(kKey, &lazy_empty));
  library->impl("aten::empty_strided", torch::dispatch(kKey, &lazy_empty_strided));
}

}  // namespace

void bind_empties(py::module_& module) {
  module.def("register_empties", &register_empties);
  module.def("remember_shape", &remember_shape);
}

}  // namespace torch_ltc
