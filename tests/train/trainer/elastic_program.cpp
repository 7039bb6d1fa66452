// The training of elastic_faults_test.sh. Prints a hash of the weights at its end; --fault makes it fail.
//
//   elastic_program FOLDER [OPTION VALUE] ...
//
// FOLDER receives log.jsonl, "checkpoints" with --checkpoints, and a file for each start of a worker ("start.W.N") and
// each fault that happened ("fault.F.W").
//
//   --fault ACTION:POINT:STEP:WORKERS[:START]   may be given several times
//     ACTION    kill, stop (SIGSTOP), hang, throw, term (SIGTERM), term_kill, or next: wait for the next generation
//               if the current one is smaller than the first one of this process
//     POINT     main, made (before fit), loss, step, evaluation, epoch, saving, loading, returned, or forming: when the
//               launcher publishes generation STEP
//     STEP      finished steps at that point; -1: any
//     WORKERS   0,2 or all
//     START     how often the worker was started before (0); -1: any, and not only once
//   --virtual-ranks N, --seed N, ...      see below
//   --again-OPTION VALUE                  for replacements only
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>

#include <torch/torch.h>

#include "comm/rendezvous/elastic_worker.h"
#include <maniple/maniple.h>

namespace {

struct Fault {
  std::string action, point;
  long step = -1;
  std::string workers;
  int start = 0;
};

std::string folder;
int worker = 0, starts = 0, first_size = 0;
std::vector<Fault> faults;
const maniple::Trainer* running = nullptr;

/// Whether the file did not exist.
bool makes(const std::string& name) {
  const int fd = ::open((folder + "/" + name).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}

bool is_listed(const std::string& workers) {
  if (workers == "all") return true;
  std::istringstream in(workers);
  for (std::string number; std::getline(in, number, ',');) {
    if (std::stoi(number) == worker) return true;
  }
  return false;
}

void act(const std::string& action) {
  std::fprintf(stderr, "fault: %s of worker %d\n", action.c_str(), worker);
  if (action == "throw") throw std::runtime_error("the fault of the test");
  if (action == "kill") ::raise(SIGKILL);
  if (action == "stop") ::raise(SIGSTOP);
  if (action == "term" || action == "term_kill") ::raise(SIGTERM);
  if (action == "term_kill") ::raise(SIGKILL);
  if (action == "next" && maniple::get_world_size() < first_size) {
    const maniple::ElasticWorker& own = *maniple::elastic_worker();
    own.page.await(own.generation, maniple::Deadline::never());
  }
  while (action == "hang") ::pause();
}

bool applies(std::size_t i, const std::string& point) {
  const Fault& fault = faults[i];
  return fault.point == point && (fault.start < 0 || fault.start == starts) && is_listed(fault.workers);
}

void at(const std::string& point) {
  const long step = running != nullptr ? static_cast<long>(running->state().step) : -1;
  for (std::size_t i = 0; i < faults.size(); ++i) {
    if (!applies(i, point) || (faults[i].step >= 0 && faults[i].step != step)) continue;
    const std::string name = "fault." + std::to_string(i) + "." + std::to_string(worker);
    if (makes(name) || faults[i].start < 0) act(faults[i].action);
  }
}

/// Acts when the launcher publishes the generation, before this worker has met the others.
void watch_generations() {
  for (std::size_t i = 0; i < faults.size(); ++i) {
    if (!applies(i, "forming")) continue;
    std::thread([i] {
      const auto generation = static_cast<std::uint32_t>(faults[i].step);
      maniple::elastic_worker()->page.await(generation - 1, maniple::Deadline::never());
      act(faults[i].action);
    }).detach();
  }
}

std::uint64_t hash_of(const torch::nn::Sequential& net) {
  std::uint64_t hash = 14695981039346656037U;
  std::vector<torch::Tensor> tensors = net->parameters();
  for (const torch::Tensor& buffer : net->buffers()) tensors.push_back(buffer);
  for (const torch::Tensor& tensor : tensors) {
    const torch::Tensor whole = tensor.detach().contiguous();
    const auto* const bytes = static_cast<const unsigned char*>(whole.data_ptr());
    for (std::size_t i = 0; i < whole.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
  }
  return hash;
}

/// Options, with their defaults.
std::map<std::string, std::string> given = {
    {"virtual-ranks", "4"},     {"virtual-threads", "1"}, {"seed", "1"},       {"width", "8"},
    {"samples", "360"},         {"test-samples", "50"},   {"epochs", "2"},     {"optimizer", "adamw"},
    {"learning-rate", "0.002"}, {"evaluate-every", "0"},  {"save-every", "0"}, {"patience", "0"},
    {"checkpoints", "0"},       {"timeout", "1800"},      {"clip", "5"},       {"allow-different", "0"},
    {"max-steps", "0"},         {"pace-ms", "0"}};

long number(const std::string& name) { return std::stol(given.at(name)); }

void read_options(int argc, char** argv) {
  for (int i = 2; i + 1 < argc; i += 2) {
    std::string name = std::string(argv[i]).substr(2);
    if (name == "fault") {
      Fault fault;
      std::string step, start;
      std::istringstream in(argv[i + 1]);
      std::getline(in, fault.action, ':');
      std::getline(in, fault.point, ':');
      std::getline(in, step, ':');
      std::getline(in, fault.workers, ':');
      fault.step = std::stol(step);
      if (std::getline(in, start)) fault.start = std::stoi(start);
      faults.push_back(fault);
      continue;
    }
    if (name.rfind("again-", 0) == 0) {
      if (starts == 0) continue;
      name = name.substr(6);
    }
    if (given.count(name) == 0) throw std::invalid_argument("no option --" + name);
    given[name] = argv[i + 1];
  }
}

int run() {
  at("main");
  maniple::init_process_group({.timeout = std::chrono::seconds(number("timeout"))});
  first_size = maniple::get_world_size();
  watch_generations();
  torch::manual_seed(static_cast<std::uint64_t>(number("seed")));
  namespace nn = torch::nn;
  const long width = number("width");
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(1, width, 5).stride(2)), nn::BatchNorm2d(width), nn::ReLU(),
                     nn::MaxPool2d(4), nn::Flatten(), nn::Dropout(0.2), nn::Linear(width * 9, 10));
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (given.at("optimizer") == "adamw")
    optimizer = std::make_unique<torch::optim::AdamW>(net->parameters(),
                                                      torch::optim::AdamWOptions(std::stod(given.at("learning-rate"))));
  else
    optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
  maniple::LrScheduler scheduler(*optimizer, maniple::lr::linear({.steps = 40}));
  const auto data = [](const std::string& name, std::uint64_t seed) {
    return maniple::Mnist::drawn(static_cast<std::size_t>(number(name)), seed);
  };
  maniple::DataLoader train(data("samples", 1), {.batch_size = 8, .seed = 7});
  maniple::DataLoader test(data("test-samples", 2), {.batch_size = 8, .mode = maniple::SamplerMode::evaluation});
  maniple::TrainerOptions options;
  options.epochs = static_cast<std::size_t>(number("epochs"));
  options.max_steps = number("max-steps");
  options.max_grad_norm = static_cast<double>(number("clip"));
  options.schedule = [&] { scheduler.step(); };
  options.save_every = number("save-every");
  options.evaluate_every = number("evaluate-every");
  options.patience = static_cast<int>(number("patience"));
  options.log_every = 3;
  options.progress = false;
  options.log_dir = folder;
  if (number("checkpoints") != 0) options.checkpoint.folder = folder + "/checkpoints";
  options.on_step = [](const maniple::TrainerState&) { at("step"); };
  options.on_epoch = [](const maniple::TrainerState&) { at("epoch"); };
  options.virtual_ranks = static_cast<int>(number("virtual-ranks"));
  options.virtual_threads = static_cast<int>(number("virtual-threads"));
  options.allow_different_bits = number("allow-different") != 0;
  maniple::Trainer trainer(net, *optimizer, options);
  trainer.add("scheduler", scheduler);
  trainer.add(
      "faults",
      [] {
        at("saving");
        return std::string("none");
      },
      [](const std::string&) { at("loading"); });
  running = &trainer;
  at("made");
  const maniple::TrainerState& end =
      trainer.fit(train, test, [&](auto& batch, maniple::Metrics& metrics) -> torch::Tensor {
        at(torch::GradMode::is_enabled() ? "loss" : "evaluation");
        const torch::Tensor scores = net->forward(batch.data);
        metrics.add_accuracy("accuracy", scores, batch.target);
        return torch::nn::functional::cross_entropy(scores, batch.target);
      });
  at("returned");
  if (end.end == maniple::TrainerEnd::stopped) {
    std::printf("worker %d stopped after %ld steps\n", worker, static_cast<long>(end.step));
  } else {
    std::printf("worker %d: %ld steps, weights %016llx\n", worker, static_cast<long>(end.step),
                static_cast<unsigned long long>(hash_of(net)));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2) return 2;
  folder = argv[1];
  worker = std::atoi(std::getenv("RANK") != nullptr ? std::getenv("RANK") : "0");
  while (!makes("start." + std::to_string(worker) + "." + std::to_string(starts))) ++starts;
  read_options(argc, argv);
  return run();
} catch (const std::exception& error) {
  std::fprintf(stderr, "elastic_program: %s\n", error.what());
  return 3;
}
