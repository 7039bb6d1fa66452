// Settings, seeds and the progress line.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include "comm/base/format.h"
#include "train/progress_line.h"
#include <maniple/comm/error.h>
#include <maniple/train/progress.h>
#include <maniple/train/torch_settings.h>

namespace maniple::data_settings_test {
namespace {

class Settings : public testing::Test {
 protected:
  ~Settings() override {
    ::unsetenv("MANIPLE_MKLDNN");
    at::globalContext().setUserEnabledMkldnn(true);
  }
};

TEST_F(Settings, TheKnobDecides) {
  ::setenv("MANIPLE_MKLDNN", "off", 1);
  EXPECT_FALSE(apply_fast_settings().mkldnn);
  EXPECT_FALSE(at::globalContext().userEnabledMkldnn());
  ::setenv("MANIPLE_MKLDNN", "on", 1);
  EXPECT_EQ(apply_fast_settings().mkldnn, at::globalContext().hasMKLDNN());
  EXPECT_TRUE(at::globalContext().userEnabledMkldnn());
  ::setenv("MANIPLE_MKLDNN", "perhaps", 1);
  try {
    apply_fast_settings();
    ADD_FAILURE() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "MANIPLE_MKLDNN is \"perhaps\"; expected one of auto, measure, on, off");
  }
}

TEST_F(Settings, MeasuringMeasuresBothAndLeavesTheChoiceInForce) {
  if (!at::globalContext().hasMKLDNN()) return;
  ::setenv("MANIPLE_MKLDNN", "measure", 1);
  const TorchSettings settings = apply_fast_settings();
  EXPECT_GT(settings.mkldnn_ms, 0);
  EXPECT_GT(settings.blas_ms, 0);
  EXPECT_EQ(at::globalContext().userEnabledMkldnn(), settings.mkldnn);
  // The one that is clearly slower is never taken.
  EXPECT_LT(settings.mkldnn ? settings.mkldnn_ms : settings.blas_ms,
            1.6 * (settings.mkldnn ? settings.blas_ms : settings.mkldnn_ms));
  EXPECT_NE(settings.text().find("measured"), std::string::npos) << settings.text();
}

TEST_F(Settings, ThreadsFollowTheEnvironmentFirst) {
  const int before = torch::get_num_threads();
  ::setenv("OMP_NUM_THREADS", "2", 1);
  EXPECT_EQ(apply_fast_settings({.threads = 7}).threads, before);
  ::unsetenv("OMP_NUM_THREADS");
  EXPECT_EQ(apply_fast_settings({.threads = 1}).threads, 1);
  EXPECT_EQ(apply_fast_settings().threads, 1) << "0 leaves it";
  torch::set_num_threads(before);
  EXPECT_THROW(apply_fast_settings({.threads = -1}), InvalidArgument);
}

TEST(Seed, StreamsAreReproducibleAndUnrelated) {
  const auto numbers = [](std::uint64_t seed, std::uint64_t stream) {
    seed_all(seed, stream);
    return torch::randn({64});
  };
  EXPECT_TRUE(torch::equal(numbers(7, 0), numbers(7, 0)));
  EXPECT_TRUE(torch::equal(numbers(7, 3), numbers(7, 3)));
  EXPECT_FALSE(torch::equal(numbers(7, 0), numbers(7, 1)));
  EXPECT_FALSE(torch::equal(numbers(7, 1), numbers(7, 2)));
  EXPECT_FALSE(torch::equal(numbers(7, 1), numbers(8, 1)));
  EXPECT_FALSE(torch::equal(numbers(7, 1), numbers(8, 0))) << "the next seed is not the next stream";
  torch::manual_seed(7);
  const auto plain = torch::randn({64});
  EXPECT_TRUE(torch::equal(plain, numbers(7, 0)));
}

/// What a progress prints into a file.
class Printed {
 public:
  Printed() : file_(std::tmpfile()) {}
  ~Printed() { std::fclose(file_); }
  std::FILE* stream() const { return file_; }
  std::string text() const {
    std::string result;
    std::rewind(file_);
    for (int c = std::fgetc(file_); c != EOF; c = std::fgetc(file_)) result += static_cast<char>(c);
    return result;
  }

