// Text as bytes and CIFAR-10: what they hand out, and every way a file can be wrong.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <set>

#include "comm/base/format.h"
#include "harness/error_of.h"
#include "harness/temporary_directory.h"
#include <maniple/comm/error.h>
#include <maniple/train/cifar10.h>
#include <maniple/train/sampler.h>
#include <maniple/train/text.h>

namespace maniple::data_text_test {
namespace {

using harness::TemporaryDirectory;

std::string write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

std::string bytes_of(const torch::Tensor& numbers) {
  std::string text;
  for (std::int64_t i = 0; i < numbers.numel(); ++i) text += static_cast<char>(numbers[i].item<std::int64_t>());
  return text;
}

std::vector<std::string> windows_of(ByteText text) {
  std::vector<std::string> all;
  for (std::size_t i = 0; i < text.size().value(); ++i) {
    const auto sample = text.get(i);
    EXPECT_EQ(sample.data.scalar_type(), torch::kInt64);
    EXPECT_EQ(bytes_of(sample.data).substr(1), bytes_of(sample.target).substr(0, sample.target.numel() - 1));
    all.push_back(bytes_of(sample.data) + bytes_of(sample.target).back());
  }
  return all;
}

TEST(ByteText, WindowsOfAFile) {
  const TemporaryDirectory folder;
  const std::string path = write_file(folder.path() + "/t", "abcdefghij");
  using Windows = std::vector<std::string>;
  EXPECT_EQ(windows_of(ByteText(path, {.block_size = 3})), (Windows{"abcd", "defg", "ghij"}));
  EXPECT_EQ(windows_of(ByteText(path, {.block_size = 4})), (Windows{"abcde", "efghi"})) << "j is left over";
  EXPECT_EQ(windows_of(ByteText(path, {.block_size = 4, .stride = 3})), (Windows{"abcde", "defgh"}));
  EXPECT_EQ(windows_of(ByteText(path, {.block_size = 7, .stride = 1})), (Windows{"abcdefgh", "bcdefghi", "cdefghij"}));
  EXPECT_EQ(windows_of(ByteText(path, {.block_size = 1, .stride = 5})), (Windows{"ab", "fg"}));
  EXPECT_EQ(windows_of(ByteText(path, {.block_size = 9})), (Windows{"abcdefghij"}));
  EXPECT_EQ(windows_of(ByteText::from_memory("abcdefghij", {.block_size = 3})), (Windows{"abcd", "defg", "ghij"}));
  ByteText text(path, {.block_size = 3});
  EXPECT_EQ(text.bytes(), 10u);
  EXPECT_EQ(text.text(8, 5), "ij");
  EXPECT_EQ(text.text(10, 5), "");
  EXPECT_EQ(error_of([&] { text.text(11, 1); }), "ByteText: offset 11 in 10 bytes of " + path);
  EXPECT_EQ(error_of([&] { text.get(3); }), "ByteText: window 3 of " + path + ", of which there are 3");
}

TEST(ByteText, EveryByteIsItself) {
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  const auto sample = ByteText::from_memory(all, {.block_size = 255}).get(0);
  EXPECT_TRUE(torch::equal(sample.data, torch::arange(255)));
  EXPECT_TRUE(torch::equal(sample.target, torch::arange(1, 256)));
}

TEST(ByteText, PartsShareNothingAndLoseNothing) {
  std::string all;
  for (int i = 0; i < 250; ++i) all += static_cast<char>(i);
  for (const double fraction : {0.1, 0.25, 0.5, 0.99}) {
    const auto part = [&](ByteTextSplit split) {
      return ByteText::from_memory(all,
                                   {.block_size = 1, .stride = 1, .split = split, .validation_fraction = fraction});
    };
    const auto train = part(ByteTextSplit::train);
    const auto validation = part(ByteTextSplit::validation);
    EXPECT_EQ(train.text(0, 1000) + validation.text(0, 1000), all);
    EXPECT_NEAR(static_cast<double>(validation.bytes()), 250 * fraction, 1);
    std::set<char> seen;
    for (const auto& window : windows_of(train)) seen.insert(window.begin(), window.end());
    for (const auto& window : windows_of(validation)) {
      for (const char byte : window) EXPECT_EQ(seen.count(byte), 0u);
    }
  }
}

TEST(ByteText, WrongFiles) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/t";
  try {
    ByteText missing(path);
    ADD_FAILURE();
  } catch (const SystemError& error) {
    EXPECT_EQ(error.code(), ENOENT);
    EXPECT_NE(std::string(error.what()).find("cannot open " + path), std::string::npos) << error.what();
  }
  EXPECT_EQ(error_of([&] { ByteText text(folder.path()); }), folder.path() + ": is a directory; expected a file");
  ASSERT_EQ(::mkfifo((path + "pipe").c_str(), 0600), 0);
  EXPECT_EQ(error_of([&] { ByteText text(path + "pipe"); }), path + "pipe: is not a regular file");
  write_file(path, "");
  EXPECT_EQ(error_of([&] { ByteText text(path); }), path + ": is empty");
  write_file(path, "abcd");
  EXPECT_EQ(error_of([&] { ByteText text(path, {.block_size = 4}); }),
            path + ": too short: it has 4 bytes; a window with a block_size of 4 takes 5, take a smaller one");
  EXPECT_EQ(
      error_of([&] { ByteText text(path, {.block_size = 1, .split = ByteTextSplit::validation}); }),
      path +
          ": too short: its validation part has 1 bytes; a window with a block_size of 1 takes 2, take a smaller one");
  EXPECT_EQ(error_of([&] { ByteText text(path, {.block_size = 0}); }),
            "ByteText: a block_size of 0; expected 1 to 1073741824 bytes");
  for (const double fraction : {0.0, 1.0, -0.1, std::nan("")}) {
    EXPECT_NE(error_of([&] {
                ByteText text(path, {.block_size = 1, .split = ByteTextSplit::train, .validation_fraction = fraction});
              }).find("a validation_fraction of "),
              std::string::npos);
  }
}

TEST(ByteText, AFileThatShrinksIsAnErrorNotASignal) {
  const TemporaryDirectory folder;
  const std::string path = write_file(folder.path() + "/t", std::string(100000, 'x'));
  ByteText text(path, {.block_size = 9});
  ASSERT_EQ(::truncate(path.c_str(), 50), 0);
  EXPECT_EQ(text.get(4).data.numel(), 9) << "what is still there can be read";
  EXPECT_EQ(
      error_of([&] { text.get(5); }),
      path + ": ends at offset 50, but had 100000 bytes when it was opened; it must not change while it is in use");
}

// A file with a hole takes no room: five gigabytes, with something to read near the end.
TEST(ByteText, FilesLargerThanFourGigabytes) {
  const TemporaryDirectory folder;
  const std::string path = write_file(folder.path() + "/t", "begin");
  const std::size_t size = std::size_t{5} << 30;
  ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(size)), 0);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(size - 4));
  file << "ends";
  file.close();
  ByteText text(path, {.block_size = 3, .stride = 1});
  EXPECT_EQ(text.size().value(), size - 3);
  EXPECT_EQ(bytes_of(text.get(0).data), "beg");
  EXPECT_EQ(bytes_of(text.get(size - 4).data), "end");
}

