// The device guard: PyTorch holds one around every call on a tensor of the device. A process has one device with one
// stream, so that nothing is ever switched.

#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

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
}

}  // namespace torch_ltc
