// Attention and dropout as PyTorch composes them on the physical device: autograd's kernels. Which of its kernels PyTorch
// takes for attention, Python finds out once for each kind of arguments: see device/cpu_composites.py.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstring>
#include <limits>

#include "device.h"
#include "native.h"

namespace torch_ltc {
namespace {

// How a call is done: by the kernel of Python, or by one of these, as `PLANS` in device/cpu_composites.py has them.
enum class Plan : uint8_t { Python, Math, FlashOnCpu, Flash, Efficient, Cudnn };

using Key = std::vector<int64_t>;
using MaybeTensor = std::optional<at::Tensor>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    size_t hash = key.size();
    for (const int64_t part : key) {
      hash = hash * 1000003 + static_cast<size_t>(part);
    }
    return hash;
  }
};

constexpr size_t kMostPlans = 10000;

struct Plans {
  std::mutex mutex;
  std::unordered_map<Key, Plan, KeyHash> known;
};

Plans& plans() {
  static auto* the_plans = new Plans();
  return *the_plans;
}

struct Attention {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;
  const MaybeTensor& mask;
  double dropout;
  bool causal;
  std::optional<double> scale;
  bool grouped;
};

int64_t bits_of(double number) {
  int64_t bits = 0;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

void add_tensor(Key& key, const at::Tensor& tensor) {
  key.push_back(static_cast<int64_t>(tensor.scalar_type()) * 2 + (tensor.requires_grad() ? 1 : 0));
  key.push_back(tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
}

// All that PyTorch's choice depends on.
Key key_of(const Attention& call) {
  const at::Context& context = at::globalContext();
  Key key;
  key.reserve(48);
  const bool flags[] = {
      call.causal, call.grouped, call.scale.has_value(), at::GradMode::is_enabled(), call.mask.has_value(),
      context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(), context.userEnabledMathSDP(),
      context.userEnabledCuDNNSDP(), context.userEnabledOverrideableSDP()};
  int64_t all = static_cast<int64_t>(physical_device().type());
  for (const bool flag : flags) {
    all = all * 2 + (flag ? 1 : 0);
  }
  for (const auto backend : at::globalContext().sDPPriorityOrder()) {
    all = all * 8 + static_cast<int64_t>(backend);
  }
  key.push_back(all);
  key.push_back(bits_of(call.dropout));
  key.push_back(bits_of(call.scale.value_or(0.0)));
  add_tensor(key, call.query);
  add_tensor(key, call.key);
  add_tensor(key, call.value);
  if (call.mask.has_value()) {
    add_tensor(key, *call.mask);
  }
  return key;
}

bool is_usual_operand(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() && tensor.layout() == at::kStrided && !tensor.is_nested() &&
      !tensor.key_set().has_any(c10::python_ks) && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool is_usual_attention(const Attention& call) {
  return is_usual_operand(call.query) && is_usual_operand(call.key) && is_usual_operand(call.value) &&
      (!call.mask.has_value() || is_usual_operand(*call.mask));
}

Plan plan_of(const Attention& call) {
  const Key key = key_of(call);
  Plans& all = plans();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.known.find(key);
  return found == all.known.end() ? Plan::Python : found->second;
}

// A mask of what to look at, as one to be added.
MaybeTensor added_mask(const Attention& call) {
  if (!call.mask.has_value() || call.mask->scalar_type() != at::kBool) {
    return call.mask;
  }
  return at::zeros_like(*call.mask, at::TensorOptions().dtype(call.query.dtype()))
      .masked_fill_(call.mask->logical_not(), -std::numeric_limits<double>::infinity());
}

bool needs_gradient(const Attention& call) {
  return at::GradMode::is_enabled() &&
      (call.query.requires_grad() || call.key.requires_grad() || call.value.requires_grad());
}

// Called by name: the tuples that they return differ between versions of PyTorch.
template <class... Given>
at::Tensor first_of(const char* name, Given... given) {
  torch::jit::Stack stack{c10::IValue(std::move(given))...};
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return std::move(stack[0]).toTensor();
}

at::Tensor planned(Plan plan, const Attention& call) {
  const c10::IValue none;
  switch (plan) {
    case Plan::FlashOnCpu:
      return first_of(
          "aten::_scaled_dot_product_flash_attention_for_cpu", call.query, call.key, call.value, call.dropout,
          call.causal, added_mask(call), call.scale);
    case Plan::Flash:
      return first_of(
          "aten::_scaled_dot_product_flash_attention", call.query, call.key, call.value, 0.0, call.causal, false,
          call.scale);
    case Plan::Efficient:
      return first_of(
          "aten::_scaled_dot_product_efficient_attention", call.query, call.key, call.value, none,
          needs_gradient(call), 0.0, call.causal, call.scale);
    case Plan::Cudnn:
      return first_of(
          "aten::_scaled_dot_product_cudnn_attention", call.query, call.key, call.value, none, needs_gradient(call),
          0.0, call.causal, false, call.scale);
    default:
      return first_of(
          "aten::_scaled_dot_product_attention_math", call.query, call.key, call.value, added_mask(call),
          call.dropout, call.causal, none, call.scale, call.grouped);
  }
}

constexpr c10::DispatchKeySet kInPython(c10::DispatchKey::AutogradPrivateUse2);

at::Tensor attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const MaybeTensor& mask, double dropout,
    bool causal, std::optional<double> scale, bool grouped) {
  const Attention call{query, key, value, mask, dropout, causal, scale, grouped};
  const Plan plan = is_usual_attention(call) ? plan_of(call) : Plan::Python;
  if (plan != Plan::Python) {
    return planned(plan, call);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::scaled_dot_product_attention", "")
                             .typed<decltype(attention)>();
  return op.redispatch(kInPython, query, key, value, mask, dropout, causal, scale, grouped);
}

// As the CPU composes it.
at::Tensor dropout(const at::Tensor& tensor, double p, bool train) {
  if (p > 0 && p < 1 && train && is_usual_operand(tensor) && tensor.numel() != 0) {
    return tensor.mul(at::empty_like(tensor).bernoulli_(1 - p).div_(1 - p));
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::dropout", "").typed<decltype(dropout)>();
  return op.redispatch(kInPython, tensor, p, train);
}

void remember_plan(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const MaybeTensor& mask, double p,
    bool causal, std::optional<double> scale, bool grouped, int plan) {
  const Attention call{query, key, value, mask, p, causal, scale, grouped};
  if (!is_usual_attention(call)) {
    return;
  }
  Plans& all = plans();
  const std::lock_guard<std::mutex> guard(all.mutex);
  if (all.known.size() >= kMostPlans) {
    all.known.clear();
  }
  all.known[key_of(call)] = static_cast<Plan>(plan);
}

void register_attention() {
  // Never destroyed, as the one of the device's kernels.
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
  constexpr auto kKey = c10::DispatchKey::AutogradPrivateUse1;
  library->impl("aten::scaled_dot_product_attention", torch::dispatch(kKey, &attention));
  library->impl("aten::dropout", torch::dispatch(kKey, &dropout));
}

}  // namespace

void bind_attention(py::module_& module) {
  module.def(
      "register_attention", &register_attention,
      "Register them. What is not known goes to the kernels that Python has registered under AutogradPrivateUse2.");
  module.def("remember_attention", &remember_plan);
}

}  // namespace torch_ltc
