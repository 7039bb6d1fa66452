// A training that records which samples it uses, for elastic_endurance_test.sh.
//
//   maniple run -n 8 --elastic 1:8 elastic_endurance FOLDER SAMPLES EPOCHS [STEP]
//
// With STEP, rank 0 kills itself when it has committed that step and not yet written the step's row of log.jsonl.
//
// Each process appends lines to FOLDER/records.<pid>. A dot ends a line, so that a line that a kill cut short is
// recognized.
//
//   batch STEP EPOCH VIRTUAL_RANK SAMPLE ... .     before the batch is computed
//   step STEP RANKS SECONDS .                      after the step is committed
//
// A batch is recorded before it counts, because a process may die between the commit of a step and its hook. At the end
// rank 0 saves the weights as FOLDER/weights.safetensors; log.jsonl goes into FOLDER, too.
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include <torch/torch.h>

#include <maniple/maniple.h>

namespace {

constexpr int kVirtualRanks = 8;
constexpr std::size_t kBatch = 16;

class Records {
 public:
  explicit Records(const std::string& folder)
      : file_(open((folder + "/records." + std::to_string(getpid())).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC,
                   0644)) {
    if (file_ < 0) throw std::runtime_error("cannot write records into " + folder);
  }
  void add(const std::string& words) {
    const std::string line = words + " .\n";
    if (write(file_, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      throw std::runtime_error("cannot write records");
  }

 private:
  int file_;
};

/// A sample with its number.
struct Numbered {
  using Sample = std::tuple<torch::Tensor, torch::Tensor, std::int64_t>;
  maniple::Mnist digits;

  Sample get(std::size_t index) {
    const auto digit = digits.get(index);
    return {digit.data, digit.target, static_cast<std::int64_t>(index)};
  }
  std::size_t size() const { return digits.size().value(); }
};

/// A loader that records the batches it gives to the Trainer. The Trainer calls divide() when the share of this rank
/// changes, and begin() between two steps, so the virtual rank of each batch is known.
class RecordedLoader {
 public:
  using Loader = maniple::DataLoader<Numbered>;

  RecordedLoader(Loader& loader, Records& records, const maniple::TrainerState& state, std::int64_t last_step)
      : loader_(loader), records_(records), state_(state), last_step_(last_step) {}

  void set_epoch(std::size_t epoch) { loader_.set_epoch(epoch); }
  std::size_t batches() const { return loader_.batches(); }
  /// The Trainer calls it right after each step.
  std::string cursor_text() const {
    if (state_.step == last_step_ && own_.first == 0 && own_.total > own_.count) std::raise(SIGKILL);
    return loader_.cursor_text();
  }
  void load_cursor(const std::string& text) { loader_.load_cursor(text); }
  void divide(const maniple::VirtualRanks& own) {
    own_ = own;
    loader_.divide(own);
  }

  struct Iterator {
    RecordedLoader* data;
    Loader::Iterator at;
    Loader::Batch& operator*() const { return data->recorded(*at); }
    Iterator& operator++() {
      ++at;
      return *this;
    }
    bool operator==(std::default_sentinel_t end) const { return at == end; }
  };
  Iterator begin() {
    batch_ = 0;
    return {this, loader_.begin()};
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  Loader::Batch& recorded(Loader::Batch& batch) {
    const int virtual_rank = own_.first + batch_++ % own_.count;
    std::ostringstream line;
    line << "batch " << state_.step + 1 << ' ' << state_.epoch << ' ' << virtual_rank;
    const torch::Tensor& numbers = std::get<2>(batch);
    for (std::int64_t i = 0; i < numbers.size(0); ++i) line << ' ' << numbers[i].item<std::int64_t>();
    records_.add(line.str());
    return batch;
  }

  Loader& loader_;
  Records& records_;
  const maniple::TrainerState& state_;
  std::int64_t last_step_;  ///< of rank 0; -1: it lives
  maniple::VirtualRanks own_;
  int batch_ = 0;  ///< since begin()
};

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

void train(const std::string& folder, std::size_t samples, std::size_t epochs, std::int64_t last_step) {
  maniple::init_process_group();
  torch::manual_seed(1);
  namespace nn = torch::nn;
  nn::Sequential net(nn::Conv2d(1, 16, 5), nn::BatchNorm2d(16), nn::ReLU(), nn::MaxPool2d(4), nn::Flatten(),
                     nn::Dropout(0.2), nn::Linear(16 * 36, 10));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(2e-3));
  Records records(folder);
  maniple::Trainer* running = nullptr;
  maniple::TrainerOptions options{.epochs = epochs, .max_grad_norm = 5};
  options.log_every = 10;
  options.progress = false;
  options.log_dir = folder;
  options.on_step = [&](const maniple::TrainerState& state) {
    char line[100];
    std::snprintf(line, sizeof line, "step %lld %d %.6f", static_cast<long long>(state.step), running->ranks(), now());
    records.add(line);
  };
  options.virtual_ranks = kVirtualRanks;
  maniple::Trainer trainer(net, optimizer, options);
  running = &trainer;
  RecordedLoader::Loader loader({maniple::Mnist::drawn(samples, 1)}, {.batch_size = kBatch, .seed = 7});
  RecordedLoader::Loader test({maniple::Mnist::drawn(200, 2)},
                              {.batch_size = 25, .mode = maniple::SamplerMode::evaluation});
  const auto& end =
      trainer.fit(RecordedLoader(loader, records, trainer.state(), last_step), test, [&](auto& batch) -> torch::Tensor {
        const auto& [images, digits, numbers] = batch;
        return nn::functional::cross_entropy(net->forward(images), digits);
      });
  if (trainer.rank() == 0 && end.end == maniple::TrainerEnd::epochs)
    maniple::save_weights(*net, folder + "/weights.safetensors");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: elastic_endurance FOLDER SAMPLES EPOCHS [STEP]\n");
    return 2;
  }
  train(argv[1], std::strtoull(argv[2], nullptr, 10), std::strtoull(argv[3], nullptr, 10),
        argc > 4 ? std::atoll(argv[4]) : -1);
}
