// The device guard: PyTorch holds one around every call on a tensor of the device. A process has one device with one
// stream, so that nothing is ever switched.

#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>

#include "device.h"
#include "native.h"

namespace torch_ltc {
namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return lazy_device(); }
  c10::Device getDevice() const override { return lazy_device(); }
  void setDevice(c10::Device chosen) const override {
    TORCH_CHECK(chosen.type() == kType && is_own(chosen.index()), no_device(chosen.index()));
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return index_count; }
  // Kernels are the physical device's: every dtype is there.
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, lazy_device()); }
};

// Autograd's engine counts the devices at the first backward pass, and makes a thread for each.
struct StartedEngine : torch::autograd::Engine {
  // Has one that found none before count again.
  static void count_devices() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    const auto pool = &StartedEngine::thread_pool_shared_;
    const auto queues = &StartedEngine::device_ready_queues_;
    const auto start = &StartedEngine::start_device_threads;
    if (engine.*pool != nullptr && (engine.*queues).empty()) {
      (engine.*start)();
    }
  }
};

}  // namespace

void bind_guard(py::module_& module) {
  module.def(
      "register_guard",
      [] {
        // The registry keeps what it is given for as long as the process runs.
        static const Guard guard;
        c10::impl::DeviceGuardImplRegistrar registrar(kType, &guard);
      },
      "Make the guard the device's, in place of one that was there before.");
  module.def(
      "count_devices",
      &StartedEngine::count_devices,
      py::call_guard<py::gil_scoped_release>(),
      "Give the device its thread in autograd's engine, if backward passes have run before there was the device.");
}

}  // namespace torch_ltc
