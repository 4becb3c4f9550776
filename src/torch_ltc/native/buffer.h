// Specs, and the buffers behind storages of the device, as the hit path sees them.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_ltc {

// Everything about a tensor but its memory. One per `Spec` of Python, which holds it and which it points to.
struct Spec final : c10::intrusive_ptr_target {
  caffe2::TypeMeta dtype;
  // In place, as all that a hit reads: each step outside of it may be one to memory that is not in the cache.
  c10::SmallVector<int64_t, 5> size;
  c10::SmallVector<int64_t, 5> stride;
  int64_t offset = 0;
  bool conj = false;
  bool neg = false;
  bool contiguous = false;
  // Bytes from the beginning of the storage that it reaches.
  size_t size_bytes = 0;
  // Held. Both die together, with the GIL held: see `native_specs` in Python.
  PyObject* python = nullptr;

  ~Spec() override { Py_XDECREF(python); }

  bool matches(const c10::TensorImpl& tensor) const {
    return tensor.dtype() == dtype && tensor.storage_offset() == offset && tensor.sizes() == c10::IntArrayRef(size) &&
        tensor.strides() == c10::IntArrayRef(stride) && tensor.is_conj() == conj && tensor.is_neg() == neg;
  }
};

using SpecPtr = c10::intrusive_ptr<Spec>;

// Values that are one buffer seen as some spec, the latest last. Where there are many, as after `unbind`, they are found
// by a hash of offset and sizes.
class Views {
 public:
  using View = std::pair<SpecPtr, int64_t>;

  // The value of the view that a tensor is, or that has this spec; -1 where there is none.
  int64_t find(const c10::TensorImpl& tensor) const;
  int64_t find(const Spec* wanted) const;
  void put(const SpecPtr& seen, int64_t value);
  // Take those away that have this number or a later one.
  void drop_from(int64_t value);
  void clear() {
    views_.clear();
    by_hash_.reset();
  }
  const std::vector<View>& all() const { return views_; }

 private:
  template <typename Is>
  const View* look(size_t hash, const Is& is) const;

  std::vector<View> views_;
  // Places in `views_`; null as long as there are few.
  std::unique_ptr<std::unordered_multimap<size_t, size_t>> by_hash_;
};

// The state of one storage that recording looks at; the rest is in the `Buffer` of Python, made when Python asks for it.
// Guarded by the recorder's lock, except for what is atomic.
struct Buffer final : c10::intrusive_ptr_target {
  // At or above the recorder's base: a pending instruction defines it, as this value.
  int64_t number = -1;
  SpecPtr spec;
  // It was given data when it was made, without a program.
  bool computed = false;
  // Values of the program that begins at `views_base` that are this buffer seen as some spec, the latest last.
  int64_t views_base = -1;
  Views views;
  // Its place among the inputs of the program that it was last an input of.
  int64_t input = -1;
  // How many storages hold it, and the pending program when it is an input of that: 0 when nobody can use it any more.
  std::atomic<int> holders{0};
  // The `Buffer` of Python, held as long as somebody holds this one.
  std::atomic<PyObject*> python{nullptr};
  // Its memory, of one that an eager region has made, as long as there is no `Buffer` of Python, which has it then.
  // Guarded by the recorder's lock.
  at::Tensor data;
  // The memory that the `Buffer` of Python has, as long as an eager region is not disturbed.
  at::Tensor known_data;

  ~Buffer() override { set_data({}); }
  // Nobody holds it any more, though somebody may refer to it.
  void release_resources() override {
    set_data({});
    known_data.reset();
  }
  void set_data(at::Tensor made);

  // The absolute number of the value that is this buffer seen as the tensor sees it, or -1.
  int64_t value_of(const c10::TensorImpl& tensor, int64_t base) const;
  int64_t value_of(const Spec* wanted, int64_t base) const;
  void remember_view(const SpecPtr& seen, int64_t base, int64_t value);
  // Make it as new, for another storage.
  void reset() {
    number = views_base = input = -1;
    spec.reset();
    computed = false;
    views.clear();
  }
  void forget_views() {
    views.clear();
    views_base = -1;
  }
};

using BufferPtr = c10::intrusive_ptr<Buffer>;

// The buffer of a storage of the device, or null.
Buffer* buffer_of(const c10::Storage& storage);

// Let a storage of the device hold the buffer.
void hold(const c10::Storage& storage, const BufferPtr& buffer);

// A tensor of this spec on a new storage of so many bytes that holds the buffer.
at::Tensor new_tensor(const BufferPtr& buffer, const Spec& spec, size_t size_bytes);

// A tensor that is as the physical tensor is, on a new storage whose buffer has that.
at::Tensor new_tensor(at::Tensor data);

// Bytes of the buffers whose memory Python has not seen.
int64_t unseen_bytes();
// The most of them since the last call.
int64_t take_most_unseen_bytes();

// A tensor of this spec on the storage of `base`, which has the same dtype.
at::Tensor view_tensor(const at::Tensor& base, const Spec& spec);

// Let go of the `Buffer` of Python, unless somebody holds the buffer. With the GIL held.
void release_python(Buffer& buffer);

}  // namespace torch_ltc
