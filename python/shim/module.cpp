// The Python module maniple_torch._shim: creates backends, and passes the error classes to C++.
#include <algorithm>

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "backend.h"
#include "device.h"
#include "errors.h"
#include "store.h"

namespace maniple_torch {
namespace {

using BackendPointer = c10::intrusive_ptr<Backend>;

// The default group. Other groups are its subgroups, so that they share its connections and messages use world ranks.
std::mutex world_mutex;
std::weak_ptr<Engine> world;

BackendPointer make_world(const StorePointer& store, int rank, int size, double timeout_s, const std::string& name,
                          const std::string& master, const std::string& description, bool is_default,
                          const std::string& engine, int device) {
  const maniple_store ours = store_of(store, description);
  const maniple_init_options options{rank, size, timeout_s, name.c_str(), master.c_str(), engine.c_str(), device};
  maniple_group* group = nullptr;
  bool interrupted = false;
  const maniple_call call{0, interrupted_by_signal, &interrupted, nullptr};
  const auto error = exception_of(maniple_init(&ours, &options, &call, &group));
  if (interrupted) throw_python_error();
  if (error) std::rethrow_exception(error);
  auto backend = c10::make_intrusive<Backend>(group, rank, size, timeout_s);
  backend->set_choice({engine, device});
  if (is_default) {
    const std::lock_guard lock(world_mutex);
    world = backend->engine();
  }
  return backend;
}

/// Null if Maniple has no default group.
BackendPointer make_subgroup(const std::vector<int>& ranks, double timeout_s, const std::string& name) {
  std::shared_ptr<Engine> parent;
  {
    const std::lock_guard lock(world_mutex);
    parent = world.lock();
  }
  if (!parent || parent->group == nullptr) return {};
  flush(*parent);
  maniple_group* group = nullptr;
  check(maniple_subgroup(parent->group, name.c_str(), ranks.data(), ranks.size(), timeout_s, &group));
  return c10::make_intrusive<Backend>(group, maniple_group_rank(group), maniple_group_size(group), timeout_s);
}

// "world split 0 2"; for many ranks, the first ones, their number and a hash replace the list.
std::string name_of_split(std::string name, const std::vector<int>& ranks) {
  constexpr std::size_t kFew = 8;
  name += " split";
  for (std::size_t i = 0; i < std::min(ranks.size(), kFew); ++i) name += " " + std::to_string(ranks[i]);
  if (ranks.size() <= kFew) return name;
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const int rank : ranks) hash = (hash ^ static_cast<std::uint64_t>(rank)) * 0x100000001b3;
  return name + " .. (" + std::to_string(ranks.size()) + " ranks, " + std::to_string(hash) + ")";
}

double seconds_of(const OptionsPointer& options) {
  return std::clamp(std::chrono::duration<double>(options->timeout).count(), 0.001, 1e9);
}

}  // namespace

BasePointer Backend::split(const StorePointer& store, const std::vector<int>& ranks, const OptionsPointer& options) {
  if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) return {};
  if (store == split_store_) {
    if (auto same = split_backend_.lock()) return same;
  }
  flush(*engine_);
  std::string name = name_of_split(maniple_group_name(group()), ranks);
  // Names must be unique in a world. The counter agrees, because all members have made this split equally often.
  if (const int before = split_names_[name]++; before != 0) name += " again " + std::to_string(before);
  maniple_group* made = nullptr;
  check(maniple_subgroup(group(), name.c_str(), ranks.data(), ranks.size(), seconds_of(options), &made));
  auto backend =
      c10::make_intrusive<Backend>(made, maniple_group_rank(made), maniple_group_size(made), seconds_of(options));
  backend->set_choice(choice_);
  split_store_ = store;
  split_backend_ = BasePointer(backend);
  return backend;
}

