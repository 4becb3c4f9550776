// Warnings of kernels that operators run which Python calls. PyTorch before 2.15 prints them; on a thread that keeps
// them, they wait until Python asks. A function of PyTorch's Python side has a handler of its own meanwhile.

#include "warnings.h"

#include <torch/csrc/Exceptions.h>

#include <variant>
#include <vector>

namespace torch_ltc {
namespace {

thread_local std::vector<c10::Warning> kept;
thread_local bool keeps = false;
thread_local c10::WarningHandler* before = nullptr;

struct Dropper final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Drops what kernels warn of: as if they had never run, also for warnings that are said once a process.
class Silence {
 public:
  Silence() : always_(c10::WarningUtils::get_warnAlways()), before_(c10::WarningUtils::get_warning_handler()) {
    c10::WarningUtils::set_warnAlways(true);
    c10::WarningUtils::set_warning_handler(&dropper_);
  }
  ~Silence() {
    c10::WarningUtils::set_warning_handler(before_);
    c10::WarningUtils::set_warnAlways(always_);
  }
  Silence(const Silence&) = delete;
  Silence& operator=(const Silence&) = delete;

 private:
  bool always_;
  c10::WarningHandler* before_;
  Dropper dropper_;
};

struct Keeper final : c10::WarningHandler {
  // Without the GIL: a kernel may hold a lock that another thread with the GIL waits for.
  void process(const c10::Warning& warning) override { kept.push_back(warning); }
};

void keep(bool from_now_on) {
  static Keeper keeper;
  if (from_now_on == keeps) {
    return;
  }
  keeps = from_now_on;
  if (keeps) {
    before = c10::WarningUtils::get_warning_handler();
    c10::WarningUtils::set_warning_handler(&keeper);
  } else {
    c10::WarningUtils::set_warning_handler(before);
  }
}

py::object take() {
  if (kept.empty()) {
    return py::none();
  }
  py::list taken;
  for (const c10::Warning& warning : kept) {
    taken.append(told(warning));
  }
  kept.clear();
  return std::move(taken);
}

}  // namespace

py::tuple told(const c10::Warning& warning) {
  std::string text = torch::processErrorMsg(warning.msg());
  const c10::SourceLocation& place = warning.source_location();
  if (!warning.verbatim() && place.file != nullptr) {
    text += " (Triggered internally at " + std::string(place.file) + ":" + std::to_string(place.line) + ".)";
  }
  return py::make_tuple(text, std::holds_alternative<c10::Warning::DeprecationWarning>(warning.type()));
}

void bind_warnings(py::module_& module) {
  module.def("keep_warnings", &keep, "Keep warnings of kernels on this thread from now on, or no longer.");
  module.def(
      "silently",
      [](const py::object& function, const py::args& args) {
        const Silence silence;
        return function(*args);
      },
      "Call a function while kernels warn of nothing on this thread.");
  module.def(
      "take_warnings", &take, "The warnings that this thread has kept, as text and whether of deprecation; or None.");
}

}  // namespace torch_ltc
