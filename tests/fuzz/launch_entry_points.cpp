#include "fuzz/entry_points.h"
#include "fuzz/tolerate.h"
#include "launch/coordinate/agent_message.h"
#include "launch/option_values.h"
#include "launch/output/output_tail.h"
#include "launch/placement/rank_plan.h"

namespace maniple::fuzz {

void launch_options(std::string_view bytes) {
  using namespace maniple::launch;
  tolerate([&] {
    for (const HostSlots& host : parse_hosts(bytes))
      require(!host.host.empty() && host.host.front() != '-' && host.slots >= 0);
  });
  tolerate([&] {
    for (const HostSlots& host : parse_hostfile(bytes, "hosts"))
      require(!host.host.empty() && host.host.front() != '-');
  });
  tolerate([&] { require(!parse_master(bytes).host.empty()); });
  tolerate([&] { require(parse_process_count(bytes, 2, 4) >= 1); });
  tolerate([&] { require(!parse_assignment(bytes).name.empty()); });
  tolerate([&] {
    const NodeRange range = parse_node_range(bytes);
    require(range.min >= 1 && range.max >= range.min);
  });
  OutputTail tail;
  tail.take(bytes, true);
  require(tail.lines(tail.error()).size() <= OutputTail::kLines);
}

void agent_message(std::string_view bytes) {
  tolerate([&] { require(launch::encode(launch::decode_agent_message(bytes)) == bytes); });
}

std::vector<std::string> launch_options_seeds() {
  return {"a:4,b:4",
          "[fe80::1]:2,user@host",
          "# hosts\na slots=4\nb 2\nc:3\n",
          "10.0.0.1:29500",
          "2:4",
          "auto",
          "NAME=VALUE",
          "ValueError: x\n",
          "  what():  x"};
}

namespace {

launch::LaunchOptions job_options() {
  launch::LaunchOptions options;
  options.command = {"a", ""};
  options.folder = "/f";
  options.environment = {{.name = "A", .value = "b"}};
  options.only_ranks = {1, 2};
  return options;
}

}  // namespace

std::vector<std::string> agent_message_seeds() {
  namespace message = launch::message;
  const launch::RankExit exit{.rank = 1,
                              .host = "h",
                              .pid = 7,
                              .signal = 9,
                              .cause = "c",
                              .error = "e",
                              .consequence = true,
                              .tail = {"x", "y"},
                              .at_us = 5};
  const std::vector<launch::AgentMessage> messages = {message::Join{.host = "h", .core_set = "c", .launcher = "l"},
                                                      message::Job{.name = "run-1", .options = job_options()},
                                                      message::Reserve{.generation = 1},
                                                      message::Reserved{.host = "h", .port = 9, .error = "e"},
                                                      message::Start{.generation = 1, .host = "h", .job = "j"},
                                                      message::Failed{.generation = 1, .exit = exit},
                                                      message::Verdict{.text = "t"},
                                                      message::Stop{.generation = 1, .signal = 15, .reported = {1, -1}},
                                                      message::Signal{.signal = 19, .host = "h"},
                                                      message::Quit{.code = 1, .text = "t"},
                                                      message::Alive{.heartbeat_ms = 1, .silence_ms = 2}};
  std::vector<std::string> seeds;
  for (const launch::AgentMessage& each : messages) seeds.push_back(launch::encode(each));
  return seeds;
}

}  // namespace maniple::fuzz
