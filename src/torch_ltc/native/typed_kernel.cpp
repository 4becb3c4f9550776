// Kernels that take their arguments as callers in C++ have them, for the signatures that most calls have. A boxed kernel
// holds its tensors, and to hold a tensor that Python has may take the GIL; here they are borrowed.

#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/op_registration/infer_schema.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "eager.h"
#include "kernel.h"
#include "reads.h"

namespace torch_ltc {
namespace {

using at::Tensor;
constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

Tensor borrow(const Tensor& tensor) { return c10::MaybeOwnedTraits<Tensor>::createBorrow(tensor); }

template <class T>
c10::IValue borrowed(const T& value) {
  return c10::IValue(value);
}

c10::IValue borrowed(const Tensor& tensor) { return c10::IValue(borrow(tensor)); }

c10::IValue borrowed(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? borrowed(*tensor) : c10::IValue();
}

c10::IValue borrowed(const at::OptionalIntArrayRef& numbers) {
  return numbers.has_value() ? c10::IValue(*numbers) : c10::IValue();
}

c10::IValue borrowed(const at::TensorList& tensors) {
  c10::List<Tensor> list;
  list.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    list.push_back(borrow(tensor));
  }
  return c10::IValue(std::move(list));
}

// Arguments of a call. What is borrowed is given back at the end, and not counted down.
template <size_t N>
struct Arguments {
  std::array<c10::IValue, N> values;

  ~Arguments() {
    for (c10::IValue& value : values) {
      if (value.isTensor()) {
        std::move(value).toTensor().unsafeReleaseTensorImpl();
      } else if (value.isTensorList()) {
        auto list = value.toTensorList();
        for (size_t i = 0; i < list.size(); ++i) {
          list.extract(i).unsafeReleaseTensorImpl();
        }
      }
    }
  }
};

template <class... Items, size_t... places>
std::tuple<Items...> taken(c10::IValue* values, std::tuple<Items...>*, std::index_sequence<places...>) {
  return {std::move(values[places]).to<Items>()...};
}

template <class Result>
Result taken(c10::IValue* values, Result*, std::index_sequence<0>) {
  return std::move(values[0]).to<Result>();
}

// What stands for an argument on the physical device, for the length of a call in an eager region.
template <class T>
struct Physical {
  explicit Physical(const T& given) : value(given) {}
  const T& value;
  bool find(const T&, EagerOperands&, bool) { return true; }
};

template <>
struct Physical<Tensor> {
  explicit Physical(const Tensor&) {}
  Tensor value;
  bool find(const Tensor& given, EagerOperands& found, bool may_be_foreign) {
    return found.add(given, may_be_foreign, value);
  }
};

template <>
struct Physical<std::optional<Tensor>> {
  explicit Physical(const std::optional<Tensor>&) {}
  std::optional<Tensor> value;
  bool find(const std::optional<Tensor>& given, EagerOperands& found, bool) {
    return !given || found.add(*given, false, value.emplace());
  }
};

template <>
struct Physical<at::TensorList> {
  explicit Physical(const at::TensorList&) {}
  std::vector<Tensor> value;
  bool find(const at::TensorList& given, EagerOperands& found, bool) {
    value.resize(given.size());
    for (size_t i = 0; i < given.size(); ++i) {
      if (!given[i].defined() || !found.add(given[i], false, value[i])) {
        return false;
      }
    }
    return true;
  }
};

template <>
struct Physical<std::optional<at::Device>> {
  explicit Physical(const std::optional<at::Device>&) {}
  std::optional<at::Device> value;
  bool find(const std::optional<at::Device>& given, EagerOperands& found, bool copies) {
    value = given;
    return found.place(value, copies);
  }
};

// It says whether memory is pinned, which is nothing to the device.
template <>
struct Physical<std::optional<bool>> {
  explicit Physical(const std::optional<bool>&) {}
  std::optional<bool> value;
  bool find(const std::optional<bool>&, EagerOperands&, bool) { return true; }
};

// True where the device has something in place of each result, which is put there.
bool wrap(EagerOperands& found, Tensor& result) {
  const bool defined = result.defined();
  result = found.wrap(std::move(result));
  return !defined || result.defined();
}

bool wrap(EagerOperands&, at::Scalar&) { return true; }

bool wrap(EagerOperands& found, std::vector<Tensor>& results) {
  found.several = true;
  return std::all_of(results.begin(), results.end(), [&](Tensor& result) { return wrap(found, result); });
}

template <class... Items>
bool wrap(EagerOperands& found, std::tuple<Items...>& results) {
  found.several = true;
  return std::apply([&](Items&... items) { return (wrap(found, items) && ...); }, results);
}

template <class T>
struct Count : std::integral_constant<size_t, 1> {};
template <class... Items>
struct Count<std::tuple<Items...>> : std::integral_constant<size_t, sizeof...(Items)> {};

template <class Signature>
struct Typed;

template <class Result, class... Parameters>
struct Typed<Result(Parameters...)> {
  // Nothing is returned, or what is written: the first argument.
  static constexpr bool kWrites = std::is_void_v<Result> || std::is_lvalue_reference_v<Result>;

