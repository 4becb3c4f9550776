// Storages of the device: each holds a buffer in the place of memory.

#include "buffer.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include "device.h"
#include "storage.h"

namespace torch_ltc {
namespace {

bool is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// The end of a storage, on any thread, with or without the GIL; never with the recorder's lock held but not the GIL.
void end_of_storage(void* context) {
  auto* buffer = static_cast<Buffer*>(context);
  // At the end of the process other threads do not get the GIL any more: what is left then is not freed.
  if (buffer->holders.fetch_sub(1) == 1 && buffer->python.load() != nullptr && (PyGILState_Check() || !is_ending())) {
    PyGILState_STATE state = PyGILState_Ensure();
    release_python(*buffer);
    PyGILState_Release(state);
  }
  BufferPtr::reclaim(buffer).reset();
}

}  // namespace

void release_python(Buffer& buffer) {
  if (buffer.holders.load() == 0) {
    PyObject* python = buffer.python.exchange(nullptr);
    Py_XDECREF(python);
  }
}

namespace {

// From as many views on they are found by their hashes.
constexpr size_t kMany = 32;

size_t hash_of(int64_t offset, c10::IntArrayRef sizes) {
  auto hash = static_cast<size_t>(offset);
  for (const int64_t size : sizes) {
    hash = hash * 1000003 + static_cast<size_t>(size);
  }
  return hash;
}

}  // namespace

template <typename Is>
const Views::View* Views::look(size_t hash, const Is& is) const {
  if (by_hash_ == nullptr) {
    for (auto view = views_.rbegin(); view != views_.rend(); ++view) {
      if (is(*view->first)) {
        return &*view;
      }
    }
    return nullptr;
  }
  const auto [begin, end] = by_hash_->equal_range(hash);
  for (auto place = begin; place != end; ++place) {
    if (is(*views_[place->second].first)) {
      return &views_[place->second];
    }
  }
  return nullptr;
}

int64_t Views::find(const c10::TensorImpl& tensor) const {
  const size_t hash = by_hash_ == nullptr ? 0 : hash_of(tensor.storage_offset(), tensor.sizes());
  const View* found = look(hash, [&](const Spec& spec) { return spec.matches(tensor); });
  return found == nullptr ? -1 : found->second;
}

int64_t Views::find(const Spec* wanted) const {
  const View* found = look(hash_of(wanted->offset, wanted->size), [&](const Spec& spec) { return &spec == wanted; });
  return found == nullptr ? -1 : found->second;
}

void Views::put(const SpecPtr& seen, int64_t value) {
  const size_t hash = hash_of(seen->offset, seen->size);
  const View* found = look(hash, [&](const Spec& spec) { return &spec == seen.get(); });
  if (found != nullptr) {
    const_cast<View*>(found)->second = value;
    return;
  }
  views_.emplace_back(seen, value);
  if (by_hash_ != nullptr) {
    by_hash_->emplace(hash, views_.size() - 1);
  } else if (views_.size() > kMany) {
    by_hash_ = std::make_unique<std::unordered_multimap<size_t, size_t>>();
    for (size_t i = 0; i < views_.size(); ++i) {
      by_hash_->emplace(hash_of(views_[i].first->offset, views_[i].first->size), i);
    }
  }
}

void Views::drop_from(int64_t value) {
  if (views_.empty() || views_.back().second < value) {
    return;
  }
  by_hash_.reset();
  while (!views_.empty() && views_.back().second >= value) {
    views_.pop_back();
  }
}

// Views first: after a resize, the tensor is one although it may look like the value that defines the buffer.
int64_t Buffer::value_of(const c10::TensorImpl& tensor, int64_t base) const {
  const int64_t found = views_base == base ? views.find(tensor) : -1;
  if (found >= 0) {
    return found;
  }
  return number >= base && spec && spec->matches(tensor) ? number : -1;
}

int64_t Buffer::value_of(const Spec* wanted, int64_t base) const {
  const int64_t found = views_base == base ? views.find(wanted) : -1;
  if (found >= 0) {
    return found;
  }
  return number >= base && spec.get() == wanted ? number : -1;
}

void Buffer::remember_view(const SpecPtr& seen, int64_t base, int64_t value) {
  if (views_base != base) {
    views.clear();
    views_base = base;
  }
  views.put(seen, value);
}

Buffer* buffer_of(const c10::Storage& storage) {
  const c10::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &end_of_storage ? static_cast<Buffer*>(data.get_context()) : nullptr;
}

void hold(const c10::Storage& storage, const BufferPtr& buffer) {
  buffer->holders.fetch_add(1);
  BufferPtr held = buffer;
  c10::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  data = c10::DataPtr(data.get(), held.release(), &end_of_storage, lazy_device());
}

at::Tensor new_tensor(const BufferPtr& buffer, const Spec& spec, size_t size_bytes) {
  buffer->holders.fetch_add(1);
  BufferPtr held = buffer;
  c10::Storage storage = make_storage(size_bytes, held.release(), &end_of_storage);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), spec.dtype);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (spec.contiguous) {
    impl->set_sizes_contiguous(spec.size);
  } else {
    impl->set_sizes_and_strides(spec.size, spec.stride, spec.offset);
  }
  return tensor;
}

namespace {

std::atomic<int64_t> unseen{0};
// The most since it was asked for.
std::atomic<int64_t> most_unseen{0};

}  // namespace

int64_t unseen_bytes() { return unseen.load(); }

int64_t take_most_unseen_bytes() { return most_unseen.exchange(unseen.load()); }

void Buffer::set_data(at::Tensor made) {
  if (data.defined()) {
    unseen.fetch_sub(static_cast<int64_t>(data.storage().nbytes()));
  }
  data = std::move(made);
  if (data.defined()) {
    const auto size_bytes = static_cast<int64_t>(data.storage().nbytes());
    const int64_t now = unseen.fetch_add(size_bytes) + size_bytes;
    int64_t most = most_unseen.load();
    while (now > most && !most_unseen.compare_exchange_weak(most, now)) {
    }
  }
}

at::Tensor new_tensor(at::Tensor data) {
  auto buffer = c10::make_intrusive<Buffer>();
  Buffer* made = buffer.get();
  made->computed = true;
  made->holders.store(1, std::memory_order_relaxed);
  const c10::TensorImpl& like = *data.unsafeGetTensorImpl();
  c10::Storage storage = make_storage(like.unsafe_storage().nbytes(), buffer.release(), &end_of_storage);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made->set_data(std::move(data));
  return tensor;
}

at::Tensor view_tensor(const at::Tensor& base, const Spec& spec) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), base.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(spec.size, spec.stride, spec.offset);
  return tensor;
}

}  // namespace torch_ltc
