// Storages of the device: their size is what it would be on any device, their addresses are numbers to compare.

#pragma once

#include <c10/core/Storage.h>

namespace torch_ltc {

// A pointer to `size_bytes` that no other storage has. Nothing is there: following it ends the process.
c10::DataPtr reserve_address(size_t size_bytes);

// A storage of this size. Its state is Python's, or that of whoever replaces the context of its pointer.
c10::Storage make_storage(size_t size_bytes);

// Give a storage this size, and a new address if it is larger than before.
void grow_storage(const c10::Storage& storage, size_t size_bytes);

// True for a storage that the device's allocator has made, and not somebody who had an address.
bool is_own_storage(const c10::Storage& storage);

}  // namespace torch_ltc