  Operator* op;
  c10::TypedOperatorHandle<Result(Parameters...)> handle;

  Result operator()(Parameters... parameters) const {
    const bool at_once = eager_region().on() && op->versions.empty() && eager_region().may_run(*op);
    if constexpr (kWrites) {
      if (!(at_once && run(static_cast<void*>(nullptr), parameters...)) && !hit(nullptr, parameters...)) {
        python(parameters...);
      }
      if constexpr (!std::is_void_v<Result>) {
        return std::get<0>(std::tie(parameters...));
      }
    } else {
      constexpr std::make_index_sequence<Count<Result>::value> places{};
      if (at_once) {
        Result result;
        if (run(&result, parameters...)) {
          return result;
        }
      }
      Values returned;
      if (hit(&returned, parameters...)) {
        return taken(returned.data(), static_cast<Result*>(nullptr), places);
      }
      if constexpr (std::is_same_v<Result, at::Scalar> && sizeof...(Parameters) == 1) {
        if (op->reads) {
          if (const auto number = read_at_once(parameters...)) {
            return *number;
          }
        }
      }
      torch::jit::Stack stack = python(parameters...);
      return taken(stack.data(), static_cast<Result*>(nullptr), places);
    }
  }

 private:
  // Run the call in an eager region; false when it is to be recorded.
  template <class Into, class... Given>
  bool run(Into* result, const Given&... given) const {
    EagerOperands found;
    std::tuple<Physical<Given>...> physical{Physical<Given>(given)...};
    {
      Locked locked(recorder().lock);
      if (!eager_region().is_undisturbed() || !resolve(found, physical, std::index_sequence_for<Given...>{}, given...)) {
        return false;
      }
      eager_region().note_call(op->reads || found.reads);
    }
    const auto call = [&](auto&... at_hand) -> Result { return handle.redispatch(kCpu, at_hand.value...); };
    if constexpr (kWrites) {
      const EagerRegion::Running running(eager_region());
      std::apply(call, physical);
      return true;
    } else {
      {
        const EagerRegion::Running running(eager_region());
        *result = std::apply(call, physical);
      }
      const bool wrapped = wrap(found, *result);
      // A layout that the device has not: Python does the call, of which nothing is left.
      TORCH_CHECK(wrapped || !op->random, op->name, ": its result is no plain tensor");
      return wrapped;
    }
  }

  template <class Rooms, size_t... places, class... Given>
  bool resolve(EagerOperands& found, Rooms& physical, std::index_sequence<places...>, const Given&... given) const {
    // In the order of the arguments: what a device is found for comes before it.
    return (std::get<places>(physical).find(given, found, op->copies && !op->writes[places]) && ...);
  }

  template <class... Given>
  bool hit(Values* returned, const Given&... given) const {
    if (op->python_only) {
      return false;
    }
    const Arguments<sizeof...(Given)> arguments{{borrowed(given)...}};
    return take_call(*op, arguments.values.data(), returned);
  }

