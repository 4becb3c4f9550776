// Storages of the device: their size is what it would be on any device, their addresses are numbers to compare.

#pragma once

#include <c10/core/Storage.h>
#include <c10/util/UniqueVoidPtr.h>

namespace torch_ltc {

// A pointer to `size_bytes` that no other storage has. Nothing is there: following it ends the process.
void* reserve_address(size_t size_bytes);

// A storage of this size, with the state that its end hands to `end`.
c10::Storage make_storage(
    size_t size_bytes, void* context = nullptr, c10::DeleterFnPtr end = &c10::detail::deleteNothing);

// Give a storage this size, and a new address if it is larger than before.
void grow_storage(const c10::Storage& storage, size_t size_bytes);

// True for a storage that the device's allocator has made, and not somebody who had an address.
bool is_own_storage(const c10::Storage& storage);

}  // namespace torch_ltc
