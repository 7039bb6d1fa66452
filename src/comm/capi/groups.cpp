// maniple/c.h: versions, errors, groups.
#include <new>
#include <span>
#include <vector>

#include "comm/capi/callback_store.h"
#include "comm/capi/handles.h"
#include "comm/group/named_groups.h"
#include <maniple/comm/error.h>
#include <maniple/version.h>

namespace maniple {
namespace {

// Returned if memory for an error cannot be allocated; never freed.
maniple_error* no_memory() noexcept {
  static maniple_error error{MANIPLE_SYSTEM, "out of memory"};  // short enough to need no allocation
  return &error;
}

}  // namespace

maniple_error* error_of(const std::exception_ptr& error) noexcept {
  if (!error) return nullptr;
  try {
    try {
      std::rethrow_exception(error);
    } catch (const Error& known) {
      return new maniple_error{static_cast<int>(known.kind()), known.what(), known.info().ranks};
    } catch (const std::exception& other) {
      return new maniple_error{MANIPLE_SYSTEM, other.what()};
    } catch (...) {
      return new maniple_error{MANIPLE_SYSTEM, "an exception of an unknown class"};
    }
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

}  // namespace maniple

using maniple::guarded;

int maniple_c_interface(void) { return MANIPLE_C_INTERFACE; }
const char* maniple_version(void) { return MANIPLE_VERSION_STRING; }

maniple_error* maniple_error_new(int kind, const char* text) {
  using maniple::ErrorKind;
  static_assert(static_cast<int>(ErrorKind::invalid_argument) == MANIPLE_INVALID_ARGUMENT &&
                static_cast<int>(ErrorKind::timeout) == MANIPLE_TIMEOUT &&
                static_cast<int>(ErrorKind::peer_lost) == MANIPLE_PEER_LOST &&
                static_cast<int>(ErrorKind::aborted) == MANIPLE_ABORTED &&
                static_cast<int>(ErrorKind::mismatch) == MANIPLE_MISMATCH &&
                static_cast<int>(ErrorKind::protocol) == MANIPLE_PROTOCOL &&
                static_cast<int>(ErrorKind::system) == MANIPLE_SYSTEM &&
                static_cast<int>(ErrorKind::unsupported) == MANIPLE_UNSUPPORTED);
  try {
    const bool known = kind >= MANIPLE_INVALID_ARGUMENT && kind <= MANIPLE_UNSUPPORTED;
    return new maniple_error{known ? kind : MANIPLE_SYSTEM, text == nullptr ? "" : text};
  } catch (const std::bad_alloc&) {
    return maniple::no_memory();
  }
}

int maniple_error_kind(const maniple_error* error) { return error->kind; }
const char* maniple_error_text(const maniple_error* error) { return error->text.c_str(); }
size_t maniple_error_ranks(const maniple_error* error, const int** ranks) {
  *ranks = error->ranks.data();
  return error->ranks.size();
}
void maniple_error_free(maniple_error* error) {
  if (error != maniple::no_memory()) delete error;
}

maniple_error* maniple_init(const maniple_store* store, const maniple_init_options* options, const maniple_call* call,
                            maniple_group** group) {
  return guarded([&] {
    const maniple::Interrupt interrupt = maniple::interrupt_of(call);
    auto ours = maniple::make_callback_store(*store);
    maniple::InitOptions init;
    init.rank = options->rank;
    init.world_size = options->world_size;
    init.timeout = maniple::Seconds(options->timeout_s);
    if (options->backend != nullptr) init.backend = options->backend;
    init.device = options->device;
    const std::string name = options->name == nullptr ? "world" : options->name;
    const std::string master = options->master == nullptr ? "" : options->master;
    *group = new maniple_group{maniple::init_named(std::move(ours), init, name, master)};
  });
}

maniple_error* maniple_subgroup(maniple_group* parent, const char* name, const int* ranks, size_t count,
                                double timeout_s, maniple_group** group) {
  return guarded([&] {
    maniple::GroupOptions options;
    if (timeout_s != 0) options.timeout = maniple::Seconds(timeout_s);
    *group =
        new maniple_group{maniple::make_named_group(*parent->group, name, std::span<const int>(ranks, count), options)};
  });
}

void maniple_group_free(maniple_group* group) { delete group; }
int maniple_group_rank(const maniple_group* group) { return group->group->rank(); }
int maniple_group_size(const maniple_group* group) { return group->group->size(); }
const char* maniple_group_name(const maniple_group* group) { return group->group->name().c_str(); }
const char* maniple_group_transport(const maniple_group* group) { return group->group->transport().data(); }

void maniple_group_abort(maniple_group* group, const char* reason) {
  maniple_error_free(guarded([&] { group->group->abort(reason); }));
}

maniple_error* maniple_group_error(const maniple_group* group) { return maniple::error_of(group->group->error()); }
