// init(): from the options to the world's group.

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "backend/plugin/mpirun.h"
#include "base/check.h"
#include "base/environment.h"
#include "base/error_codec.h"
#include "base/log.h"
#include "collective/selection.h"
#include "group/environment_check.h"
#include "group/group_impl.h"
#include "group/subgroups.h"
#include "group/validate.h"
#include "rendezvous/init_notice.h"
#include "rendezvous/methods.h"
#include "rendezvous/rendezvous.h"

namespace maniple {
namespace {

std::shared_ptr<ProcessGroup> make_world(RendezvousResult result, const InitOptions& options, Deadline deadline) {
  GroupFacts facts;
  facts.name = "world";
  facts.backend = options.backend;
  facts.timeout = options.timeout;
  facts.transport = options.transport;
  if (facts.transport == TransportKind::automatic) facts.transport = parse_transport(knob_word(Knob::transport));
  facts.algorithm = options.algorithm.empty() ? knob_text(Knob::algorithm) : options.algorithm;
  facts.session = Session::start(std::move(result), facts.transport, deadline);
  std::vector<int> everyone(static_cast<std::size_t>(facts.session->world_size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  facts.topology = topology_of(*facts.session, everyone);
  auto world = std::make_shared<ProcessGroup>(std::make_unique<detail::GroupImpl>(std::move(facts), deadline));
  notify_init_done();
  return world;
}

// What can be refused before anyone else is involved.
Deadline check(const InitOptions& options) {
  check_environment(options);
  MANIPLE_REQUIRE(options.timeout.count() > 0, "timeout is {} s; it must be positive", options.timeout.count());
  MANIPLE_REQUIRE(!options.init_timeout || options.init_timeout->count() > 0,
                  "init_timeout is {} s; it must be positive", options.init_timeout->count());
  require_transport(options.transport);
  MANIPLE_REQUIRE(
      options.backend != "tcp" && options.backend != "shm",
      "backend \"{}\": it is a transport of the backend native now; write .backend = \"native\", .transport = "
      "maniple::TransportKind::{}",
      options.backend, options.backend);
  find_backend(options.backend);
  // A world of one may have been started by the program itself; the engine knows.
  const int size =
      options.world_size > 0 ? options.world_size : std::atoi(environment_text("WORLD_SIZE").value_or("0").c_str());
  if (options.backend == "mpi" && size != 1 && !started_by_mpirun()) throw Unsupported(needs_mpirun(size));
  require_algorithm(options.algorithm);
  return Deadline::after(std::min(options.init_timeout.value_or(options.timeout), options.timeout));
}

// The program brought the store, so whoever can use it belongs to the job: it can carry the secret.
Secret secret_from(Store& store) {
  const Secret fresh = Secret::random();
  const std::string bytes(fresh.bytes.begin(), fresh.bytes.end());
  const std::string chosen = store.compare_set("maniple/secret", "", bytes);
  if (chosen.size() != fresh.bytes.size()) throw ProtocolError("the store's key maniple/secret holds something else");
  Secret secret;
  std::copy(chosen.begin(), chosen.end(), secret.bytes.begin());
  return secret;
}

std::shared_ptr<ProcessGroup> init_with(std::shared_ptr<Store> store, const InitOptions& options, Deadline deadline) {
  MANIPLE_REQUIRE(store != nullptr, "init: no store was given");
  MANIPLE_REQUIRE(options.world_size >= 1, "init: world_size is {}; it must be given with a store", options.world_size);
  MANIPLE_REQUIRE(options.rank >= 0 && options.rank < options.world_size, "init: rank {} in a world of {}",
                  options.rank, options.world_size);
  notify_init_started(options.world_size);
  RendezvousResult result;
  result.identity.secret = secret_from(*store);
  result.identity.rank = options.rank;
  result.identity.world_size = options.world_size;
  const std::string interface = knob_text(Knob::interface_name);
  result.data_address = interface.empty() ? Address::parse("127.0.0.1:0") : Address::of_interface(interface);
  result.store = std::move(store);
  return make_world(std::move(result), options, deadline);
}

// A process that cannot begin mostly ends: whoever started it learns why.
template <class Body>
std::shared_ptr<ProcessGroup> reporting(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    report_failure(error.info());
    throw;
  }
}

}  // namespace

std::shared_ptr<ProcessGroup> init(const InitOptions& options) {
  return reporting([&] {
    const Deadline deadline = check(options);
    if (has_no_launcher(options)) {
      log_warning(
          "init: no launcher has set RANK and WORLD_SIZE, so this process is a world of one rank; start several with "
          "`maniple run`");
      InitOptions alone = options;
      alone.rank = 0;
      alone.world_size = 1;
      return init_with(make_memory_store(), alone, deadline);
    }
    notify_init_started(options.world_size);
    return make_world(rendezvous(options, deadline), options, deadline);
  });
}

std::shared_ptr<ProcessGroup> init(std::shared_ptr<Store> store, const InitOptions& options) {
  return reporting([&] { return init_with(std::move(store), options, check(options)); });
}

}  // namespace maniple
