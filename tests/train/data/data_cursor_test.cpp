// The sampler's cursor: an epoch that is interrupted, and goes on with other numbers of ranks, is still one epoch.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <random>
#include <sstream>

#include "comm/base/format.h"
#include "harness/error_of.h"
#include "train/data/cursor_text.h"
#include <maniple/comm/error.h>
#include <maniple/train/sampler.h>

namespace maniple::data_cursor_test {
namespace {

using Indices = std::vector<std::size_t>;
using Cursor = DistributedSampler::Cursor;

DistributedSampler sampler_of(std::size_t size, std::size_t ranks, std::size_t rank, SamplerOptions options = {}) {
  options.num_replicas = static_cast<int>(ranks);
  options.rank = static_cast<int>(rank);
  return DistributedSampler(size, options);
}

/// One start of a job: `ranks` ranks take up to `steps` batches each, while their loaders have asked for some more.
struct Start {
  std::size_t ranks = 1, batch_size = 1, steps = 0, ahead = 0;
};

struct Outcome {
  std::string cursor;       ///< rank 0's
  std::size_t from = 0;     ///< the place where it began
  bool finished = true;     ///< no rank has anything left
  std::vector<Indices> of;  ///< what each rank trained on
};

Outcome run(const Start& start, std::size_t size, const SamplerOptions& options, const std::string& cursor) {
  Outcome outcome;
  for (std::size_t rank = 0; rank < start.ranks; ++rank) {
    auto sampler = sampler_of(size, start.ranks, rank, options);
    if (!cursor.empty()) sampler.load_cursor(cursor);
    outcome.from = sampler.cursor().places;
    sampler.set_epoch(sampler.epoch());
    sampler.reset();
    std::deque<Indices> drawn;
    Indices seen;
    for (std::size_t step = 0; step < start.steps; ++step) {
      while (drawn.size() <= start.ahead) {
        auto batch = sampler.next(start.batch_size);
        if (!batch) break;
        drawn.push_back(*batch);
      }
      if (drawn.empty()) break;
      seen.insert(seen.end(), drawn.front().begin(), drawn.front().end());
      drawn.pop_front();
      sampler.batch_done();
    }
    outcome.finished = outcome.finished && seen.size() == sampler.local_size();
    if (rank == 0) outcome.cursor = sampler.cursor_text();
    // Where ranks take the same number of samples, all know the same cursor.
    if (options.mode == SamplerMode::training) {
      EXPECT_EQ(sampler.cursor_text(), outcome.cursor) << "rank " << rank;
    }
    outcome.of.push_back(std::move(seen));
  }
  return outcome;
}

enum class End { filled, cut, exact };

void check_chain(std::size_t size, bool shuffle, End end, std::mt19937& random) {
  const auto up_to = [&](std::size_t most) { return std::uniform_int_distribution<std::size_t>(0, most)(random); };
  const SamplerOptions options{.shuffle = shuffle,
                               .seed = 5,
                               .drop_last = end == End::cut,
                               .mode = end == End::exact ? SamplerMode::evaluation : SamplerMode::training};
  std::map<std::size_t, std::size_t> times;
  std::string cursor, story;
  Outcome outcome;
  std::size_t ranks = 0;
  do {
    const Start start{.ranks = 1 + up_to(8), .batch_size = 1 + up_to(4), .steps = up_to(6), .ahead = up_to(3)};
    ranks = start.ranks;
    story += format_text(" {} ranks x {} steps of {};", ranks, start.steps, start.batch_size);
    outcome = run(start, size, options, cursor);
    cursor = outcome.cursor;
    for (const Indices& part : outcome.of) {
      for (const std::size_t index : part) ++times[index];
    }
  } while (!outcome.finished);
  SCOPED_TRACE(testing::Message() << size << " samples, shuffle " << shuffle << ", end " << static_cast<int>(end) << ":"
                                  << story);

  // Only the last start may fill up or cut, by fewer than it has ranks.
  const std::size_t rest = (size - outcome.from) % ranks;
  const std::size_t padding = end == End::filled && rest > 0 ? ranks - rest : 0;
  const std::size_t cut = end == End::cut ? rest : 0;
  std::size_t all = 0;
  for (const auto& [index, n] : times) {
    EXPECT_LT(index, size);
    if (padding == 0) {
      EXPECT_EQ(n, 1u) << "index " << index;
    }
    all += n;
  }
  EXPECT_EQ(times.size(), size - cut);
  EXPECT_EQ(all, size - cut + padding);

  // The epoch is over: a restart now takes nothing again, on any number of ranks. What saw the end begins the next
  // epoch.
  if (end == End::cut && rest == size - outcome.from)
    return;  // the last start had fewer samples than ranks, and took none
  const bool next = cursor.starts_with("epoch 1, place 0 ");
  EXPECT_TRUE(next || cursor.starts_with(format_text("epoch 0, place {} of {}", size, size))) << cursor;
  const auto again = run({.ranks = 1 + up_to(8), .batch_size = 3, .steps = 100, .ahead = 2}, size, options, cursor);
  std::size_t taken = 0;
  for (const Indices& part : again.of) taken += part.size();
  EXPECT_TRUE(next || taken == 0) << cursor;
  EXPECT_TRUE(again.cursor.starts_with(next ? "epoch 2, place 0 " : "epoch 1, place 0 ")) << again.cursor;
}

TEST(Cursor, ManyRestartsWithManyNumbersOfRanksAreOneEpoch) {
  std::mt19937 random(1);
  for (const std::size_t size : {0, 1, 2, 3, 5, 7, 8, 16, 17, 31, 64, 65, 100, 143, 257}) {
    for (const bool shuffle : {false, true}) {
      for (const End end : {End::filled, End::cut, End::exact}) {
        for (int i = 0; i < 25; ++i) check_chain(size, shuffle, end, random);
      }
    }
  }
}

TEST(Cursor, GoesOnWhereItWasAndTheNextPassIsAWholeOne) {
  for (const bool shuffle : {false, true}) {
    auto sampler = sampler_of(101, 3, 1, {.shuffle = shuffle, .seed = 5});
    sampler.set_epoch(4);
    const Indices whole = sampler.indices();
    sampler.reset();
    for (int i = 0; i < 5; ++i) sampler.next(5);  // two of them ahead of time
    for (int i = 0; i < 3; ++i) sampler.batch_done();
    EXPECT_EQ(sampler.cursor(), (Cursor{.epoch = 4, .places = 45}));
    torch::serialize::OutputArchive out;
    sampler.save(out);
    std::stringstream file;
    out.save_to(file);

    auto again = sampler_of(101, 3, 1, {.shuffle = shuffle, .seed = 5});
    torch::serialize::InputArchive in;
    in.load_from(file);
    again.load(in);
    EXPECT_EQ(again.epoch(), 4u);
    EXPECT_EQ(again.cursor(), sampler.cursor());
    EXPECT_EQ(again.local_size(), whole.size() - 15);
    EXPECT_EQ(again.local_batches(4), (whole.size() - 15 + 3) / 4);
    again.set_epoch(4);  // what the loop does at its head
    again.reset();       // what the loader does at its beginning
    EXPECT_EQ(again.next(1000), Indices(whole.begin() + 15, whole.end()));
    again.batch_done();
    EXPECT_EQ(again.cursor(), (Cursor{.epoch = 4, .places = 101})) << "at the end of the epoch, filled up";
    again.reset();
    EXPECT_EQ(again.next(1000), whole);
    again.set_epoch(5);
    EXPECT_EQ(again.cursor(), (Cursor{.epoch = 5, .places = 0}));
  }
}

TEST(Cursor, DroppedSamplesStayDroppedAfterARestart) {
  auto four = sampler_of(10, 4, 0, {.drop_last = true});
  four.reset();
  four.next(2);
  four.batch_done();
  EXPECT_EQ(four.cursor(), (Cursor{.epoch = 0, .places = 10}));
  // Not yet at the end: fewer ranks find more.
  auto one = sampler_of(10, 1, 0, {.drop_last = true});
  auto half = sampler_of(10, 4, 0, {.drop_last = true});
  half.reset();
  half.next(1);
  half.batch_done();
  one.load_cursor(half.cursor_text());
  EXPECT_EQ(one.local_size(), 6u);
}

TEST(Cursor, AskingForAnUnknownPlaceThrows) {
  auto sampler = sampler_of(10, 2, 0);
  EXPECT_EQ(sampler.cursor(), Cursor{});
  EXPECT_EQ(
      error_of([&] { sampler.batch_done(); }),
      "DistributedSampler: a batch is counted as done, but all 0 samples that were handed out in this pass are counted "
      "already; is it counted twice, or does the loader have another sampler?");
  sampler.next(3);
  EXPECT_EQ(error_of([&] { sampler.cursor(); }),
            "DistributedSampler: 3 samples were handed out, but no batch was counted as done, so there is no cursor; "
            "write the "
            "loop as `for (auto& batch : sampler.counting(*loader))`, or call batch_done() after each batch");
  EXPECT_NE(error_of([&] { sampler.cursor_text(); }), "no error");
  sampler.batch_done();
  EXPECT_EQ(sampler.cursor(), (Cursor{.epoch = 0, .places = 6}));
  EXPECT_EQ(error_of([&] { sampler.seek({.epoch = 0, .places = 11}); }),
            "DistributedSampler: place 11 is behind the end of an epoch of 10 samples");
}

TEST(Cursor, ACursorOfAnotherJobIsRefused) {
  const std::string text = sampler_of(100, 4, 1, {.seed = 5}).cursor_text();
  EXPECT_EQ(text, "epoch 0, place 0 of 100, shuffle 1, seed 5");
  const auto load = [&](DistributedSampler sampler) { return error_of([&] { sampler.load_cursor(text); }); };
  const std::string end =
      "; its place would mean other samples (to begin the epoch anew, leave the sampler out of the checkpoint)";
  EXPECT_EQ(load(sampler_of(100, 2, 0, {.seed = 5})), "no error");
  EXPECT_EQ(load(sampler_of(100, 2, 0, {.seed = 5, .drop_last = true})), "no error");
  EXPECT_EQ(load(sampler_of(99, 4, 1, {.seed = 5})),
            "DistributedSampler: the cursor was saved with a dataset of size 100, but here it is 99" + end);
  EXPECT_EQ(load(sampler_of(100, 4, 1, {.seed = 6})),
            "DistributedSampler: the cursor was saved with seed 5, but here it is 6" + end);
  EXPECT_EQ(load(sampler_of(100, 4, 1, {.shuffle = false, .seed = 5})),
            "DistributedSampler: the cursor was saved with shuffle 1, but here it is 0" + end);

  torch::serialize::OutputArchive foreign;
  foreign.write("weight", torch::ones({2}));
  std::stringstream other;
  foreign.save_to(other);
  torch::serialize::InputArchive in;
  in.load_from(other);
  auto sampler = sampler_of(100, 4, 1);
  EXPECT_EQ(error_of([&] { sampler.load(in); }),
            "DistributedSampler: the archive holds no \"distributed_sampler\"; it was not written by save() of a "
            "DistributedSampler");
}

TEST(Cursor, TextIsExact) {
  const SavedCursor most{
      .epoch = UINT64_MAX, .places = UINT64_MAX - 1, .size = UINT64_MAX, .shuffle = true, .seed = UINT64_MAX};
  EXPECT_EQ(read_cursor(write_cursor(most)), most);
  const std::string good = "epoch 3, place 5 of 10, shuffle 0, seed 7";
  EXPECT_EQ(read_cursor(good), (SavedCursor{.epoch = 3, .places = 5, .size = 10, .shuffle = false, .seed = 7}));
  for (std::size_t length = 0; length < good.size(); ++length)
    EXPECT_FALSE(read_cursor(good.substr(0, length))) << length;
  for (const char* bad :
       {"epoch 3, place 5 of 10, shuffle 0, seed 7 ", "epoch 3, place 11 of 10, shuffle 0, seed 7",
        "epoch 3, place 5 of 10, shuffle 2, seed 7", "epoch -3, place 5 of 10, shuffle 0, seed 7",
        "epoch 99999999999999999999, place 5 of 10, shuffle 0, seed 7", " epoch 3, place 5 of 10, shuffle 0, seed 7"})
    EXPECT_FALSE(read_cursor(bad)) << bad;
  auto sampler = sampler_of(10, 1, 0);
  EXPECT_EQ(
      error_of([&] { sampler.load_cursor("nonsense"); }),
      "DistributedSampler: \"nonsense\" is not a cursor; expected \"epoch 3, place 512 of 60000, shuffle 1, seed 7\"");
}

/// A dataset whose samples are their own indices.
struct Numbers : torch::data::datasets::Dataset<Numbers, std::size_t> {
  std::size_t get(std::size_t index) override { return index; }
  torch::optional<std::size_t> size() const override { return 50; }
};

TEST(Cursor, CountsBatchesOfTheLoopNotOfTheWorkers) {
  for (const std::size_t workers : {0, 2}) {
    auto sampler = sampler_of(50, 2, 1, {.seed = 9});
    auto loader = torch::data::make_data_loader(Numbers(), sampler,
                                                torch::data::DataLoaderOptions().batch_size(4).workers(workers));
    std::size_t batches = 0;
    Indices seen;
    for (auto& batch : sampler.counting(*loader)) {
      seen.insert(seen.end(), batch.begin(), batch.end());
      ++batches;
      const std::size_t places = batches < 7 ? batches * 8 : 50;  // the seventh, of one sample, is the last
      EXPECT_EQ(sampler.cursor().places, places) << workers << " workers";
    }
    EXPECT_EQ(batches, 7u);
    EXPECT_EQ(seen, sampler.indices());
    EXPECT_EQ(sampler.cursor(), (Cursor{.epoch = 1, .places = 0})) << workers << " workers";
  }
  auto sampler = sampler_of(50, 2, 1);
  auto any_order = torch::data::make_data_loader(
      Numbers(), sampler, torch::data::DataLoaderOptions().batch_size(4).workers(2).enforce_ordering(false));
  EXPECT_NE(error_of([&] { sampler.counting(*any_order); }).find("enforce_ordering"), std::string::npos);
}

// Where a checkpoint was taken at the end of an epoch decides what is still to be done: everything once.
TEST(Cursor, ARestartAtTheEndOfAnEpochDoesWhatComesAfterTheLoopOnce) {
  enum class Save { with_the_last_batch, behind_the_loop };
  for (const Save save : {Save::with_the_last_batch, Save::behind_the_loop}) {
    for (const std::size_t workers : {0, 2}) {
      for (const bool drop_last : {false, true}) {  // the loader's: its last, smaller batch is never seen
        SCOPED_TRACE(testing::Message() << workers << " workers, drop_last " << drop_last << ", saved "
                                        << (save == Save::behind_the_loop ? "behind the loop" : "with the last batch"));
        const std::size_t each = drop_last ? 6 : 7;
        std::vector<std::size_t> batches(3), ends(3);
        std::string saved;
        // Two starts of the documented loop; the first is killed where it saves at the end of epoch 1.
        for (int start = 0; start < 2; ++start) {
          auto sampler = sampler_of(50, 2, 1, {.seed = 9});
          auto loader = torch::data::make_data_loader(
              Numbers(), sampler, torch::data::DataLoaderOptions().batch_size(4).workers(workers).drop_last(drop_last));
          if (start == 1) sampler.load_cursor(saved);
          bool killed = false;
          for (std::size_t epoch = sampler.epoch(); epoch < 3 && !killed; ++epoch) {
            sampler.set_epoch(epoch);
            std::size_t in_this_pass = 0;
            for (auto& batch : sampler.counting(*loader)) {
              EXPECT_FALSE(batch.empty());
              ++batches[epoch];
              killed = start == 0 && epoch == 1 && save == Save::with_the_last_batch && ++in_this_pass == each;
              if (killed) break;
            }
            if (!killed) ++ends[epoch];
            killed = killed || (start == 0 && epoch == 1 && save == Save::behind_the_loop);
            if (killed) saved = sampler.cursor_text();
          }
        }
        EXPECT_EQ(batches, (std::vector<std::size_t>{each, each, each})) << saved;
        EXPECT_EQ(ends, (std::vector<std::size_t>{1, 1, 1})) << saved;
      }
    }
  }
}

TEST(Cursor, ALoopByHandIsOverWhenNothingIsLeft) {
  auto sampler = sampler_of(10, 2, 0);
  sampler.reset();
  while (sampler.next(2)) sampler.batch_done();
  EXPECT_EQ(sampler.cursor(), (Cursor{.epoch = 1, .places = 0}));
  auto again = sampler_of(10, 3, 0);
  again.load_cursor(sampler.cursor_text());
  EXPECT_EQ(again.epoch(), 1u);
  EXPECT_EQ(again.local_size(), 4u);
  // A cursor at the end of an epoch, as earlier releases saved it there: its pass is empty, and then it is over.
  again.load_cursor("epoch 4, place 10 of 10, shuffle 1, seed 0");
  again.reset();
  EXPECT_EQ(again.cursor(), (Cursor{.epoch = 4, .places = 10}));
  EXPECT_FALSE(again.next(2));
  EXPECT_EQ(again.cursor(), (Cursor{.epoch = 5, .places = 0}));
}

}  // namespace
}  // namespace maniple::data_cursor_test