TEST(ByteText, ThroughALoaderWithOurSampler) {
  std::string all;
  for (int i = 0; i < 201; ++i) all += static_cast<char>(i);
  const auto text = ByteText::from_memory(all, {.block_size = 4});
  std::multiset<std::int64_t> seen;
  for (int rank = 0; rank < 2; ++rank) {
    DistributedSampler sampler(text.size().value(), {.num_replicas = 2, .rank = rank, .seed = 3});
    auto loader = torch::data::make_data_loader(ByteText(text).map(torch::data::transforms::Stack<>()), sampler,
                                                torch::data::DataLoaderOptions().batch_size(5).workers(2));
    for (auto& batch : *loader) {
      EXPECT_EQ(batch.data.sizes(), (std::vector<std::int64_t>{5, 4}));
      EXPECT_TRUE(torch::equal(batch.data + 1, batch.target));
      for (std::int64_t i = 0; i < 5; ++i) seen.insert(batch.data[i][0].item<std::int64_t>());
    }
  }
  EXPECT_EQ(seen.size(), 50u);
  EXPECT_EQ(std::set<std::int64_t>(seen.begin(), seen.end()).size(), 50u) << "every window once";
}

std::string record(int label, int first_byte) {
  std::string bytes(3073, '\0');
  bytes[0] = static_cast<char>(label);
  for (std::size_t i = 1; i < bytes.size(); ++i) bytes[i] = static_cast<char>(first_byte + i / 1025 * 100);
  return bytes;
}

void write_cifar(const std::string& folder) {
  for (int file = 0; file < 5; ++file) {
    write_file(format_text("{}/data_batch_{}.bin", folder, file + 1), record(file, file) + record(9 - file, 10 + file));
  }
  write_file(folder + "/test_batch.bin", record(7, 30) + record(8, 40));
}

constexpr Cifar10Options kTwo = {.records_per_file = 2};

