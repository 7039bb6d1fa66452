// file:///path: the store is a file. Its mode keeps other users out, so it can hold the job's secret, which the first
// process creates. The last process to leave removes the file.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/system_error.h"
#include "comm/rendezvous/methods.h"
#include "comm/rendezvous/round.h"
#include "comm/rendezvous/secret_source.h"

namespace maniple {
namespace {

constexpr std::string_view kJoins = "joins";  // a counter; "closed" just before the file is removed
constexpr std::string_view kLeft = "left";
constexpr std::string_view kSecret = "secret";
constexpr std::string_view kWorldSize = "world_size";
constexpr std::string_view kClosed = "closed";

// The time the last process of an earlier use may take between closing and removing the file.
constexpr std::chrono::seconds kRemoval{10};

/// Opens the file and counts this process. Returns false if the last process of an earlier use is just removing the
/// file. Other errors of the file are thrown, because waiting does not change them.
bool count_join(const std::string& path, std::shared_ptr<Store>& store) {
  try {
    store = make_file_store(path);
    try {
      store->add(kJoins, 1);
      return true;
    } catch (const InvalidArgument&) {
      if (store->get(kJoins, Deadline::after(std::chrono::seconds(0))) == kClosed) return false;
      throw;
    }
  } catch (const SystemError& error) {
    if (error.code() != ENOENT) throw;
    return false;
  }
}

// A missing folder gives the same error as a file that was just removed, so check the folder separately.
void require_folder(const std::string& path, const std::string& init_method) {
  const std::string folder = path.substr(0, std::max<std::size_t>(path.rfind('/'), 1));
  struct stat status{};
  MANIPLE_REQUIRE(::stat(folder.c_str(), &status) == 0, "{}: there is no folder {}: {}", init_method, folder,
                  errno_text(errno));
}

void leave(Store& store, const std::string& path, const std::function<void()>& give_back = {}) noexcept {
  try {
    if (give_back) give_back();
    const std::string left = std::to_string(store.add(kLeft, 1));
    // Fails if more processes have joined than left. Once it succeeds, no process can join.
    if (store.compare_set(kJoins, left, kClosed) == kClosed) ::unlink(path.c_str());
  } catch (const std::exception&) {
    // The file is gone, or the disk is full and the file stays behind, as after a crash.
  }
}

/// The store `view`, which calls `leave` when destroyed.
std::shared_ptr<Store> leaving_at_end(std::shared_ptr<Store> view, std::shared_ptr<Store> store, std::string path,
                                      std::function<void()> give_back) {
  Store* raw = view.get();
  return {raw, [view = std::move(view), store = std::move(store), path = std::move(path),
                give_back = std::move(give_back)](Store*) mutable {
            view.reset();
            leave(*store, path, give_back);
          }};
}

void require_same_world_size(Store& store, int world_size, const std::string& path) {
  const std::string mine = std::to_string(world_size);
  const std::string there = store.compare_set(kWorldSize, "", mine);
  MANIPLE_REQUIRE(
      there == mine,
      "world size is {} here but {} for earlier processes at {}; if an earlier job left that file, remove it", mine,
      there, path);
}

}  // namespace

RendezvousResult rendezvous_by_file(const InitOptions& options, Deadline deadline) {
  const InitMethod method = parse_init_method(options.init_method);
  const std::string& path = method.place;
  MANIPLE_REQUIRE(!path.empty() && path.front() == '/',
                  "init method \"{}\": \"{}\" is not an absolute path; expected "
                  "file:///path (three slashes)",
                  options.init_method, path);
  const auto given = [](int option) { return option == -1 ? std::nullopt : std::optional<int>(option); };
  const auto rank = agreed({"InitOptions::rank", given(options.rank)}, {"the init method's rank", method.rank});
  const auto world_size = agreed({"InitOptions::world_size", given(options.world_size)},
                                 {"the init method's world_size", method.world_size});
  MANIPLE_REQUIRE(world_size.has_value(), "{}: no world size; set InitOptions::world_size or add ?world_size=N",
                  options.init_method);
  require_rank_in_world(rank.value_or(0), "rank", *world_size, "world size");

  std::shared_ptr<Store> store;
  bool joined = false;
  const Deadline removed = Deadline::sooner(deadline, Deadline::after(kRemoval));
  while (!joined) {
    require_folder(path, options.init_method);
    joined = count_join(path, store);
    if (joined) break;
    if (removed.expired())
      throw Timeout(fmt::format(
          "{}: an earlier job has closed the file and not removed it within {} s; its last process must have "
          "ended in between: remove the file",
          options.init_method, kRemoval.count()));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // sleep: between two polls of another process's file
  }

  RendezvousResult result;
  result.identity = identity_from_environment(rank.value_or(-1), *world_size);
  try {
    require_same_world_size(*store, *world_size, path);
    if (result.identity.secret.is_none()) {
      const auto secret = parse_secret(store->compare_set(kSecret, "", hex_of(Secret::random())));
      MANIPLE_REQUIRE(secret.has_value(), "{}: the secret in the file is not a secret; remove the file",
                      options.init_method);
      result.identity.secret = *secret;
    }
    std::shared_ptr<Store> view;
    std::function<void()> give_back;
    if (rank) {
      view = register_rank(store, result.identity);
    } else {
      // Ranks are assigned in order of arrival. Once the group is complete, the next arrivals start the next group.
      view = store_of_generation(store, result.identity);
      TakenRank taken = take_rank(view, *world_size, deadline);
      result.identity.rank = taken.rank;
      give_back = std::move(taken.give_back);
    }
    result.store = leaving_at_end(std::move(view), store, path, std::move(give_back));
  } catch (...) {
    leave(*store, path);
    throw;
  }
  result.data_address = choose_data_address(Address::parse("127.0.0.1:0"));
  return result;
}

}  // namespace maniple
