// The recorder's lock: reentrant, taken by Python code and by kernels that run without the GIL.

#pragma once

#include <Python.h>

#include <atomic>
#include <mutex>
#include <thread>

namespace torch_ltc {

class RecorderLock {
 public:
  // A thread that waits does not keep the GIL: whoever holds the lock may need it to go on.
  void acquire() {
    if (owned()) {
      ++depth_;
      return;
    }
    if (!mutex_.try_lock()) {
      if (PyGILState_Check()) {
        PyThreadState* state = PyEval_SaveThread();
        mutex_.lock();
        PyEval_RestoreThread(state);
      } else {
        mutex_.lock();
      }
    }
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    depth_ = 1;
  }

  void release() {
    if (--depth_ == 0) {
      owner_.store({}, std::memory_order_relaxed);
      mutex_.unlock();
    }
  }

  bool owned() const { return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  // Let go of it however often this thread has taken it; returns how often.
  int release_all() {
    const int depth = depth_;
    depth_ = 1;
    release();
    return depth;
  }

  void restore(int depth) {
    acquire();
    depth_ = depth;
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
  int depth_ = 0;
};

class Locked {
 public:
  explicit Locked(RecorderLock& lock) : lock_(lock) { lock_.acquire(); }
  ~Locked() { lock_.release(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  RecorderLock& lock_;
};

}  // namespace torch_ltc