BasePointer Backend::merge(const StorePointer& store, const OptionsPointer& options, const int& rank, const int& size) {
  if (store == split_store_) {
    if (auto same = split_backend_.lock()) return same;
  }
  auto backend = make_world(store, rank, size, seconds_of(options), "merged", "", "store for the merged group", false,
                            choice_.engine, choice_.device);
  split_store_ = store;
  split_backend_ = BasePointer(backend);
  return backend;
}

}  // namespace maniple_torch

PYBIND11_MODULE(_shim, m) {
  using namespace maniple_torch;
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::module_::import("torch.distributed");  // defines the base class

  if (maniple_c_interface() != MANIPLE_C_INTERFACE)
    throw std::runtime_error("libmaniple.so has C interface " + std::to_string(maniple_c_interface()) +
                             ", and this module was built for " + std::to_string(MANIPLE_C_INTERFACE) +
                             "; build both from one version of Maniple");

  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (Failure& failure) {
      PyErr_SetString(failure.python_type(), failure.what());
    }
  });
  m.def("leave_all", &leave_all, release_gil());
  m.def("set_error_classes", [](const py::list& classes) {
    if (classes.size() != kErrorKinds) throw std::runtime_error("wrong number of classes of errors");
    for (int kind = 0; kind < kErrorKinds; ++kind) {
      py::object type = classes[static_cast<std::size_t>(kind)];
      set_python_type(kind, type.release().ptr());  // never released
    }
  });
  m.def("version", [] { return std::string(maniple_version()); });
  m.def("built_for", [] { return std::string(TORCH_VERSION); });
  m.def("built_for_cuda", &built_for_cuda);

#if TORCH_VERSION_MAJOR >= 2
  const auto copy = [](const BackendOptions& self, const py::object&) {
    return c10::make_intrusive<BackendOptions>(self);
  };
  py::class_<BackendOptions, Base::Options, c10::intrusive_ptr<BackendOptions>>(m, "BackendOptions")
      .def("__deepcopy__", copy, py::arg("memo") = py::none())
      .def("__copy__", [copy](const BackendOptions& self) { return copy(self, py::none()); });
#endif
  py::class_<Backend, Base, BackendPointer>(m, "Backend")
      .def("abort", &Backend::abort, release_gil())
      .def(
          "monitored_barrier_",
          [](Backend& self, std::chrono::milliseconds timeout) {
            c10d::BarrierOptions options;
            options.timeout = timeout;
            self.monitoredBarrier(options, true);
          },
          release_gil())
      .def(
          "allocate_",
          [](Backend& self, long size, const at::Tensor& like) { return self.allocateTensor(size, like.options()); },
          release_gil())
      .def("move_to_registered_", &Backend::move_to_registered, release_gil())
      .def("average_here_", &Backend::average_here, release_gil())
      .def(
          "split_",
          [](Backend& self, const StorePointer& store, const std::vector<int>& ranks, Milliseconds timeout) {
            const auto split = self.split(store, ranks, c10::make_intrusive<BackendOptions>(timeout));
            return c10::static_intrusive_pointer_cast<Backend>(split);
          },
          release_gil())
      .def(
          "merge_",
          [](Backend& self, const StorePointer& store, int rank, int size, Milliseconds timeout) {
            const auto merged = self.merge(store, c10::make_intrusive<BackendOptions>(timeout), rank, size);
            return c10::static_intrusive_pointer_cast<Backend>(merged);
          },
          release_gil())
      .def("transport", [](Backend& self) { return std::string(maniple_group_transport(self.group())); })
#if TORCH_VERSION_MAJOR >= 2
      .def_property_readonly(
          "options",
          [](Backend& self) { return c10::static_intrusive_pointer_cast<BackendOptions>(self.getBackendOptions()); })
      .def("_set_default_timeout", &Backend::setTimeout)
      .def("perform_nocolor_split",
           [](Backend&, const py::object&) {})  // called by ranks outside the group, which do not take part
#endif
      .def("group_name", [](Backend& self) { return std::string(maniple_group_name(self.group())); });
  m.def("make_world", &make_world, release_gil());
  m.def("make_subgroup", &make_subgroup, release_gil());
}