TEST(Cifar10, SixFilesBecomeTwoSets) {
  const TemporaryDirectory folder;
  EXPECT_FALSE(Cifar10::is_in(folder.path()));
  write_cifar(folder.path());
  EXPECT_TRUE(Cifar10::is_in(folder.path()));
  Cifar10 train(folder.path(), Cifar10::Split::train, kTwo);
  ASSERT_EQ(train.size().value(), 10u);
  EXPECT_TRUE(torch::equal(train.targets(), torch::tensor({0, 9, 1, 8, 2, 7, 3, 6, 4, 5})));
  EXPECT_EQ(train.images().sizes(), (std::vector<std::int64_t>{10, 3, 32, 32}));
  EXPECT_EQ(train.images()[3][0][5][5].item<int>(), 11);
  Cifar10 test(folder.path(), Cifar10::Split::test, kTwo);
  const auto sample = test.get(1);
  EXPECT_EQ(sample.target.item<std::int64_t>(), 8);
  EXPECT_EQ(sample.data.sizes(), (std::vector<std::int64_t>{3, 32, 32}));
  const Cifar10Options defaults;
  for (std::size_t channel = 0; channel < 3; ++channel) {
    const float expected =
        (static_cast<float>(40 + channel * 100) / 255 - defaults.mean[channel]) / defaults.deviation[channel];
    EXPECT_NEAR(sample.data[static_cast<std::int64_t>(channel)][3][4].item<float>(), expected, 1e-5) << channel;
  }
  EXPECT_STREQ(Cifar10::kClasses[8], "ship");
  EXPECT_EQ(error_of([&] { test.get(2); }), "Cifar10: index 2 in a set of 2");
  auto loader = torch::data::make_data_loader(train.map(torch::data::transforms::Stack<>()),
                                              torch::data::DataLoaderOptions().batch_size(4).workers(1));
  std::int64_t count = 0;
  for (auto& batch : *loader) count += batch.data.size(0);
  EXPECT_EQ(count, 10);
}

TEST(Cifar10, ALimitReadsOnlyWhatItNeeds) {
  const TemporaryDirectory folder;
  write_cifar(folder.path());
  ::unlink((folder.path() + "/data_batch_3.bin").c_str());
  const Cifar10 some(folder.path(), Cifar10::Split::train, {.limit = 3, .records_per_file = 2});
  EXPECT_TRUE(torch::equal(some.targets(), torch::tensor({0, 9, 1})));
  EXPECT_THROW(Cifar10(folder.path(), Cifar10::Split::train, kTwo), SystemError);
}

TEST(Cifar10, TheFolderOfTheArchiveIsFound) {
  const TemporaryDirectory folder;
  const std::string inner = folder.path() + "/cifar-10-batches-bin";
  ASSERT_EQ(::mkdir(inner.c_str(), 0700), 0);
  write_cifar(inner);
  EXPECT_TRUE(Cifar10::is_in(folder.path()));
  EXPECT_EQ(Cifar10(folder.path(), Cifar10::Split::test, kTwo).size().value(), 2u);
}

TEST(Cifar10, WrongFiles) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/test_batch.bin";
  const auto error = [&](Cifar10Options options = kTwo) {
    return error_of([&] { Cifar10(folder.path(), Cifar10::Split::test, options); });
  };
  EXPECT_THROW(Cifar10(folder.path(), Cifar10::Split::test), SystemError);
  write_file(path, "");
  EXPECT_EQ(error(), path + ": is empty; expected records of 3073 bytes");
  const std::string two = record(1, 1) + record(2, 2);
  write_file(path, two);
  EXPECT_EQ(error({}), path +
                           ": ends at offset 6146; expected 10000 records of 3073 bytes up to offset 30730000 "
                           "(is it the binary version?)");
  write_file(path, two.substr(0, 5000));
  EXPECT_EQ(error(), path +
                         ": ends at offset 5000; expected 2 records of 3073 bytes up to offset 6146 "
                         "(is it the binary version?)");
  EXPECT_EQ(error({.records_per_file = 0}),
            path + ": ends at offset 5000, inside record 1; expected whole records of 3073 bytes");
  write_file(path, two + "x");
  EXPECT_NE(error().find("ends at offset 6147"), std::string::npos) << error();
  write_file(path, record(1, 1) + record(10, 2));
  EXPECT_EQ(error(), path + ": offset 3073: label 10 of record 1; expected 0 to 9");
  write_file(path, record(255, 1) + record(1, 2));
  EXPECT_EQ(error(), path + ": offset 0: label 255 of record 0; expected 0 to 9");
  EXPECT_EQ(error({.deviation = {1, 0, 1}}), "Cifar10: a deviation of 0; expected a positive number");
  ::unlink(path.c_str());
  ASSERT_EQ(::mkdir(path.c_str(), 0700), 0);
  EXPECT_EQ(error(), path + ": is a directory; expected a file");
}

}  // namespace
}  // namespace maniple::data_text_test
