// The device's hooks: what PyTorch's C++ side asks of every accelerator.

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <atomic>
#include <string>

#include "device.h"
#include "native.h"

namespace torch_ltc {
namespace {

// Type and index in one number: read by any thread, written when a setting changes.
std::atomic<uint32_t> physical{0};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex index) const override { check(index); }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    check(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return lazy_device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    check(index);
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    check(index);
    return new_generator();
  }
  // Host memory that the physical device copies from without a detour.
  bool isPinnedPtr(const void* data) const override {
    return !physical_device().is_cpu() && physical_hooks().isPinnedPtr(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(!physical_device().is_cpu(), "pinned memory is for devices other than the CPU");
    return physical_hooks().getPinnedMemoryAllocator();
  }

 private:
  static void check(c10::DeviceIndex index) {
    TORCH_CHECK(index <= 0, "there is no device ltc:", static_cast<int>(index), ": torch_ltc has one device, ltc:0");
  }
  static const at::AcceleratorHooksInterface& physical_hooks() {
    return at::globalContext().getAcceleratorHooksInterface(physical_device().type());
  }
};

}  // namespace

c10::Device physical_device() {
  const uint32_t packed = physical.load(std::memory_order_relaxed);
  const auto index = static_cast<c10::DeviceIndex>(static_cast<int>(packed & 0xff) - 1);
  return {static_cast<c10::DeviceType>(packed >> 8), index};
}

void bind_hooks(py::module_& module) {
  physical = 0;
  module.def(
      "register_hooks",
      [] {
        // PyTorch keeps the pointer for as long as the process runs.
        static Hooks hooks;
        at::RegisterPrivateUse1HooksInterface(&hooks);
      },
      "Register the device's hooks; raises when another package has registered its own.");
  module.def(
      "set_physical_device",
      [](const std::string& name) {
        const c10::Device device(name);
        physical = static_cast<uint32_t>(device.type()) << 8 | static_cast<uint32_t>(device.index() + 1);
      },
      py::arg("name"), "Say which device programs run on.");
}

}  // namespace torch_ltc
