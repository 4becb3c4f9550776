// The device, and the physical one that its programs run on.

#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace torch_ltc {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

// The only device, ltc:0.
inline c10::Device lazy_device() { return {kType, 0}; }

// The device that programs run on, as the settings have it.
c10::Device physical_device();

// A generator of the device with a physical one behind it, seeded as PyTorch seeds a new generator.
at::Generator new_generator();

// The generator that the device's random operators draw from when they are given none.
const at::Generator& default_generator();

}  // namespace torch_ltc
