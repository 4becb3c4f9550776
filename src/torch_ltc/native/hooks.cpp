// The device's hooks: what PyTorch's C++ side asks of every accelerator.

#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_set>

#include "device.h"
#include "native.h"

namespace torch_ltc {
namespace {

// Type and index in one number: read by any thread, written when a setting changes.
std::atomic<uint32_t> physical{0};

// Host memory that counts as pinned where programs run on the CPU: nothing is to be gained by pinning there, but callers
// (DDP's reducer) ask for it, and check that they got it.
class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(size));
    const std::lock_guard<std::mutex> guard(lock());
    blocks().insert(memory->get());
    return {memory->get(), memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

  static bool holds(const void* data) {
    const std::lock_guard<std::mutex> guard(lock());
    return blocks().count(data) != 0;
  }

 private:
  static void release(void* context) {
    auto* memory = static_cast<c10::DataPtr*>(context);
    {
      const std::lock_guard<std::mutex> guard(lock());
      blocks().erase(memory->get());
    }
    delete memory;
  }
  // Never destroyed: tensors may outlive static objects.
  static std::mutex& lock() {
    static auto* made = new std::mutex;
    return *made;
  }
  static std::unordered_set<const void*>& blocks() {
    static auto* made = new std::unordered_set<const void*>;
    return *made;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return index_count; }
  void setCurrentDevice(c10::DeviceIndex index) const override { check(index); }
  c10::DeviceIndex getCurrentDevice() const override { return own_index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    check(index);
    return own_index;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return own_index; }
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
    return physical_device().is_cpu() ? HostAllocator::holds(data) : physical_hooks().isPinnedPtr(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static HostAllocator host;
    return physical_device().is_cpu() ? &host : physical_hooks().getPinnedMemoryAllocator();
  }

 private:
  static void check(c10::DeviceIndex index) { TORCH_CHECK(is_own(index), no_device(index)); }
  static const at::AcceleratorHooksInterface& physical_hooks() {
    return at::globalContext().getAcceleratorHooksInterface(physical_device().type());
  }
};

}  // namespace

std::atomic<c10::DeviceIndex> own_index{0};
std::atomic<c10::DeviceIndex> index_count{1};

// One string: a stream of this library may be of another C++ runtime than PyTorch's, and end the process.
std::string no_device(c10::DeviceIndex index) {
  return "there is no device ltc:" + std::to_string(index) + ": torch_ltc has one device, ltc:" +
      std::to_string(own_index.load()) + ", in each process";
}

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
  module.def(
      "set_ordinal",
      [](int index, int count) {
        own_index = static_cast<c10::DeviceIndex>(index);
        index_count = static_cast<c10::DeviceIndex>(count);
        place_default_generator();
      },
      py::arg("index"), py::arg("count"), "Say which of the machine's devices is this process's.");
}

}  // namespace torch_ltc
