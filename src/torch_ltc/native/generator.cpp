// Generators of the device. One that the user makes has a physical generator behind it, and random operators draw from
// that. The default one is the device's own: its state is read and set in the order of the program, which Python does.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/GeneratorImpl.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <mutex>
#include <utility>

#include "device.h"
#include "native.h"

namespace torch_ltc {
namespace {

c10::DispatchKeySet device_keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

at::Generator new_physical_generator() {
  const c10::Device device = physical_device();
  if (device.is_cpu()) {
    return at::detail::createCPUGenerator();
  }
  return at::globalContext().getAcceleratorHooksInterface(device.type()).getNewGenerator(device.index());
}

// A generator of the user's. Whoever calls it holds its own mutex; kernels hold that of the physical one.
struct UserGenerator final : c10::GeneratorImpl {
  explicit UserGenerator(at::Generator generator)
      : c10::GeneratorImpl(lazy_device(), device_keys()), physical(std::move(generator)) {}

  void set_current_seed(uint64_t seed) override {
    const std::scoped_lock lock(physical.mutex());
    physical.set_current_seed(seed);
  }
  // Generators of the CPU have no offset, which counts what others have drawn: pickling asks for it all the same.
  void set_offset(uint64_t offset) override {
    const std::scoped_lock lock(physical.mutex());
    if (!physical.device().is_cpu()) {
      physical.set_offset(offset);
    }
  }
  uint64_t get_offset() const override { return physical.device().is_cpu() ? 0 : physical.get_offset(); }
  uint64_t current_seed() const override { return physical.current_seed(); }
  uint64_t seed() override {
    const std::scoped_lock lock(physical.mutex());
    return physical.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    const std::scoped_lock lock(physical.mutex());
    physical.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return physical.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator physical;

 private:
  UserGenerator* clone_impl() const override { return new UserGenerator(physical.clone()); }
};

// The device's own generator, through the functions of `torch.ltc`.
struct DefaultGenerator final : c10::GeneratorImpl {
  DefaultGenerator() : c10::GeneratorImpl(lazy_device(), device_keys()) {}

  void place() { device_ = lazy_device(); }
  void set_current_seed(uint64_t seed) override { call<void>("manual_seed", seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the generator of ltc has no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return call<uint64_t>("initial_seed"); }
  uint64_t seed() override { return call<uint64_t>("seed"); }
  void set_state(const c10::TensorImpl& state) override {
    const py::gil_scoped_acquire gil;
    auto* shared = const_cast<c10::TensorImpl*>(&state);
    const at::Tensor tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(shared));
    call<void>("set_rng_state", py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const py::gil_scoped_acquire gil;
    const auto state = call<py::object>("get_rng_state");
    return THPVariable_Unpack(state.ptr()).getIntrusivePtr();
  }

 private:
  template <typename Result, typename... Arguments>
  static Result call(const char* function, Arguments&&... arguments) {
    const py::gil_scoped_acquire gil;
    py::object result = py::module_::import("torch.ltc").attr(function)(std::forward<Arguments>(arguments)...);
    if constexpr (!std::is_void_v<Result>) {
      return result.template cast<Result>();
    }
  }
  // What is cloned goes its own way from the state that the device has now.
  GeneratorImpl* clone_impl() const override {
    auto* clone = new UserGenerator(new_physical_generator());
    clone->set_state(*get_state());
    return clone;
  }
};

py::object physical_generator(const py::object& generator) {
  auto* found = THPGenerator_Unwrap(generator.ptr()).unsafeGetGeneratorImpl();
  if (auto* user = dynamic_cast<UserGenerator*>(found)) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(user->physical));
  }
  return dynamic_cast<DefaultGenerator*>(found) != nullptr ? py::none() : generator;
}

}  // namespace

at::Generator new_generator() { return at::make_generator<UserGenerator>(new_physical_generator()); }

const at::Generator& default_generator() {
  // Never destroyed: PyTorch may ask for it while the process ends.
  static const auto& generator = *new at::Generator(at::make_generator<DefaultGenerator>());
  return generator;
}

void place_default_generator() {
  static_cast<DefaultGenerator*>(default_generator().unsafeGetGeneratorImpl())->place();
}

void bind_generator(py::module_& module) {
  module.def("physical_generator", &physical_generator, py::arg("generator"),
             "The generator that kernels draw from for this one; None for the device's own.");
  module.def(
      "default_generator",
      [] { return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator())); },
      "The device's own generator.");
}

}  // namespace torch_ltc
