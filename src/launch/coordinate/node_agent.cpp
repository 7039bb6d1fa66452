#include "launch/coordinate/node_agent.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>

#include <fmt/format.h>

#include "comm/base/check.h"
#include "comm/base/crypto.h"
#include "launch/process/descriptors.h"

namespace maniple::launch {

Secret secret_of_generation(const Secret& job, int generation) {
  if (job.is_none()) return job;
  const std::string text = fmt::format("maniple workers of generation {}", generation);
  Secret secret;
  unsigned int length = 0;
  const unsigned char* made = MANIPLE_CRYPTO(HMAC)(
      MANIPLE_CRYPTO(EVP_sha256)(), job.bytes.data(), static_cast<int>(job.bytes.size()),
      reinterpret_cast<const unsigned char*>(text.data()), text.size(), secret.bytes.data(), &length);
  MANIPLE_ASSERT(made != nullptr && length == secret.bytes.size());
  return secret;
}

NodeAgent::NodeAgent(Poller& poller, Console& console, NodeSettings settings, Reply reply)
    : settings_(std::move(settings)),
      reply_(std::move(reply)),
      worker_group_(
          poller, console, settings_.worker_group,
          {.failed = [this](const RankExit& exit) { reply_(message::Failed{generation_, exit}); },
           .absent = [this](const RankExit& exit) { reply_(message::Absent{generation_, exit}); },
           .waiting = [this](int rank) { reply_(message::Waiting{generation_, rank}); },
           .exited = [this](const RankExit& exit) { reply_(message::Exited{generation_, exit}); },
           .finished = [this] { reply_(message::Finished{generation_}); },
           .ended = [this] { reply_(message::Stopped{generation_}); },
           .noticed = [this](const WorkerNotice& notice) { reply_(message::Noticed{generation_, notice}); }}) {}

void NodeAgent::handle(const AgentMessage& message) {
  std::visit(overloaded{[this](const message::Reserve& asked) { reserve(asked); },
                        [this](const message::Start& asked) { start(asked); },
                        [this](const message::Signal& passed) { worker_group_.signal_all(passed.signal); },
                        [this](const message::Stop& stop) {
                          if (!stop.leaves) worker_group_.announce_end();
                          worker_group_.end(stop.signal, std::chrono::milliseconds(stop.grace_ms), stop.reported);
                        },
                        [this](const message::Members& members) {
                          worker_group_.publish(static_cast<std::uint32_t>(members.members_generation), members.members,
                                                members.host, members.port);
                        },
                        [this](const message::Replace& asked) { replace(asked); },
                        [this](const message::Kill& asked) { worker_group_.signal(asked.worker, asked.signal); },
                        [this](const message::Finish&) { worker_group_.finish(); }, [](const auto&) {}},
             message);
}

void NodeAgent::replace(const message::Replace& asked) {
  try {
    worker_group_.replace(asked.worker, asked.joins_late);
  } catch (const Error& error) {
    reply_(message::Failed{
        generation_, {.rank = asked.worker, .host = settings_.worker_group.host, .code = 1, .error = error.what()}});
  }
}

void NodeAgent::reserve(const message::Reserve& asked) {
  message::Reserved answer{.generation = asked.generation, .members_generation = asked.members_generation};
  try {
    reserved_.reset();
    const Address& master = settings_.master_address;
    reserved_ = reserve_port(asked.members_generation > 0 ? master.with_port(0) : master);
    const Address bound = Address::of_socket(reserved_.get());
    answer.host = bound.host();
    answer.port = bound.port();
  } catch (const Error& error) {
    answer.error = fmt::format("maniple: {}", error.what());
  }
  reply_(answer);
}

namespace {

/// By default MPS gives a process 2 queues for all its streams, so one stream that waits for another rank holds up half
/// of them. But a GPU lacks queues for many ranks with 32 each: with 2 each they worked, with 4 only some could start.
int queues_of_rank(int ranks, int gpus) {
  constexpr int kOfAll = 32, kAtLeast = 2;
  const int on_one = gpus > 0 ? (ranks + gpus - 1) / gpus : ranks;
  return std::max(kAtLeast, kOfAll / std::max(on_one, 1));
}

}  // namespace

void NodeAgent::start(const message::Start& start) {
  generation_ = start.generation;
  if (!start.job.empty()) settings_.job = start.job;
  const WorkerGroupSettings& workers = settings_.worker_group;
  std::vector<std::string> devices;
  if (start.devices_per_process > 0 || workers.share_gpu) devices = visible_devices(workers.environment);
  int shared = workers.share_gpu ? workers.devices_per_node : 0;
  if (workers.share_gpu && shared == 0) shared = static_cast<int>(devices.size());
  std::vector<WorkerAssignment> assignments;
  for (int local = 0; local < start.processes; ++local) {
    assignments.push_back({.rank = start.first_rank + local,
                           .node_rank = start.node_rank,
                           .local_rank = local,
                           .local_size = start.processes,
                           .world_size = start.world_size});
    assign_devices(assignments.back(), start.devices_per_process, shared);
  }
  try {
    NodeEnvironment node{.master_addr = start.host,
                         .master_port = start.port,
                         .node_count = start.node_count,
                         .job = settings_.job,
                         .generation = start.generation,
                         .restarts = start.restarts,
                         .max_restarts = settings_.max_restarts,
                         .devices = std::move(devices),
                         .gpu_queues = workers.share_gpu ? queues_of_rank(start.processes, shared) : 0};
    secret_.reset();
    const Secret secret =
        settings_.own_secrets ? Secret::random() : secret_of_generation(settings_.secret, start.generation);
    if (!secret.is_none()) {
      secret_ =
          sealed_memory("maniple-secret", {reinterpret_cast<const char*>(secret.bytes.data()), secret.bytes.size()});
    }
    node.secret_fd = secret_.get();
    node.joins_late = start.joins_late;
    worker_group_.start(assignments, std::move(node), start.core_first, start.core_total);
  } catch (const ProgramError& error) {
    report_failed_start(start, error.what(), error.exit_code);
  } catch (const InvalidArgument& error) {
    report_failed_start(start, error.what(), 2);
  } catch (const Error& error) {
    report_failed_start(start, error.what(), 1);
  }
}

void NodeAgent::report_failed_start(const message::Start& start, const std::string& text, int code) {
  reply_(message::Failed{generation_,
                         {.rank = start.first_rank,
                          .node_rank = start.node_rank,
                          .host = settings_.worker_group.host,
                          .pid = -1,
                          .code = code,
                          .error = text}});
}

}  // namespace maniple::launch
