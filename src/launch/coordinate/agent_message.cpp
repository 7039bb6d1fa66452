#include "launch/coordinate/agent_message.h"

#include <bit>
#include <chrono>
#include <concepts>
#include <utility>

#include "comm/base/codec.h"

namespace maniple::launch {
namespace {

constexpr std::size_t kMaxText = std::size_t{64} << 10;
constexpr std::size_t kMaxListed = std::size_t{256} << 10;  // a setting is larger than a text
constexpr std::uint32_t kMaxList = 65536;
constexpr double kMaxSeconds = 1e9;

/// T, or const T.
template <class M, class T>
concept Is = std::same_as<std::remove_const_t<M>, T>;

// The fields of each message in wire order, for reading and for writing.

template <Is<RankExit> M, class V>
void each_field(M& m, V& visit) {
  visit(m.rank, m.node_rank, m.pid, m.code, m.signal, m.blamed, m.left, m.at_us, m.consequence, m.host, m.cause,
        m.error, m.tail);
}
/// The options that concern every node.
template <Is<LaunchOptions> M, class V>
void each_field(M& m, V& visit) {
  visit(m.command, m.folder, m.environment, m.log_folder, m.only_ranks, m.bind, m.cores_per_process, m.verbose,
        m.terminal_output, m.share_gpu, m.devices_per_node, m.console.quiet, m.console.prefix, m.console.status,
        m.console.colour, m.join_timeout, m.restarts.max_restarts, m.elastic.min, m.elastic.max);
}
template <Is<message::Join> M, class V>
void each_field(M& m, V& visit) {
  visit(m.node_rank, m.processes, m.devices_per_process, m.min_nodes, m.max_nodes, m.min_workers, m.max_workers, m.host,
        m.core_set, m.launcher);
}
template <Is<message::Job> M, class V>
void each_field(M& m, V& visit) {
  visit(m.name);
  each_field(m.options, visit);
}
template <Is<message::Reserve> M, class V>
void each_field(M& m, V& visit) {
  visit(m.generation, m.members_generation);
}
template <Is<message::Reserved> M, class V>
void each_field(M& m, V& visit) {
  visit(m.generation, m.members_generation, m.host, m.port, m.error);
}
template <Is<message::Start> M, class V>
void each_field(M& m, V& visit) {
  visit(m.generation, m.restarts, m.node_rank, m.node_count, m.processes, m.devices_per_process, m.first_rank,
        m.world_size, m.core_first, m.core_total, m.host, m.port, m.job, m.joins_late);
}
template <Is<message::Waiting> M, class V>
void each_field(M& m, V& visit) {
  visit(m.generation, m.rank);
}
template <class M, class V>
  requires Is<M, message::Absent> || Is<M, message::Exited> || Is<M, message::Failed>
void each_field(M& m, V& visit) {
  visit(m.generation);
  each_field(m.exit, visit);
}
template <class M, class V>
  requires Is<M, message::Finished> || Is<M, message::Stopped> || Is<M, message::Finish>
void each_field(M& m, V& visit) {
  visit(m.generation);
}
template <Is<message::Interrupt> M, class V>
void each_field(M& m, V& visit) {
  visit(m.signal);
}
template <Is<message::Verdict> M, class V>
void each_field(M& m, V& visit) {
  visit(m.text);
}
template <Is<message::Stop> M, class V>
void each_field(M& m, V& visit) {
  visit(m.generation, m.signal, m.grace_ms, m.reported, m.leaves);
}
template <Is<message::Signal> M, class V>
void each_field(M& m, V& visit) {
  visit(m.signal, m.host, m.text);
}
template <Is<message::Quit> M, class V>
void each_field(M& m, V& visit) {
  visit(m.code, m.text);
}
template <Is<message::Alive> M, class V>
void each_field(M& m, V& visit) {
  visit(m.heartbeat_ms, m.silence_ms);
}
template <Is<message::Dropped> M, class V>
void each_field(M& m, V& visit) {
  visit(m.silence_ms);
}

template <Is<message::Noticed> M, class V>
void each_field(M& m, V& visit) {
  visit(m.generation, m.notice.kind, m.notice.rank, m.notice.generation, m.notice.lost);
}
template <Is<message::Members> M, class V>
void each_field(M& m, V& visit) {
  visit(m.generation, m.members_generation, m.members, m.host, m.port);
}
template <Is<message::Replace> M, class V>
void each_field(M& m, V& visit) {
  visit(m.generation, m.worker, m.joins_late);
}
template <Is<message::Kill> M, class V>
void each_field(M& m, V& visit) {
  visit(m.generation, m.worker, m.signal);
}

struct Writer {
  ByteWriter out;

