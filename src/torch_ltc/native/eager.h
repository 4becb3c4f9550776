// Eager regions: calls of a loop that reads about as often as it computes run at once, on the physical device.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <atomic>

#include "recorder.h"

namespace torch_ltc {

// The tensors of the device among the arguments of a call, and what stands for them there.
class EagerOperands {
 public:
  // The result is for another device.
  bool reads = false;
  // There are several results.
  bool several = false;

  // The tensor that the kernel takes in place of this one, to be held until results are wrapped; false when the call has
  // to be recorded. With the recorder's lock.
  bool add(const at::Tensor& tensor, bool may_be_foreign, at::Tensor& into);
  // What the device has in place of a result; undefined where that cannot be.
  at::Tensor wrap(at::Tensor result);
  bool empty() const { return pairs_.empty(); }

 private:
  // Both are borrowed, those of the caller because to hold one that Python has takes the GIL.
  c10::SmallVector<std::pair<const at::Tensor*, const c10::TensorImpl*>, 4> pairs_;
  // Results, on whose memory others may lie.
  c10::SmallVector<std::pair<at::Tensor, const c10::StorageImpl*>, 2> made_;
};

class EagerRegion {
 public:
  // Something may be queued, a setting may be changed, or a buffer may get other memory. As long as nobody says so,
  // Python need not be asked whether something is queued, and where the memory of a buffer is.
  void disturb();
  // The memory of a buffer, or undefined. With the recorder's lock.
  at::Tensor data_of(Buffer& buffer);
  // Calls and reads of all regions, and how many regions there were and have ended by themselves.
  uint64_t calls = 0;
  uint64_t reads = 0;
  uint64_t begun = 0;
  uint64_t ended = 0;

  bool on() const { return on_.load(std::memory_order_relaxed) && suspended_.load(std::memory_order_relaxed) == 0; }

  // True when a call of this operator may run now, with the recorder's lock: nothing is pending or queued.
  bool may_run(const Operator& op);
  bool is_undisturbed() const;
  // The call will run.
  void note_call(bool reads);

  // Around the kernel: below autograd, and some are timed.
  class Running {
   public:
    explicit Running(EagerRegion& region);
    ~Running();
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

   private:
    EagerRegion& region_;
    int64_t began_ns_;
    at::AutoDispatchBelowADInplaceOrView below_;
    c10::AutoGradMode with_gradients_{true};
  };

  // Run the call, if everything that it needs is there; false, and nothing has happened, when it is to be recorded. A
  // call that returns what it writes, or nothing, needs no `returned`.
  bool run(Operator& op, const c10::IValue* arguments, Values* returned);

  // With the GIL: begin one, with objects of Python that say what is queued, and how often a setting was changed; and
  // the generator of the device. It ends by itself: after so many calls, or, where these are 0, when the loop reads
  // seldom. If they are negative, it does not.
  void begin(PyObject* executor, PyObject* worker, PyObject* settings, c10::IValue generator, int64_t most_calls);
  // Called once, before the first call, to have run what is pending and queued.
  void set_settle(PyObject* settle) { settle_ = settle; }
  void end();
  void suspend(int more) { suspended_.fetch_add(more); }
  // The program reads a value.
  void note_read();

 private:
  struct Operands;
  bool is_ready() const;
  bool begin_call();
  bool resolve(Operator& op, const c10::IValue* arguments, Operands& found);

  std::atomic<bool> on_{false};
  std::atomic<int> suspended_{0};
  bool always_ = false;
  // The calls that it may have, if the reads do not count.
  int64_t left_ = 0;
  PyObject* executor_ = nullptr;
  PyObject* worker_ = nullptr;
  PyObject* settings_ = nullptr;
  PyObject* settle_ = nullptr;
  bool settled_ = false;
  // Nothing was queued, and nobody has disturbed since.
  std::atomic<bool> quiet_{false};
  // Buffers that know their memory.
  std::vector<c10::weak_intrusive_ptr<Buffer>> knowing_;
  long assignments_ = 0;
  c10::IValue generator_;
  // The calls that reads have left to it, and what some calls took.
  int64_t saved_ = 0;
  std::atomic<int64_t> timed_ns_{0};
  std::atomic<int64_t> timed_{0};
};

EagerRegion& eager_region();

}  // namespace torch_ltc
