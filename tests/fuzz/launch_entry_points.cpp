#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"
#include "launch/coordinate/agent_message.h"
#include "process/failure_report.h"
#include "launch/option_values.h"
#include "launch/placement/rank_plan.h"

namespace maniple::fuzz {

void launch_options(std::string_view bytes) {
  using namespace maniple::launch;
  tolerate([&] {
    for (const HostSlots& host : parse_hosts(bytes)) require(!host.host.empty() && host.host.front() != '-' && host.slots >= 0);
  });
  tolerate([&] {
    for (const HostSlots& host : parse_hostfile(bytes, "hosts")) require(!host.host.empty() && host.host.front() != '-');
  });
  tolerate([&] { require(!parse_master(bytes).host.empty()); });
  tolerate([&] { require(parse_process_count(bytes, 2, 4) >= 1); });
  tolerate([&] { require(!parse_assignment(bytes).name.empty()); });
  tolerate([&] {
    const NodeRange range = parse_node_range(bytes);
    require(range.min >= 1 && range.max >= range.min);
  });
  require(blamed_rank(bytes) >= -1);
  require(rate_error_line(bytes) >= 0);
}

void agent_message(std::string_view bytes) {
  tolerate([&] { require(encode(launch::decode_agent_message(bytes)) == bytes); });
}

std::vector<std::string> launch_options_seeds() {
  return {"a:4,b:4", "[fe80::1]:2,user@host", "# hosts\na slots=4\nb 2\nc:3\n", "10.0.0.1:29500", "2:4", "auto", "NAME=VALUE",
          "[barrier #3 world rank 0/2] rank 1 (pid 7 on vm) is lost: its process ended", "  what():  x"};
}

std::vector<std::string> agent_message_seeds() {
  launch::AgentMessage message{.kind = launch::AgentMessage::Kind::failed, .generation = 1, .host = "h", .text = "t", .words = {"a=b", ""}};
  message.exit = {.rank = 1, .host = "h", .pid = 7, .signal = 9, .cause = "c", .error = "e", .tail = {"x", "y"}, .at_us = 5};
  return {launch::encode({}), launch::encode(message)};
}

}  // namespace maniple::fuzz
