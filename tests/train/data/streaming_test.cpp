// Streams of tars and CSV files: every sample once over ranks and workers, the same order after a restart, damaged
// files named.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <fstream>
#include <numeric>
#include <set>

#include "comm/base/format.h"
#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "train/data/tar_bytes.h"
#include <maniple/maniple.h>

namespace maniple::harness::streaming_test {
namespace {

std::string write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

/// Shards with the given numbers of samples; sample i of all is the number i. The numbers of shards begin at 0.
std::vector<std::string> write_shards(const std::string& folder, const std::vector<std::size_t>& sizes) {
  std::vector<std::string> paths;
  std::size_t number = 0;
  for (std::size_t shard = 0; shard < sizes.size(); ++shard) {
    std::string tar;
    for (std::size_t i = 0; i < sizes[shard]; ++i, ++number) {
      tar += tar_file(format_text("s{:04}.txt", number), "a text before the number");
      tar += tar_file(format_text("s{:04}.cls", number), std::to_string(number));
    }
    paths.push_back(write(format_text("{}/{}.tar", folder, shard), tar + tar_end()));
  }
  return paths;
}

std::size_t number_of(const RawSample& raw) { return std::stoul(raw.files.at("cls")); }

using Stream = ShardStream<std::size_t>;
Stream stream_of(const std::vector<std::string>& paths, StreamOptions options) {
  return tar_stream(paths, [](RawSample& raw) { return number_of(raw); }, std::move(options));
}

using Batches = std::vector<std::vector<std::int64_t>>;
Batches take(DataLoader<Stream>& loader, std::size_t most = 1000) {
  Batches all;
  for (auto& batch : loader) {
    all.emplace_back(batch.data_ptr<std::int64_t>(), batch.data_ptr<std::int64_t>() + batch.numel());
    if (all.size() == most) break;
  }
  return all;
}

TEST(Streams, EverySampleIsSeenOnceWhateverTheNumbersOfShardsAndRanks) {
  const TemporaryDirectory folder;
  for (const std::vector<std::size_t>& sizes :
       std::vector<std::vector<std::size_t>>{{7}, {3, 4}, {5, 1, 0, 9, 2}, {4, 4, 4, 4, 4, 4, 4}}) {
    const auto paths = write_shards(folder.path(), sizes);
    const auto all = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
    EXPECT_EQ(count_samples(paths), sizes);
    for (const int ranks : {1, 2, 3}) {
      for (const std::size_t buffer : {0, 4, 100}) {
        std::multiset<std::int64_t> seen;
        for (int rank = 0; rank < ranks; ++rank) {
          const StreamOptions options{.shuffle_buffer = buffer, .seed = 5, .num_replicas = ranks, .rank = rank};
          DataLoader loader(stream_of(paths, options), {.batch_size = 3});
          DataLoader threaded(stream_of(paths, options), {.batch_size = 3, .workers = 2});
          loader.set_epoch(2);
          threaded.set_epoch(2);
          const Batches batches = take(loader);
          EXPECT_EQ(take(threaded), batches);
          EXPECT_EQ(loader.batches(), 0u) << "not known";
          for (const auto& batch : batches) seen.insert(batch.begin(), batch.end());
          EXPECT_FALSE(sizes.size() < static_cast<std::size_t>(ranks) && batches.empty()) << "every rank has samples";
        }
        EXPECT_EQ(seen.size(), all);
        EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(), all);
      }
    }
  }
}

TEST(Streams, EpochsAndSeedsHaveOrdersOfTheirOwn) {
  const TemporaryDirectory folder;
  const auto paths = write_shards(folder.path(), {6, 6, 6, 6});
  const auto order = [&](StreamOptions options, std::size_t epoch) {
    DataLoader loader(stream_of(paths, std::move(options)), {.batch_size = 24});
    loader.set_epoch(epoch);
    return take(loader).at(0);
  };
  std::vector<std::int64_t> in_order(24);
  std::iota(in_order.begin(), in_order.end(), 0);
  EXPECT_EQ(order({.shuffle_shards = false}, 0), in_order);
  EXPECT_NE(order({}, 0), order({}, 1));
  EXPECT_NE(order({.seed = 1}, 0), order({.seed = 2}, 0));
  EXPECT_NE(order({.shuffle_shards = false, .shuffle_buffer = 8}, 0), in_order);
  EXPECT_EQ(order({.shuffle_buffer = 8}, 3), order({.shuffle_buffer = 8}, 3));
}

TEST(Streams, ARestartInTheMiddleOfAnEpochGivesTheSameSamplesInTheSameOrder) {
  const TemporaryDirectory folder;
  const std::vector<std::size_t> sizes{5, 1, 9, 2, 6};
  const auto paths = write_shards(folder.path(), sizes);
  for (const int ranks : {1, 2, 3}) {
    for (const std::size_t buffer : {0, 3, 7, 100}) {
      for (const bool known : {false, true}) {
        for (int rank = 0; rank < ranks; ++rank) {
          StreamOptions options{.shuffle_buffer = buffer, .seed = 9, .num_replicas = ranks, .rank = rank};
          if (known) options.samples_per_shard = sizes;
          DataLoader straight(stream_of(paths, options), {.batch_size = 2});
          straight.set_epoch(1);
          const Batches whole = take(straight);
          for (std::size_t stop = 1; stop <= whole.size(); ++stop) {
            DataLoader first(stream_of(paths, options), {.batch_size = 2, .workers = stop == 1 ? 2u : 0u});
            first.set_epoch(1);
            Batches parts = take(first, stop);
            DataLoader second(stream_of(paths, options), {.batch_size = 2});
            second.load_cursor(first.cursor_text());
            EXPECT_EQ(second.epoch(), 1u);
            const Batches rest = take(second);
            parts.insert(parts.end(), rest.begin(), rest.end());
            EXPECT_EQ(parts, whole) << ranks << " ranks, buffer " << buffer << ", known " << known << ", rank " << rank
                                    << ", stopped after " << stop;
          }
        }
      }
    }
  }
}

TEST(Streams, WithEqualAllRanksTakeTheSameNumberOfBatches) {
  const TemporaryDirectory folder;
  const std::vector<std::size_t> sizes{5, 1, 9, 2, 6, 8, 3};
  const auto paths = write_shards(folder.path(), sizes);
  for (const int ranks : {1, 2, 3}) {
    std::set<std::size_t> numbers;
    std::set<std::int64_t> seen;
    std::size_t all = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const StreamOptions options{
          .shuffle_buffer = 4, .equal = true, .samples_per_shard = sizes, .num_replicas = ranks, .rank = rank};
      DataLoader loader(stream_of(paths, options), {.batch_size = 4, .workers = 1});
      const std::size_t announced = loader.batches();
      const Batches batches = take(loader);
      EXPECT_EQ(batches.size(), announced);
      numbers.insert(batches.size());
      for (const auto& batch : batches) {
        seen.insert(batch.begin(), batch.end());
        all += batch.size();
      }
    }
    EXPECT_EQ(numbers.size(), 1u);
    EXPECT_GT(*numbers.begin(), 0u);
    EXPECT_EQ(seen.size(), all) << "nothing twice";
  }
  EXPECT_EQ(error_of([&] { stream_of(paths, {.equal = true}); }),
            "ShardStream: equal needs samples_per_shard (count_samples() makes it); without it train inside "
            "with_uneven_inputs");
  auto wrong = sizes;
  ++wrong[2];
  DataLoader loader(stream_of(paths, {.shuffle_shards = false, .samples_per_shard = wrong}),
                    {.batch_size = 1, .workers = 1});
  EXPECT_EQ(error_of([&] { take(loader); }),
            paths[2] + ": holds 9 samples, but samples_per_shard says 10; count_samples() counts them anew");
}