  void operator()(const auto&... fields) { (put(fields), ...); }
  void put(int value) { out.put(static_cast<std::int32_t>(value)); }
  void put(std::int64_t value) { out.put(value); }
  void put(std::uint32_t value) { out.put(value); }
  void put(WorkerNotice::Kind kind) { out.put(static_cast<std::uint8_t>(kind)); }
  void put(bool value) { out.put(static_cast<std::uint8_t>(value)); }
  void put(const std::string& text) { out.put_string(std::string_view(text).substr(0, kMaxText)); }
  void put(const std::vector<std::string>& list) {
    out.put(static_cast<std::uint32_t>(list.size()));
    for (const std::string& text : list) out.put_string(text);
  }
  void put(const std::vector<Assignment>& list) {
    out.put(static_cast<std::uint32_t>(list.size()));
    for (const Assignment& assignment : list) {
      out.put_string(assignment.name);
      out.put_string(assignment.value);
    }
  }
  void put(std::chrono::duration<double> time) { out.put(std::bit_cast<std::uint64_t>(time.count())); }
  void put(BindPolicy policy) { out.put(static_cast<std::uint8_t>(policy)); }
  void put(ColourChoice choice) { out.put(static_cast<std::uint8_t>(choice)); }
  void put(const std::vector<int>& list) {
    out.put(static_cast<std::uint32_t>(list.size()));
    for (const int value : list) put(value);
  }
};

struct Reader {
  ByteReader in;

  void operator()(auto&... fields) { (get(fields), ...); }
  void get(int& value) { value = in.get<std::int32_t>(); }
  void get(std::int64_t& value) { value = in.get<std::int64_t>(); }
  void get(std::uint32_t& value) { value = in.get<std::uint32_t>(); }
  void get(WorkerNotice::Kind& kind) {
    kind = static_cast<WorkerNotice::Kind>(choice(static_cast<int>(WorkerNotice::Kind::lost)));
  }
  void get(bool& value) { value = choice(1) == 1; }
  void get(BindPolicy& policy) { policy = static_cast<BindPolicy>(choice(static_cast<int>(BindPolicy::none))); }
  void get(ColourChoice& colour) { colour = static_cast<ColourChoice>(choice(static_cast<int>(ColourChoice::never))); }
  int choice(int last) {
    const int value = in.get<std::uint8_t>();
    if (value > last) throw ProtocolError("a choice that is " + std::to_string(value));
    return value;
  }
  void get(std::chrono::duration<double>& time) {
    const auto seconds = std::bit_cast<double>(in.get<std::uint64_t>());
    if (!(seconds >= 0 && seconds <= kMaxSeconds)) throw ProtocolError("a time of " + std::to_string(seconds) + " s");
    time = std::chrono::duration<double>(seconds);
  }
  void get(std::vector<Assignment>& list) {
    for (std::uint32_t left = count(); left > 0; --left) {
      Assignment& assignment = list.emplace_back();
      assignment.name = in.get_string(kMaxListed);
      assignment.value = in.get_string(kMaxListed);
      if (assignment.name.empty()) throw ProtocolError("a variable without a name");
    }
  }
  void get(std::string& text) { text = in.get_string(kMaxText); }
  void get(std::vector<std::string>& list) {
    for (std::uint32_t left = count(); left > 0; --left) list.emplace_back(in.get_string(kMaxListed));
  }
  void get(std::vector<int>& list) {
    for (std::uint32_t left = count(); left > 0; --left) get(list.emplace_back());
  }
  std::uint32_t count() {
    const auto count = in.get<std::uint32_t>();
    if (count > kMaxList) throw ProtocolError("a list of " + std::to_string(count));
    return count;
  }
};

using Kind = std::uint8_t;

/// Reads the alternative number `kind`.
template <std::size_t... kinds>
AgentMessage read_message(Kind kind, Reader& reader, std::index_sequence<kinds...>) {
  AgentMessage message;
  const auto read = [&]<std::size_t number>(std::integral_constant<std::size_t, number>) {
    if (kind == number) each_field(message.emplace<number>(), reader);
  };
  (read(std::integral_constant<std::size_t, kinds>()), ...);
  return message;
}

}  // namespace

std::string encode(const AgentMessage& message) {
  Writer writer;
  writer.out.put(static_cast<Kind>(message.index()));
  std::visit([&](const auto& fields) { each_field(fields, writer); }, message);
  return writer.out.take();
}

AgentMessage decode_agent_message(std::string_view bytes) {
  constexpr std::size_t kKinds = std::variant_size_v<AgentMessage>;
  Reader reader{ByteReader(bytes)};
  const auto kind = reader.in.get<Kind>();
  if (kind >= kKinds) throw ProtocolError("a message of unknown kind " + std::to_string(kind));
  AgentMessage message = read_message(kind, reader, std::make_index_sequence<kKinds>());
  reader.in.expect_end();
  return message;
}

}  // namespace maniple::launch