  template <class... Given>
  torch::jit::Stack python(const Given&... given) const {
    auto stack = c10::impl::boxArgs<const Given&...>(given...);
    op->handle.redispatchBoxed(kPython, &stack);
    return stack;
  }
};

// True for an overload that writes to its first argument and to nothing else.
bool writes_first(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto is_written = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  return !arguments.empty() && is_written(arguments[0]) &&
      std::none_of(arguments.begin() + 1, arguments.end(), is_written);
}

// Some overloads have other references in C++ than their schema says.
template <class Signature>
bool is_called_so(const c10::OperatorHandle& handle) {
  try {
    handle.typed<Signature>();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

template <class Signature>
bool make(const c10::FunctionSchema& real, Operator* op, std::optional<torch::CppFunction>& made) {
  using Kernel = Typed<Signature>;
  static const auto inferred = c10::detail::inferFunctionSchemaFromFunctor<Kernel>()->cloneWithRealTypes();
  const bool fits = real.arguments().size() == inferred.arguments().size() &&
      real.returns().size() == inferred.returns().size() && !c10::findSchemaDifferences(inferred, real) &&
      is_called_so<Signature>(op->handle);
  if (fits) {
    made.emplace(Kernel{op, op->handle.typed<Signature>()});
  }
  return fits;
}

template <class... Signatures>
std::optional<torch::CppFunction> make_first(const c10::FunctionSchema& real, Operator* op) {
  std::optional<torch::CppFunction> made;
  (make<Signatures>(real, op, made) || ...);
  return made;
}

using T = const Tensor&;
using Maybe = const std::optional<Tensor>&;
using List = at::TensorList;
using S = const at::Scalar&;
using Scalars = at::ArrayRef<at::Scalar>;
using Ints = at::IntArrayRef;
using Axis = std::optional<int64_t>;
using Dims = at::OptionalIntArrayRef;
using Dtype = std::optional<at::ScalarType>;
using Where = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Pinned = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;
using Made = std::vector<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

}  // namespace

std::optional<torch::CppFunction> typed_kernel(Operator* op) {
  const c10::FunctionSchema& schema = op->handle.schema();
  const c10::FunctionSchema real = schema.cloneWithRealTypes(/*with_symint=*/false);
  if (!schema.is_mutable()) {
    return make_first<
        Tensor(T), Tensor(T, T), Tensor(T, T, T), Tensor(T, T, S), Tensor(T, S), Tensor(T, S, S), Tensor(T, T, T, S),
        Tensor(T, T, T, S, S), Tensor(T, T, Maybe), Tensor(T, Ints), Tensor(T, Ints, bool), Tensor(T, Ints, Ints),
        Tensor(T, int64_t), Tensor(T, int64_t, int64_t), Tensor(T, int64_t, bool), Tensor(T, T, int64_t, at::ScalarType),
        Tensor(T, Format), Tensor(T, c10::string_view), Tensor(T, T, c10::string_view),
        Tensor(T, Dtype), Tensor(T, Dims, bool, Dtype),
        Tensor(T, int64_t, std::optional<int64_t>, std::optional<int64_t>, int64_t),
        Tensor(T, Ints, int64_t, int64_t), Tensor(T, Ints, int64_t, int64_t, int64_t, int64_t),
        Tensor(T, T, int64_t, bool, bool), Tensor(T, T, int64_t, int64_t, bool), Three(T, T, T, std::array<bool, 3>),
        at::Scalar(T), Tensor(T, Axis, bool), Tensor(T, T, int64_t), Tensor(T, T, T, int64_t), Tensor(List, int64_t),
        Tensor(T, T, int64_t, double), Tensor(T, T, T, int64_t, double), Made(T, int64_t), Made(T, int64_t, int64_t),
        Two(T, T, Maybe, int64_t, int64_t), Tensor(T, T, T, Maybe, int64_t, int64_t, T),
        Tensor(T, T, Maybe, Ints, Ints, Ints, bool, Ints, int64_t), Two(T, Ints, Ints, Ints, Ints, bool),
        Two(T, T, T, double, bool, Maybe, std::optional<double>),
        Tensor(T, Dtype, Where, Device, Pinned, Format), Tensor(T, S, Dtype, Where, Device, Pinned, Format),
        Tensor(T, Dtype, Where, Device, Pinned, bool, Format), Tensor(Ints, Dtype, Where, Device, Pinned),
        Tensor(Ints, S, Dtype, Where, Device, Pinned),
        Three(T, Maybe, Maybe, Maybe, Maybe, bool, double, double),
        Two(T, T, T, std::array<bool, 2>), Three(T, Ints, Maybe, Maybe, double),
        Three(T, T, Ints, T, T, Maybe, Maybe, std::array<bool, 3>), Made(List), Made(List, S), Made(List, List),
        Made(List, List, S), Made(List, Scalars)>(real, op);
  }
  if (!writes_first(schema)) {
    return std::nullopt;
  }
  if (schema.returns().empty()) {
    return make_first<
        void(List), void(List, S), void(List, T), void(List, List), void(List, List, S), void(List, List, List, S),
        void(List, Scalars), void(List, List, Scalars), void(List, List, List, Scalars)>(real, op);
  }
  return make_first<
      Tensor&(Tensor&), Tensor&(Tensor&, T), Tensor&(Tensor&, S), Tensor&(Tensor&, T, S), Tensor&(Tensor&, T, bool),
      Tensor&(Tensor&, T, T, S)>(real, op);
}

}  // namespace torch_ltc
