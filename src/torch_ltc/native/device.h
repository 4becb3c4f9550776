// The device, and the physical one that its programs run on.

#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <string>

namespace torch_ltc {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

// The number of this process's device among those of the machine, and how many these are.
extern std::atomic<c10::DeviceIndex> own_index;
extern std::atomic<c10::DeviceIndex> index_count;

// The device of this process.
inline c10::Device lazy_device() { return {kType, own_index.load(std::memory_order_relaxed)}; }

// True for an index that names this process's device; a negative one names whichever there is.
inline bool is_own(c10::DeviceIndex index) { return index < 0 || index == own_index.load(std::memory_order_relaxed); }

// The text of the error for an index that does not.
std::string no_device(c10::DeviceIndex index);

// The device that programs run on, as the settings have it.
c10::Device physical_device();

// Say where the default generator is.
void place_default_generator();

// A generator of the device with a physical one behind it, seeded as PyTorch seeds a new generator.
at::Generator new_generator();

// The generator that the device's random operators draw from when they are given none.
const at::Generator& default_generator();

}  // namespace torch_ltc