TEST(Streams, ErrorsNameTheSampleAndComeInOrder) {
  const TemporaryDirectory folder;
  const auto paths = write_shards(folder.path(), {6});
  for (const std::size_t workers : {0, 2}) {
    const auto stream = tar_stream(paths, [](RawSample& raw) {
      if (number_of(raw) == 3) throw std::runtime_error("no picture");
      return number_of(raw);
    });
    DataLoader loader(stream, {.batch_size = 2, .workers = workers});
    std::size_t batches = 0;
    EXPECT_EQ(error_of([&] {
                for ([[maybe_unused]] auto& batch : loader) ++batches;
              }),
              "DataLoader: sample \"s0003\" of " + paths[0] + " (offset 6144): no picture");
    EXPECT_EQ(batches, 1u);
    // The file itself: its second half is missing.
    const std::string half =
        write(folder.path() + "/half.tar", tar_file("a.cls", "1") + tar_file("b.cls", "2").substr(0, 600));
    DataLoader truncated(stream_of({half}, {}), {.batch_size = 1, .workers = workers});
    batches = 0;
    EXPECT_EQ(error_of([&] {
                for ([[maybe_unused]] auto& batch : truncated) ++batches;
              }),
              half + ": offset 1537: 511 bytes follow \"b.cls\", but the tar ends after 87: it is truncated");
    EXPECT_EQ(batches, 1u) << "what lies before the damage";
  }
}

