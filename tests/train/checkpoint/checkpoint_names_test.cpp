// The names in optimizers' checkpoints, written out: earlier versions have saved them, so they stay.
#include <gtest/gtest.h>

#include "comm/base/format.h"
#include "harness/temporary_directory.h"
#include "train/checkpoint/checkpoint_index.h"
#include "train/checkpoint/named_state.h"
#include "train/checkpoint/pending_checkpoint.h"
#include "train/checkpoint/random_states.h"
#include <maniple/train/checkpoint.h>

namespace maniple::checkpoint_names_test {
namespace {

using harness::TemporaryDirectory;
using Names = std::vector<std::string>;

struct Job {
  explicit Job(const std::string& folder, bool sharded = false)
      : checkpoint({.folder = folder, .background = false, .sharded = sharded}) {
    checkpoint.add("model", *net).add("optimizer", optimizer);
  }
  torch::nn::Sequential net{torch::nn::Linear(2, 1)};
  torch::optim::SGD optimizer{net->parameters(), torch::optim::SGDOptions(0.5).momentum(0.9)};
  Checkpoint checkpoint;

  void step() {
    net->forward(torch::ones({1, 2})).sum().backward();
    optimizer.step();
  }
  torch::Tensor momentum(std::size_t parameter) {
    return state_of(optimizer).tensors.at(format_text("group.0.parameter.{}.momentum_buffer", parameter));
  }
};

template <class Map>
Names names_of(const Map& map) {
  Names names;
  for (const auto& [name, value] : map) names.push_back(name);
  return names;
}

std::string path_of(const TemporaryDirectory& folder, const std::string& file) {
  return format_text("{}/{}/{}", folder.path(), checkpoint_name(1), file);
}

TEST(CheckpointNames, OneRankSavesByPosition) {
  const TemporaryDirectory folder;
  Job job(folder.path());
  job.step();
  job.checkpoint.save(1);
  const NamedState state = read_state(path_of(folder, "optimizer.safetensors"));
  EXPECT_EQ(names_of(state.tensors),
            (Names{"group.0.parameter.0.momentum_buffer", "group.0.parameter.1.momentum_buffer"}));
  EXPECT_EQ(names_of(state.texts),
            (Names{"group.0.dampening", "group.0.lr", "group.0.momentum", "group.0.nesterov",
                   "group.0.parameter.0.names", "group.0.parameter.0.stepped", "group.0.parameter.1.names",
                   "group.0.parameter.1.stepped", "group.0.parameters", "group.0.weight_decay", "groups", "kind"}));
  EXPECT_EQ(state.texts.at("group.0.parameter.1.names"), "model/0.bias");
}

TEST(CheckpointNames, AllRanksSaveByParameter) {
  const TemporaryDirectory folder;
  Job job(folder.path(), /*sharded=*/true);
  job.step();
  job.checkpoint.save(1);
  const CheckpointIndex index = parse_index(read_small_file(path_of(folder, "index.json"), 1 << 20));
  const IndexedPart& part = index.parts.at("optimizer");
  EXPECT_EQ(names_of(part.tensors), (Names{"group.0.parameter.model/0.bias.momentum_buffer",
                                           "group.0.parameter.model/0.weight.momentum_buffer"}));
  EXPECT_EQ(part.tensors.begin()->second.pieces.at(0).key, "optimizer/group.0.parameter.model/0.bias.momentum_buffer");
  EXPECT_EQ(names_of(part.texts),
            (Names{"group.0.dampening", "group.0.lr", "group.0.momentum", "group.0.nesterov",
                   "group.0.parameter.model/0.bias.listed", "group.0.parameter.model/0.bias.stepped",
                   "group.0.parameter.model/0.weight.listed", "group.0.parameter.model/0.weight.stepped",
                   "group.0.weight_decay", "groups", "kind"}));
}

/// A checkpoint as a text of names; the momentum of the weight is 2, the one of the bias 3.
void write_checkpoint(const std::string& folder, const std::string& weight, const std::string& bias,
                      const std::map<std::string, std::string>& more_texts) {
  NamedState optimizer;
  optimizer.texts = {{"kind", "SGD"},
                     {"groups", "1"},
                     {"group.0.lr", "0.25"},
                     {"group.0.momentum", "0.75"},
                     {"group.0.dampening", "0"},
                     {"group.0.weight_decay", "0"},
                     {"group.0.nesterov", "0"},
                     {weight + ".stepped", "1"},
                     {bias + ".stepped", "1"}};
  optimizer.texts.insert(more_texts.begin(), more_texts.end());
  optimizer.tensors = {{weight + ".momentum_buffer", torch::full({1, 2}, 2.0F)},
                       {bias + ".momentum_buffer", torch::full({1}, 3.0F)}};
  const NamedState model{{{"0.weight", torch::full({1, 2}, 4.0F)}, {"0.bias", torch::full({1}, 5.0F)}}, {}};
  PendingCheckpoint pending(folder, 1);
  for (const auto& [name, state] :
       {std::pair("model", model), std::pair("optimizer", optimizer), std::pair("random", random_states(nullptr))}) {
    const std::string file = std::string(name) + ".safetensors";
    pending.add(file, write_state(pending.path_of(file), state));
  }
  pending.commit();
}

void expect_loaded(const std::string& folder) {
  for (const bool sharded : {false, true}) {
    Job job(folder, sharded);
    EXPECT_EQ(job.checkpoint.load(), 1);
    EXPECT_TRUE(job.momentum(0).equal(torch::full({1, 2}, 2.0F)));
    EXPECT_TRUE(job.momentum(1).equal(torch::full({1}, 3.0F)));
    EXPECT_EQ(job.optimizer.param_groups()[0].options().get_lr(), 0.25);
  }
}

TEST(CheckpointNames, NamesByPositionAreLoaded) {
  const TemporaryDirectory folder;
  write_checkpoint(folder.path(), "group.0.parameter.0", "group.0.parameter.1", {{"group.0.parameters", "2"}});
  expect_loaded(folder.path());
}

TEST(CheckpointNames, NamesByParameterAreLoaded) {
  const TemporaryDirectory folder;
  // Another model saved the bias under another name, which it tied to this one's.
  write_checkpoint(folder.path(), "group.0.parameter.model/0.weight", "group.0.parameter.model/9.bias",
                   {{"group.0.parameter.model/0.weight.listed", "1"},
                    {"group.0.parameter.model/9.bias.listed", "1"},
                    {"group.0.parameter.model/0.bias.tied", "model/9.bias"}});
  expect_loaded(folder.path());
}

}  // namespace
}  // namespace maniple::checkpoint_names_test
