#include "rendezvous/rank_claim.h"

#include <unistd.h>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "base/check.h"
#include "net/handshake_wire.h"

namespace maniple {
namespace {

/// Distinguishes this process from all others, also from a later one with the same pid and from children it forks.
std::string process_nonce() {
  static const std::string nonce = [] {
    std::array<std::uint8_t, 16> bytes;
    fill_random(bytes);
    return fmt::format("{:02x}", fmt::join(bytes, ""));
  }();
  return fmt::format("{}-{}", nonce, ::getpid());
}

}  // namespace

std::string describe_this_process() {
  char host[256] = "unknown";
  ::gethostname(host, sizeof(host) - 1);
  return fmt::format("host {}, pid {}", host, ::getpid());
}

std::shared_ptr<Store> store_for_init(std::shared_ptr<Store> store, const Identity& identity, std::int64_t join) {
  return make_prefix_store(fmt::format("g{}/j{}", identity.generation, join), std::move(store));
}

std::shared_ptr<Store> claim_rank(std::shared_ptr<Store> store, const Identity& identity) {
  const std::string place = fmt::format("g{}/rank/{}", identity.generation, identity.rank);
  const std::string mine = fmt::format("{} {}", process_nonce(), describe_this_process());
  const std::string owner = store->compare_set(place + "/owner", "", mine);
  const auto nonce_end = owner.find(' ');
  MANIPLE_REQUIRE(
      owner.substr(0, nonce_end) == process_nonce(),
      "rank {} has been taken by {} and cannot be taken by {} as well: start each rank once; a restarted job "
      "needs a new MANIPLE_GENERATION (maniple run sets it) or a new {}",
      identity.rank, nonce_end == std::string::npos ? owner : owner.substr(nonce_end + 1), describe_this_process(),
      store->describe());
  const std::int64_t join = store->add(place + "/joins", 1);
  return store_for_init(std::move(store), identity, join);
}

}  // namespace maniple
