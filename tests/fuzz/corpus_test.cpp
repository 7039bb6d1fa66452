// The fuzzers' entry points over their seeds, every truncation, every changed byte, and random mutations of these. An
// input that breaks a parser ends the program; the seed of the generator is fixed, so it does so again.
#include <gtest/gtest.h>

#include <random>

#include "fuzz/entry_points.h"

namespace maniple {
namespace {

constexpr int kMutations = 20'000;

template <class Entry>
std::size_t run_all(Entry entry, const std::vector<std::string>& seeds) {
  std::size_t runs = 0;
  for (const std::string& seed : seeds) {
    entry(seed);
    for (std::size_t i = 0; i < seed.size(); ++i) {
      entry(seed.substr(0, i));
      for (const char value : {'\0', '\1', '\x7f', '\xff'}) {
        std::string changed = seed;
        changed[i] = value;
        entry(changed);
        ++runs;
      }
    }
  }
  std::mt19937 random(20240229);
  for (int i = 0; i < kMutations; ++i) {
    std::string bytes = seeds[random() % seeds.size()];
    for (int change = static_cast<int>(random() % 4); change >= 0; --change) {
      const std::size_t at = bytes.empty() ? 0 : random() % bytes.size();
      switch (random() % 4) {
        case 0: bytes.insert(at, 1, static_cast<char>(random())); break;
        case 1: bytes.erase(at, 1 + random() % 8); break;
        case 2: bytes += seeds[random() % seeds.size()]; break;
        default:
          if (!bytes.empty()) bytes[at] = static_cast<char>(random());
      }
    }
    entry(bytes);
    ++runs;
  }
  return runs;
}

TEST(Corpus, Handshake) { EXPECT_GT(run_all(fuzz::handshake, fuzz::handshake_seeds()), std::size_t{kMutations}); }
TEST(Corpus, Records) { EXPECT_GT(run_all(fuzz::records, fuzz::records_seeds()), std::size_t{kMutations}); }
TEST(Corpus, Store) { EXPECT_GT(run_all(fuzz::store, fuzz::store_seeds()), std::size_t{kMutations}); }
TEST(Corpus, Frame) { EXPECT_GT(run_all(fuzz::frame, fuzz::frame_seeds()), std::size_t{kMutations}); }
TEST(Corpus, Message) { EXPECT_GT(run_all(fuzz::message, fuzz::message_seeds()), std::size_t{kMutations}); }
TEST(Corpus, Error) { EXPECT_GT(run_all(fuzz::error, fuzz::error_seeds()), std::size_t{kMutations}); }
TEST(Corpus, Control) { EXPECT_GT(run_all(fuzz::control, fuzz::control_seeds()), std::size_t{kMutations}); }
TEST(Corpus, LaunchOptions) {
  EXPECT_GT(run_all(fuzz::launch_options, fuzz::launch_options_seeds()), std::size_t{kMutations});
}
TEST(Corpus, AgentMessage) {
  EXPECT_GT(run_all(fuzz::agent_message, fuzz::agent_message_seeds()), std::size_t{kMutations});
}
TEST(Corpus, PeerTable) { EXPECT_GT(run_all(fuzz::peer_table, fuzz::peer_table_seeds()), std::size_t{kMutations}); }
TEST(Corpus, Safetensors) { EXPECT_GT(run_all(fuzz::safetensors, fuzz::safetensors_seeds()), std::size_t{kMutations}); }
TEST(Corpus, Pickle) { EXPECT_GT(run_all(fuzz::pickle, fuzz::pickle_seeds()), std::size_t{kMutations}); }
TEST(Corpus, TorchFile) { EXPECT_GT(run_all(fuzz::torch_file, fuzz::torch_file_seeds()), std::size_t{kMutations}); }
TEST(Corpus, WeightsIndex) {
  EXPECT_GT(run_all(fuzz::weights_index, fuzz::weights_index_seeds()), std::size_t{kMutations});
}
TEST(Corpus, CheckpointIndex) {
  EXPECT_GT(run_all(fuzz::checkpoint_index, fuzz::checkpoint_index_seeds()), std::size_t{kMutations});
}
TEST(Corpus, Idx) { EXPECT_GT(run_all(fuzz::idx, fuzz::idx_seeds()), std::size_t{kMutations}); }
TEST(Corpus, Tar) { EXPECT_GT(run_all(fuzz::tar, fuzz::tar_seeds()), std::size_t{kMutations}); }
TEST(Corpus, Csv) { EXPECT_GT(run_all(fuzz::csv, fuzz::csv_seeds()), std::size_t{kMutations}); }

}  // namespace
}  // namespace maniple
