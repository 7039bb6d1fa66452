#include "comm/rendezvous/rendezvous.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include <fmt/format.h>
#include <fmt/ranges.h>  // join

#include "comm/base/check.h"
#include "comm/base/environment.h"
#include "comm/base/fork_guard.h"
#include "comm/base/launcher_socket.h"
#include "comm/base/log.h"
#include "comm/net/handshake_wire.h"
#include "comm/rendezvous/methods.h"
#include "comm/rendezvous/secret_source.h"

namespace maniple {
namespace {

/// Identifies this process uniquely, even compared with a later process with the same pid or children it forks.
struct ProcessNonce {
  std::string text = [] {
    std::array<std::uint8_t, 16> bytes;
    fill_random(bytes);
    return fmt::format("{:02x}", fmt::join(bytes, ""));
  }();
};
constinit ProcessWide<ProcessNonce> process_nonce;

std::string describe_this_process() {
  char host[256] = "unknown";
  ::gethostname(host, sizeof(host) - 1);
  return fmt::format("host {}, pid {}", host, ::getpid());
}

}  // namespace

std::shared_ptr<Store> store_of_generation(std::shared_ptr<Store> store, const Identity& identity) {
  return make_prefix_store(fmt::format("g{}", identity.generation), std::move(store));
}

std::shared_ptr<Store> register_rank(std::shared_ptr<Store> store, const Identity& identity) {
  const std::string place = fmt::format("g{}/rank/{}", identity.generation, identity.rank);
  const std::string mine = fmt::format("{} {}", process_nonce->text, describe_this_process());
  const std::string owner = store->compare_set(place + "/owner", "", mine);
  const auto nonce_end = owner.find(' ');
  MANIPLE_REQUIRE(
      owner.substr(0, nonce_end) == process_nonce->text,
      "rank {} has been taken by {} and cannot be taken by {} as well: start each rank once; a restarted job "
      "needs a new MANIPLE_GENERATION (maniple run sets it) or a new {}",
      identity.rank, nonce_end == std::string::npos ? owner : owner.substr(nonce_end + 1), describe_this_process(),
      store->describe());
  return store_of_generation(std::move(store), identity);
}

Identity identity_from_environment(int rank, int world_size) {
  for (const char* name : {"MANIPLE_JOB", "MANIPLE_GENERATION", "MANIPLE_STORE_HOSTED"}) require_not_empty(name);
  Identity identity;
  identity.rank = rank;
  identity.world_size = world_size;
  if (const auto job = environment_text("MANIPLE_JOB")) {
    MANIPLE_REQUIRE(job->size() <= kMaxJobBytes, "MANIPLE_JOB is \"{}\", {} bytes; expected at most {}", *job,
                    job->size(), kMaxJobBytes);
    identity.job = *job;
  }
  identity.generation =
      static_cast<std::uint32_t>(environment_integer("MANIPLE_GENERATION", 0, UINT32_MAX).value_or(0));
  if (const auto secret = secret_from_environment()) identity.secret = *secret;
  return identity;
}

Address choose_data_address(const Address& master) {
  const std::string interface_name = knob_text(Knob::interface_name);
  if (interface_name.empty()) return route_to(master);
  try {
    return Address::of_interface(interface_name);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("MANIPLE_INTERFACE is \"{}\": {}", interface_name, error.what()));
  }
}

void require_secret_off_loopback(const Secret& secret, const Address& address, const std::string& what, bool warns) {
  if (!secret.is_none()) return;
  const bool allowed = knob_flag(Knob::allow_no_secret);
  MANIPLE_REQUIRE(
      address.is_loopback() || allowed,
      "{} ({}) is not loopback, and the job has no secret, so anyone on the network could join it: start with "
      "`maniple run`, or give all processes the same MANIPLE_SECRET_FILE (mode 0600, 64 hexadecimal digits), or on "
      "a trusted network set MANIPLE_ALLOW_NO_SECRET=1",
      what, address.host());
  if (!warns) return;
  warn_once(
      allowed && !address.is_loopback()
          ? "the job has no secret and MANIPLE_ALLOW_NO_SECRET=1: anyone on the network can join it"
          : "the job has no secret (MANIPLE_SECRET_FILE): any process of this host can join it; only loopback is used");
}

RendezvousResult rendezvous(const InitOptions& options, Deadline deadline) {
  const InitMethod method = parse_init_method(options.init_method);
  if (method.scheme == "file") return rendezvous_by_file(options, deadline);
  if (method.scheme == "tcp") return rendezvous_by_tcp(assignment_from_address(options), deadline);
  return rendezvous_by_tcp(assignment_from_environment(options), deadline);
}

namespace {

/// A number in a variable set by a launcher; -1 if there is none.
int number_of(const char* name) noexcept {
  const char* text = std::getenv(name);
  if (text == nullptr || *text < '0' || *text > '9') return -1;
  return std::atoi(text);
}

// A lost notice is not an error: without it, the others wait for the timeout of init().
void notify(const char* stage, const std::string& details = {}) noexcept {
  const int fd = launcher_socket(kInitSocket);
  const int rank = number_of("RANK");
  if (fd < 0 || rank < 0) return;
  char text[1024];
  const auto end = fmt::format_to_n(text, sizeof text, "{} {}{}", stage, rank, details);
  ::send(fd, text, std::min(end.size, sizeof text), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

void notify_init_started(int world_size) noexcept {
  launcher_socket(kReportSocket);  // removes the variable before this process starts programs
  if (world_size <= 0 || world_size == number_of("WORLD_SIZE")) notify("joining");
}

void notify_init_done() noexcept { notify("joined"); }

void notify_lost(std::uint32_t generation, const std::vector<int>& lost) noexcept {
  notify("lost", fmt::format(" {} {}", generation, fmt::join(lost, " ")));
}
void notify_leaving() noexcept { notify("leaving"); }

}  // namespace maniple
