#include "comm/backend/plugin/load.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <map>
#include <mutex>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/fork_guard.h"

#ifndef MANIPLE_PLUGIN_FOLDERS
#define MANIPLE_PLUGIN_FOLDERS ""
#endif

namespace maniple {
namespace {

struct PluginInfo {
  std::string_view name;   // a backend's name, or a value of MANIPLE_MPI
  std::string_view label;  // for display
  const char* file;
  std::string_view get_it;  // what to do if it is missing
};

// To add a plugin, add a line here, a line in backend.cpp, and the library.
constexpr PluginInfo kPlugins[] = {
    {"gloo", "Gloo", "libmaniple_gloo.so", "install libgloo-dev and build again"},
    {"openmpi", "Open MPI", "libmaniple_openmpi.so", "install openmpi-bin and libopenmpi-dev and build again"},
    {"mpich", "MPICH", "libmaniple_mpich.so", "install mpich and libmpich-dev and build again"},
    {"cuda", "CUDA", "libmaniple_cuda.so", "install the CUDA toolkit (nvcc) and build again"},
    {"nccl", "NCCL", "libmaniple_nccl.so", "install the CUDA toolkit and NCCL (nccl.h) and build again"},
};

const PluginInfo& plugin_info(std::string_view backend) {
  const std::string_view name = backend == "mpi" ? chosen_mpi() : backend;
  for (const PluginInfo& plugin : kPlugins) {
    if (plugin.name == name) return plugin;
  }
  throw Unsupported(fmt::format("no plugin is named \"{}\"", backend));
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

/// The dynamic linker's search path: the program's run path, which find_package(Maniple) sets, and the system's
/// folders.
std::vector<std::string> library_folders() {
  void* const program = ::dlopen(nullptr, RTLD_LAZY | RTLD_NOLOAD);
  Dl_serinfo size{};
  if (program == nullptr || ::dlinfo(program, RTLD_DI_SERINFOSIZE, &size) != 0) return {};
  std::vector<std::max_align_t> memory(size.dls_size / sizeof(std::max_align_t) + 1);
  auto* const found = reinterpret_cast<Dl_serinfo*>(memory.data());
  found->dls_size = size.dls_size;
  found->dls_cnt = size.dls_cnt;
  if (::dlinfo(program, RTLD_DI_SERINFO, found) != 0) return {};
  std::vector<std::string> all;
  for (unsigned i = 0; i < found->dls_cnt; ++i) all.emplace_back(found->dls_serpath[i].dls_name);
  return all;
}

std::string program_file() {
  std::array<char, 4096> path{};
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size() - 1);
  return {path.data(), length > 0 ? static_cast<std::size_t>(length) : 0};
}

/// The file that contains this code: libmaniple.so, or the program, by the name it was started with. Empty if the name
/// depends on the current folder, from which plugins must never be loaded.
std::string library_file() {
  Dl_info found{};
  const bool known = ::dladdr(kPlugins, &found) != 0 && found.dli_fname != nullptr;
  return known && found.dli_fname[0] == '/' ? found.dli_fname : "";
}

std::vector<std::string> folders() {
  std::vector<std::string> all;
  if (const auto folder = environment_text(info(Knob::plugins).name)) all.push_back(*folder);
  for (const std::string& file : {program_file(), library_file()}) {
    if (file.empty()) continue;
    // The file may be in bin or a folder of it, in lib or lib/<architecture>, or in a build folder or Python's package.
    std::string folder = folder_of(file);
    for (int up = 0; up < 3; ++up) {
      all.push_back(folder + "/libexec/maniple");
      folder = folder_of(folder);
    }
  }
  for (std::string& folder : library_folders()) all.push_back(std::move(folder));
  const std::string built_in = MANIPLE_PLUGIN_FOLDERS;  // separated by colons
  for (std::size_t begin = 0; begin < built_in.size();) {
    const std::size_t end = std::min(built_in.find(':', begin), built_in.size());
    all.push_back(built_in.substr(begin, end - begin));
    begin = end + 1;
  }
  return all;
}

std::string find_library(const PluginInfo& info) {
  for (const std::string& folder : folders()) {
    std::string path = folder + "/" + info.file;
    if (::access(path.c_str(), R_OK) == 0) return path;
  }
  return {};
}

// A plugin's symbols stay local, as two MPIs define the same names. Open MPI's own plug-ins search the global symbols,
// so its library is loaded globally first (it does not depend on Maniple).
void* open_library(const PluginInfo& info, const std::string& path) {
  if (info.name == "openmpi") ::dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL);
  return ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

bool is_device(const PluginInfo& info) { return info.name == "cuda" || info.name == "nccl"; }

template <class Entry>
const Entry& load(const PluginInfo& info, const char* symbol, std::uint32_t abi) {
  const std::string path = find_library(info);
  if (path.empty()) throw Unsupported(missing_plugin(info.name));
  void* library = open_library(info, path);
  if (library == nullptr) {
    throw Unsupported(fmt::format("{} cannot be loaded: {}; {}", info.label, ::dlerror(), info.get_it));
  }
  const auto entry = reinterpret_cast<const Entry* (*)()>(::dlsym(library, symbol));
  const Entry* plugin = entry != nullptr ? entry() : nullptr;
  if (plugin == nullptr || plugin->abi != abi || plugin->operation != sizeof(Operation)) {
    throw Unsupported(fmt::format("{} belongs to another version of Maniple; build and install both together", path));
  }
  return *plugin;
}

template <class Entry>
struct Loaded {
  std::mutex mutex;
  std::map<std::string_view, const Entry*> plugins;
};
template <class Entry>
constinit ProcessWide<Loaded<Entry>> loaded;

/// Loads the plugin once per process.
template <class Entry>
const Entry& load_once(std::string_view backend, const char* symbol, std::uint32_t abi) {
  const PluginInfo& info = plugin_info(backend);
  Loaded<Entry>& all = *loaded<Entry>;
  const std::lock_guard lock(all.mutex);
  const Entry*& plugin = all.plugins[info.name];
  if (plugin == nullptr) plugin = &load<Entry>(info, symbol, abi);
  return *plugin;
}

}  // namespace

std::string_view chosen_mpi() {
  const std::string chosen = knob_word(Knob::mpi);
  if (chosen != "auto") return chosen == "mpich" ? "mpich" : "openmpi";
  const bool by_mpich = std::getenv("PMI_RANK") != nullptr && std::getenv("OMPI_COMM_WORLD_RANK") == nullptr;
  return by_mpich ? "mpich" : "openmpi";
}

std::string missing_plugin(std::string_view backend) {
  const PluginInfo& info = plugin_info(backend);
  if (find_library(info).empty()) {
    return fmt::format("this build has no {}: {}; or, if {} was moved, set MANIPLE_PLUGINS to its folder", info.label,
                       info.get_it, info.file);
  }
  if (!is_device(info)) return {};
  try {
    return load_device_plugin(backend).missing();
  } catch (const Unsupported& error) {
    return error.what();
  }
}

const PluginEntry& load_plugin(std::string_view backend) {
  return load_once<PluginEntry>(backend, kPluginSymbol, kPluginAbi);
}

const DevicePluginEntry& load_device_plugin(std::string_view backend) {
  return load_once<DevicePluginEntry>(backend, kDevicePluginSymbol, kDevicePluginAbi);
}

DeviceRuntime& device_runtime() {
  const DevicePluginEntry& entry = load_device_plugin("cuda");
  if (const std::string missing = entry.missing(); !missing.empty()) throw Unsupported(missing);
  return *entry.runtime();
}

std::string describe_plugin(std::string_view backend) {
  try {
    return is_device(plugin_info(backend)) ? load_device_plugin(backend).version : load_plugin(backend).version;
  } catch (const Unsupported& error) {
    return error.what();
  }
}

// ---- As backends ----------------------------------------------------------------------------------------------------

std::unique_ptr<Backend> make_gloo_backend(const BackendContext& context) {
  return make_plugin_backend(context, load_plugin("gloo"));
}

std::unique_ptr<Backend> make_mpi_backend(const BackendContext& context) {
  for (int rank = 0; rank < context.session->world_size(); ++rank) {
    if (rank == context.session->rank() || !context.session->same_process(rank)) continue;
    throw Unsupported(
        "the mpi backend needs a process for each rank, but ranks of this job are threads of one; use native");
  }
  return make_plugin_backend(context, load_plugin("mpi"));
}

}  // namespace maniple
