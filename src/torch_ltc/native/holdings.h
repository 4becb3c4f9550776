// Which buffers hold how many bytes, and what made them: counted from when they get their data until they die.

#pragma once

#include <Python.h>

#include <cstdint>

namespace torch_ltc {

class Holdings;

// What one `Buffer` of Python is counted with; in a ring with the others of its `Holdings`. With the GIL held.
struct Held {
  Held* next = this;
  Held* previous = this;
  Holdings* in = nullptr;
  int64_t size_bytes = 0;
  int64_t run = 0;
  // Held: a call, a line, or nothing that is known.
  PyObject* maker = nullptr;

  // Count it no longer.
  void release();
};

}  // namespace torch_ltc