TEST(Streams, ACursorOfOtherDataIsRefused) {
  const TemporaryDirectory folder;
  const auto paths = write_shards(folder.path(), {6, 6});
  DataLoader one(stream_of(paths, {.seed = 4}), {.batch_size = 2});
  take(one, 1);
  EXPECT_EQ(one.cursor_text(), "epoch 0, 2 samples of each of 1 ranks, 2 shards, shuffle 1, buffer 0, seed 4");
  DataLoader two(stream_of(paths, {.seed = 4, .num_replicas = 2, .rank = 1}), {.batch_size = 2});
  EXPECT_EQ(error_of([&] { two.load_cursor(one.cursor_text()); }),
            "DataLoader: the cursor of the stream was saved in the middle of epoch 0 with a number of ranks of 1, but "
            "here it is 2; "
            "other samples would follow (to begin the epoch anew, leave the loader out of the checkpoint)");
  take(one);
  EXPECT_EQ(one.cursor_text(), "epoch 1, 0 samples of each of 1 ranks, 2 shards, shuffle 1, buffer 0, seed 4");
  two.load_cursor(one.cursor_text());  // between epochs any number of ranks will do
  EXPECT_EQ(two.epoch(), 1u);
  EXPECT_NE(error_of([&] { two.load_cursor("epoch 1, place 3"); }).find("is not a cursor of a stream"),
            std::string::npos);
}

// ---- On real ranks -------------------------------------------------------------------------------------------------

/// Trains from the checkpoint of `folder`, if there is one, to the end of the second epoch; returns the bits of the
/// weights.
std::string weights_after_training(Rank& r, const std::string& folder) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  torch::nn::Linear net(1, 1);
  DistributedDataParallel<torch::nn::Linear> ddp(net);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(1e-4).momentum(0.9));
  const std::vector<std::size_t> sizes{6, 8, 7, 9, 5};
  DataLoader tars(stream_of(find_shards(SharedFolder::here() + "/?.tar"),
                            {.shuffle_buffer = 5, .seed = 2, .equal = true, .samples_per_shard = sizes}),
                  {.batch_size = 2, .workers = 2});
  DataLoader table(CsvDataset(SharedFolder::here() + "/table.csv", {.label = "y", .real_label = true}),
                   {.batch_size = 2, .workers = 1, .seed = 3});
  Checkpoint checkpoint({.folder = folder, .background = false});
  checkpoint.add("model", *net).add("optimizer", optimizer).add("tars", tars).add("table", table);
  std::int64_t step = checkpoint.load().value_or(0);
  for (std::size_t epoch = tars.epoch(); epoch < 2; ++epoch) {
    tars.set_epoch(epoch);
    table.set_epoch(epoch);
    auto rows = table.begin();
    for (auto& numbers : tars) {
      if (rows == table.end()) break;
      optimizer.zero_grad();
      const auto x = numbers.to(torch::kFloat).unsqueeze(1);
      (ddp->forward(x).mean() - rows->data.mean() + rows->target.mean()).pow(2).backward();
      optimizer.step();
      if (++step % 3 == 0) checkpoint.save(step);
      r.step();
      ++rows;
    }
  }
  const auto weights = torch::cat({net->weight.detach().flatten(), net->bias.detach()});
  std::uint32_t bits[2];
  std::memcpy(bits, weights.data_ptr(), sizeof(bits));
  return format_text("{} steps, {:08x} {:08x}", step, bits[0], bits[1]);
}

TEST(Streams, KilledInTheMiddleOfAnEpochAndStartedAgainTrainingIsExactToTheLastBit) {
  const SharedFolder shared;
  if (!is_child()) {
    write_shards(SharedFolder::here(), {6, 8, 7, 9, 5});
    std::string csv = "x,y\r\n";
    for (int i = 0; i < 60; ++i) csv += format_text("{},{}\r\n", 0.5 * i, i % 7);
    write(SharedFolder::here() + "/table.csv", csv);
  }
  for (const int ranks : {2, 3}) {
    const auto run = [&](const std::string& name, Fault fault) {
      return run_ranks(
          {.n = ranks, .as = As::processes, .limit = Seconds(200), .fault = fault, .env = shared.env()}, [&](Rank& r) {
            init_process_group(r.world);
            try {
              r.report("weights",
                       weights_after_training(r, format_text("{}/{}-{}", SharedFolder::here(), name, ranks)));
            } catch (const Error&) {
              if (!fault.ends_rank()) throw;
            }
            destroy_process_group();
          });
    };
    const auto straight = run("straight", {}).texts("weights");
    run("parts", kill_at(1, 5));
    const auto parts = run("parts", {}).texts("weights");
    if (straight.empty() || parts.empty()) continue;
    EXPECT_EQ(straight.size(), static_cast<std::size_t>(ranks));
    EXPECT_EQ(straight.at(0), straight.at(1));
    EXPECT_EQ(straight, parts);
  }
}

}  // namespace
}  // namespace maniple::harness::streaming_test
