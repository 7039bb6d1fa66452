// Internal: one rank of a measurement, started by `maniple bench`.
#include <CLI/CLI.hpp>

#include <memory>

#include "bench/native_subject.h"
#include "cli/command.h"

namespace maniple::cli {
namespace {

struct WorkerArguments {
  std::string order;
  int rank = 0;
  std::string rendezvous;
};

}  // namespace

std::function<int()> declare_bench_worker(CLI::App& app) {
  auto arguments = std::make_shared<WorkerArguments>();
  app.add_option("order", arguments->order)->required();
  app.add_option("rank", arguments->rank)->required();
  app.add_option("rendezvous", arguments->rendezvous)->required();
  return [arguments] {
    bench::work_as_rank(bench::parse_order(arguments->order), arguments->rank, arguments->rendezvous);
    return 0;
  };
}

}  // namespace maniple::cli