 private:
  std::FILE* file_;
};

std::size_t lines_in(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

TEST(Progress, AFileGetsTenLinesWithTheLastNote) {
  for (const std::size_t total : {10, 11, 19, 469, 1000}) {
    Printed out;
    {
      Progress progress(total, {.label = "epoch 1", .unit = "samples", .stream = out.stream()});
      for (std::size_t i = 1; i <= total; ++i) progress.step(32, format_text("loss {}", i));
      EXPECT_EQ(progress.steps(), total);
    }
    const std::string text = out.text();
    EXPECT_EQ(lines_in(text), 10u) << text;
    EXPECT_EQ(text.find('\r'), std::string::npos);
    EXPECT_NE(text.find(format_text("100 % {}/{}", total, total)), std::string::npos) << text;
    EXPECT_NE(text.find(format_text("loss {}\n", total)), std::string::npos) << text;
    EXPECT_NE(text.find("samples/s"), std::string::npos) << text;
    EXPECT_NE(text.find("[##############################]"), std::string::npos) << text;
  }
}

TEST(Progress, AShortOrBrokenLoopIsStillReported) {
  Printed out;
  {
    Progress progress(1000, {.label = "x", .stream = out.stream()});
    progress.step();
  }
  EXPECT_EQ(lines_in(out.text()), 1u) << out.text();
  EXPECT_EQ(out.text().rfind("x [..............................]   0 % 1/1000  ", 0), 0u) << out.text();
  Printed unknown;
  {
    Progress progress(0, {.stream = unknown.stream()});
    progress.step();
    progress.step();
  }
  EXPECT_EQ(unknown.text().rfind("2  ", 0), 0u) << unknown.text();
}

TEST(Progress, ABarIsRedrawnInPlaceAndEndsItsLine) {
  Printed out;
  Progress progress(3, {.label = "bar", .style = ProgressStyle::bar, .stream = out.stream()});
  for (int i = 0; i < 3; ++i) progress.step(1, "note");
  progress.finish();
  progress.finish();
  progress.step();
  const std::string text = out.text();
  EXPECT_EQ(text.front(), '\r');
  EXPECT_EQ(lines_in(text), 1u);
  EXPECT_EQ(text.back(), '\n');
  EXPECT_NE(text.find("100 % 3/3"), std::string::npos) << text;
}

const ProgressState kHalf = {.label = "epoch 1",
                             .unit = "samples",
                             .note = "loss 0.081",
                             .total = 100,
                             .steps = 50,
                             .amount = 1600,
                             .elapsed = 16};

std::string line_of(ProgressState state, std::size_t width) {
  state.width = width;
  const std::string line = progress_line(state);
  EXPECT_LE(columns_of(line), width) << line;
  return line;
}

TEST(Progress, ANarrowTerminalGetsWhatMattersMost) {
  EXPECT_EQ(line_of(kHalf, 200),
            "epoch 1 [###############...............]  50 % 50/100  100 samples/s  16 s left  loss 0.081");
  EXPECT_EQ(line_of(kHalf, 80), "epoch 1 [#########..........]  50 % 50/100  100 samples/s  16 s left  loss 0.081");
  EXPECT_EQ(line_of(kHalf, 65), "epoch 1  50 % 50/100  100 samples/s  16 s left  loss 0.081") << "the bar goes first";
  EXPECT_EQ(line_of(kHalf, 54), "epoch 1  50 % 50/100  100 samples/s  16 s left  loss ~");
  EXPECT_EQ(line_of(kHalf, 40), "epoch 1  50 % 50/100  16 s left  loss 0~") << "then the throughput";
  EXPECT_EQ(line_of(kHalf, 25), "epoch 1  50 %  16 s left") << "then the count";
  EXPECT_EQ(line_of(kHalf, 12), "epoch 1  50~");
  for (std::size_t width = 0; width < 120; ++width) line_of(kHalf, width);
  ProgressState on_gpu = kHalf;
  on_gpu.memory = memory_text((std::size_t{31} << 30) / 10, std::size_t{4} << 30);
  EXPECT_EQ(line_of(on_gpu, 82), "epoch 1  50 % 50/100  100 samples/s  16 s left  GPU 3.1 of 4.0 GiB  loss 0.081");
  EXPECT_EQ(line_of(on_gpu, 54), "epoch 1  50 % 50/100  100 samples/s  16 s left  loss ~") << "its memory goes next";
  EXPECT_EQ(memory_text(0, 0), "");
}

TEST(Progress, LongAndForeignTexts) {
  ProgressState state = kHalf;
  state.note = std::string(500, 'n');
  EXPECT_EQ(line_of(state, 80),
            "epoch 1 [#####.....]  50 % 50/100  100 samples/s  16 s left  " + std::string(18, 'n') + "~");
  state.note = "\u640d\u5931 0.1 \U0001f680";
  state.label = "\u00dcbung\n\x1b[2J";
  EXPECT_EQ(line_of(state, 100),
            "\u00dcbung  [2J [###############...............]  50 % 50/100  100 samples/s  16 s left  "
            "\u640d\u5931 0.1 \U0001f680");
  state.label = std::string(100, 'l');
  EXPECT_EQ(line_of(state, 60).rfind(std::string(19, 'l') + "~ ", 0), 0u) << "a label takes a third at most";
  for (std::size_t width = 0; width < 140; ++width) line_of(state, width);
  state.must_fit = false;
  state.width = 60;
  EXPECT_NE(progress_line(state).find(std::string(100, 'l')), std::string::npos) << "a log is not cut";
}

TEST(Progress, TimesAndUnknownTotals) {
  EXPECT_EQ(duration_text(0), "0 s");
  EXPECT_EQ(duration_text(99.4), "99 s");
  EXPECT_EQ(duration_text(125), "2:05 min");
  EXPECT_EQ(duration_text(3599.6), "1:00 h");
  EXPECT_EQ(duration_text(3725), "1:02 h");
  EXPECT_EQ(duration_text(27 * 3600 + 61), "1 d 3:01 h");
  EXPECT_NE(duration_text(1e300), "");
  ProgressState state = kHalf;
  state.elapsed = 8000;
  EXPECT_NE(line_of(state, 100).find("0.2 samples/s  2:13 h left"), std::string::npos) << line_of(state, 100);
  state.over = true;
  EXPECT_NE(line_of(state, 100).find("0.2 samples/s  2:13 h  loss"), std::string::npos)
      << "ended early: the time it took";
  state.total = 0;
  EXPECT_EQ(line_of(state, 100), "epoch 1 50  0.2 samples/s  2:13 h  loss 0.081") << "without a total, the time so far";
}

TEST(Progress, GoesOnInTheMiddle) {
  // 90 of 100 were done before; since then 5 steps took 10 s, so 5 more take as long.
  const ProgressState resumed = {
      .unit = "samples", .total = 100, .start = 90, .steps = 95, .amount = 160, .elapsed = 10};
  EXPECT_EQ(line_of(resumed, 60), "[###################.]  95 % 95/100  16 samples/s  10 s left");
  Printed out;
  {
    Progress progress(100, {.stream = out.stream(), .start = 85});
    EXPECT_EQ(progress.steps(), 85u);
    for (int i = 0; i < 15; ++i) progress.step();
    EXPECT_EQ(progress.steps(), 100u);
  }
  EXPECT_EQ(lines_in(out.text()), 2u) << out.text();
  EXPECT_NE(out.text().find(" 90 % 90/100"), std::string::npos) << out.text();
  EXPECT_NE(out.text().find("100 % 100/100"), std::string::npos) << out.text();
  EXPECT_THROW(Progress(100, {.start = 101}), InvalidArgument);
}

TEST(Progress, SilentPrintsNothing) {
  Printed out;
  {
    Progress progress(3, {.style = ProgressStyle::silent, .stream = out.stream()});
    EXPECT_FALSE(progress.is_due());
    progress.step();
  }
  EXPECT_EQ(out.text(), "");
  EXPECT_THROW(Progress(3, {.stream = nullptr}), InvalidArgument);
}

}  // namespace
}  // namespace maniple::data_settings_test
