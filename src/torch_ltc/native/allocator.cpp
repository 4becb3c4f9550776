// The device's allocator. Memory is the physical device's, and comes when a program runs; what is allocated here are
// ranges of numbers, so that libraries which compare pointers find out which tensors share memory, and where.

#include <c10/core/Allocator.h>
#include <torch/csrc/Storage.h>

#include <atomic>
#include <cstdint>

#include "device.h"
#include "native.h"
#include "storage.h"

namespace torch_ltc {
namespace {

// Addresses begin where no memory of a process is. The numbers start again after 2^61 bytes, which takes years.
constexpr uint64_t kFirst = uint64_t{1} << 62;
constexpr uint64_t kRange = uint64_t{1} << 61;
constexpr uint64_t kAlignment = 64;
std::atomic<uint64_t> next_offset{0};

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    return {reserve_address(size_bytes), lazy_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::detail::deleteNothing; }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "nothing can be copied from the address of a storage of ltc: copy tensors");
  }
};

// Never destroyed: storages may outlive whatever the process destroys at its end.
Allocator& allocator() {
  static auto& made = *new Allocator();
  return made;
}

}  // namespace

void* reserve_address(size_t size_bytes) {
  const uint64_t rounded = (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const uint64_t offset = next_offset.fetch_add(rounded, std::memory_order_relaxed) % kRange;
  // An empty storage has no address, as on the CPU.
  return size_bytes == 0 ? nullptr : reinterpret_cast<void*>(kFirst + offset);
}

c10::Storage make_storage(size_t size_bytes, void* context, c10::DeleterFnPtr end) {
  c10::DataPtr address(reserve_address(size_bytes), context, end, lazy_device());
  return c10::Storage(c10::Storage::use_byte_size_t(), size_bytes, std::move(address), &allocator(), true);
}

void grow_storage(const c10::Storage& storage, size_t size_bytes) {
  c10::StorageImpl* found = storage.unsafeGetStorageImpl();
  if (size_bytes > found->nbytes()) {
    c10::DataPtr& pointer = found->_mutable_data_ptr_no_checks();
    const c10::DeleterFnPtr deleter = pointer.get_deleter();
    void* context = pointer.release_context();
    pointer = c10::DataPtr(reserve_address(size_bytes), context, deleter, lazy_device());
    found->set_nbytes(size_bytes);
  }
}

bool is_own_storage(const c10::Storage& storage) { return storage.allocator() == &allocator(); }

void bind_allocator(py::module_& module) {
  module.def(
      "register_allocator", [] { c10::SetAllocator(kType, &allocator()); }, "Make the allocator the device's.");
  module.def(
      "grow_storage",
      [](const py::object& storage, size_t size_bytes) { grow_storage(THPStorage_Unpack(storage.ptr()), size_bytes); },
      py::arg("storage"), py::arg("size_bytes"), "Make a storage at least this large.");
  module.def(
      "is_own_storage", [](const py::object& storage) { return is_own_storage(THPStorage_Unpack(storage.ptr())); },
      py::arg("storage"), "True for a storage that the device's allocator has made.");
}

}  // namespace torch_ltc
