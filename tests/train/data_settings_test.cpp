// Settings, seeds and the progress line.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>

#include <maniple/comm/error.h>
#include <maniple/train/progress.h>
#include <maniple/train/seed.h>
#include <maniple/train/torch_settings.h>

namespace maniple {
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
    EXPECT_STREQ(error.what(), "MANIPLE_MKLDNN is \"perhaps\"; expected auto, measure, on or off");
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
      for (std::size_t i = 1; i <= total; ++i) progress.step(32, fmt::format("loss {}", i));
      EXPECT_EQ(progress.steps(), total);
    }
    const std::string text = out.text();
    EXPECT_EQ(lines_in(text), 10u) << text;
    EXPECT_EQ(text.find('\r'), std::string::npos);
    EXPECT_NE(text.find(fmt::format("100 % {}/{}", total, total)), std::string::npos) << text;
    EXPECT_NE(text.find(fmt::format("loss {}\n", total)), std::string::npos) << text;
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
}  // namespace maniple
