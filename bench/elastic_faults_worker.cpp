// A training whose ranks may kill themselves, for `maniple bench elastic` (tools/bench/elastic_bench.h).
//
//   maniple run -n 4 --elastic 1:4 elastic_faults_worker FILE MODEL 4 FAULTS SECONDS
//
// All processes append records (tools/bench/elastic_event.h) to FILE. Every kPause steps, if all 4 ranks are there, one
// of them kills itself, until FAULTS have died and are replaced; the victims are the ranks in turn. With FAULTS = 0 the
// training ends after SECONDS.
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include <torch/torch.h>

#include "bench/elastic_models.h"
#include "tools/bench/elastic_event.h"
#include <maniple/maniple.h>

namespace {

using maniple::bench::ElasticEvent;

constexpr int kPause = 10;

double seconds_of(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

class Events {
 public:
  explicit Events(const std::string& path) : file_(open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) {
    if (file_ < 0) throw std::runtime_error("cannot open " + path);
  }
  void add(ElasticEvent::Kind kind, std::int64_t step = 0, int rank = 0, int ranks = 0) {
    const ElasticEvent event{.at = seconds_of(CLOCK_MONOTONIC),
                             .cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID),
                             .step = step,
                             .pid = getpid(),
                             .rank = rank,
                             .ranks = ranks,
                             .kind = kind};
    if (write(file_, &event, sizeof event) != static_cast<ssize_t>(sizeof event))
      throw std::runtime_error("cannot write an event");
  }
  /// Faults before `step`: a number that is the same on all ranks.
  int faults_before(std::int64_t step) const {
    int count = 0;
    ElasticEvent event;
    for (off_t at = 0; pread(file_, &event, sizeof event, at) == static_cast<ssize_t>(sizeof event); at += sizeof event)
      count += event.kind == ElasticEvent::Kind::killed && event.step < step ? 1 : 0;
    return count;
  }

 private:
  int file_;
};

void train(const std::string& path, const std::string& model, int all_ranks, int faults, double seconds) {
  maniple::init_process_group();
  torch::manual_seed(1);
  auto net = elastic_bench::made(model);
  maniple::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-4));
  Events events(path);
  maniple::Trainer* running = nullptr;
  double began = 0;
  maniple::TrainerOptions options{.epochs = 1000};
  options.log_every = 1 << 20;
  options.progress = false;
  options.virtual_ranks = all_ranks;
  options.on_step = [&](const maniple::TrainerState& state) {
    const int rank = running->rank(), ranks = running->ranks();
    events.add(ElasticEvent::Kind::step, state.step, rank, ranks);
    if (began == 0) began = seconds_of(CLOCK_MONOTONIC);
    if (faults == 0 && rank == 0 && seconds_of(CLOCK_MONOTONIC) - began > seconds) running->stop();
    if (faults == 0 || ranks < all_ranks || state.step % kPause != 0) return;
    const int before = events.faults_before(state.step);
    if (before == faults) return running->stop();
    if (before % ranks != rank) return;
    events.add(ElasticEvent::Kind::killed, state.step, rank, ranks);
    std::raise(SIGKILL);
  };
  maniple::Trainer trainer(net, optimizer, options);
  running = &trainer;
  maniple::DataLoader train(elastic_bench::Images{}, {.batch_size = 32});
  events.add(ElasticEvent::Kind::ready);
  trainer.fit(
      train, [&](auto& batch) { return torch::nn::functional::cross_entropy(net->forward(batch.data), batch.target); });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr,
                 "usage: elastic_faults_worker FILE MODEL RANKS FAULTS SECONDS; `maniple bench elastic` starts it\n");
    return 2;
  }
  train(argv[1], argv[2], std::atoi(argv[3]), std::atoi(argv[4]), std::atof(argv[5]));
}
