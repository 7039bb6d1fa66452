#include "launch/coordinate/node_agent.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include <fmt/format.h>

#include "base/check.h"
#include "base/crypto.h"
#include "base/system_error.h"
#include "net/port_holder.h"

namespace maniple::launch {
namespace {

using Kind = AgentMessage::Kind;

}  // namespace

Secret secret_of_generation(const Secret& job, int generation) {
  if (job.is_none()) return job;
  const std::string text = fmt::format("maniple workers of generation {}", generation);
  Secret secret;
  unsigned int length = 0;
  prepare_crypto();
  const unsigned char* made =
      ::HMAC(::EVP_sha256(), job.bytes.data(), static_cast<int>(job.bytes.size()),
             reinterpret_cast<const unsigned char*>(text.data()), text.size(), secret.bytes.data(), &length);
  MANIPLE_ASSERT(made != nullptr && length == secret.bytes.size());
  return secret;
}

UniqueFd reserve_port(const Address& address) {
  UniqueFd fd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw_system_error("a socket for rank 0");
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd.get(), address.get(), address.length()) != 0) {
    const int code = errno;
    std::string text = fmt::format("rank 0 cannot listen on {}: {}", address.to_string(), errno_text(code));
    if (code == EADDRINUSE) {
      if (const auto holder = describe_port_holder(address.port())) text += fmt::format("; it is held by {}", *holder);
      text += "; choose another --master port, or 0 for any free one";
    }
    throw SystemError(text, code);
  }
  return fd;
}

UniqueFd secret_in_memory(const Secret& secret) {
  UniqueFd file(::memfd_create("maniple-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) throw_system_error("memfd_create");
  if (::write(file.get(), secret.bytes.data(), secret.bytes.size()) != static_cast<ssize_t>(secret.bytes.size())) {
    throw_system_error("writing the job's secret");
  }
  ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return file;
}

NodeAgent::NodeAgent(Poller& poller, Console& console, NodeSettings settings, Reply reply)
    : settings_(std::move(settings)),
      reply_(std::move(reply)),
      worker_group_(poller, console, settings_.worker_group,
            WorkerGroup::Events{.failed =
                             [this](const RankExit& exit) {
                               AgentMessage message{.kind = Kind::failed};
                               message.generation = generation_;
                               message.exit = exit;
                               reply_(message);
                             },
                         .left =
                             [this](const RankExit& exit) {
                               AgentMessage message{.kind = Kind::left};
                               message.generation = generation_;
                               message.exit = exit;
                               reply_(message);
                             },
                         .waits =
                             [this](int rank) {
                               AgentMessage message{.kind = Kind::waits};
                               message.generation = generation_;
                               message.exit.rank = rank;
                               reply_(message);
                             },
                         .finished =
                             [this] {
                               AgentMessage message{.kind = Kind::finished};
                               message.generation = generation_;
                               reply_(message);
                             },
                         .ended =
                             [this] {
                               AgentMessage message{.kind = Kind::stopped};
                               message.generation = generation_;
                               reply_(message);
                             }}) {}

void NodeAgent::handle(const AgentMessage& message) {
  switch (message.kind) {
    case Kind::reserve: return reserve(message.generation);
    case Kind::start: return start(message);
    case Kind::signal: return worker_group_.signal_all(message.signal);
    case Kind::stop: return worker_group_.end(message.signal, std::chrono::milliseconds(message.grace_ms));
    default: return;
  }
}

void NodeAgent::reserve(int generation) {
  AgentMessage answer{.kind = Kind::reserved};
  answer.generation = generation;
  try {
    reserved_.reset();
    reserved_ = reserve_port(settings_.master_address);
    const Address bound = Address::of_socket(reserved_.get());
    answer.host = bound.host();
    answer.port = bound.port();
  } catch (const Error& error) {
    answer.text = fmt::format("maniple: {}", error.what());
  }
  reply_(answer);
}

void NodeAgent::start(const AgentMessage& order) {
  generation_ = order.generation;
  if (!order.text.empty()) settings_.job = order.text;
  std::vector<WorkerAssignment> assignments;
  for (int local = 0; local < order.processes; ++local) {
    assignments.push_back({.rank = order.first_rank + local,
                     .node_rank = order.node_rank,
                     .local_rank = local,
                     .local_size = order.processes,
                     .world_size = order.world_size,
                     .first_device = local * order.devices_per_process,
                     .device_count = order.devices_per_process});
  }
  try {
    NodeEnvironment node{.master_addr = order.host,
                         .master_port = order.port,
                         .node_count = order.node_count,
                         .job = settings_.job,
                         .generation = order.generation,
                         .restarts = order.restarts,
                         .max_restarts = settings_.max_restarts};
    secret_.reset();
    const Secret secret =
        settings_.own_secrets ? Secret::random() : secret_of_generation(settings_.secret, order.generation);
    if (!secret.is_none()) secret_ = secret_in_memory(secret);
    node.secret_fd = secret_.get();
    if (order.devices_per_process > 0) node.devices = visible_devices(settings_.worker_group.environment);
    worker_group_.start(assignments, std::move(node), order.core_first, order.core_total);
  } catch (const ProgramError& error) {
    report_failed_start(order, error.what(), error.exit_code);
  } catch (const InvalidArgument& error) {
    report_failed_start(order, error.what(), 2);
  } catch (const Error& error) {
    report_failed_start(order, error.what(), 1);
  }
}

void NodeAgent::report_failed_start(const AgentMessage& order, const std::string& text, int code) {
  AgentMessage message{.kind = Kind::failed};
  message.generation = order.generation;
  message.exit.rank = order.first_rank;
  message.exit.node_rank = order.node_rank;
  message.exit.host = settings_.worker_group.host;
  message.exit.pid = -1;
  message.exit.code = code;
  message.exit.error = text;
  reply_(message);
}

}  // namespace maniple::launch
