// The reader of IDX files against every way a file can be wrong, and the datasets made from them.
#define ZLIB_CONST
#include <zlib.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sys/stat.h>

#include <fstream>
#include <set>

#include "comm/base/format.h"
#include "harness/temporary_directory.h"
#include "train/data/idx.h"
#include <maniple/comm/error.h>
#include <maniple/train/mnist.h>

namespace maniple::data_mnist_test {
namespace {

std::string big_endian(std::uint32_t value) {
  std::string text;
  for (const int shift : {24, 16, 8, 0}) text += static_cast<char>(value >> shift);
  return text;
}

std::string idx(const std::vector<std::uint32_t>& shape, const std::string& elements) {
  std::string text = {0, 0, 8, static_cast<char>(shape.size())};
  for (const std::uint32_t size : shape) text += big_endian(size);
  return text + elements;
}

std::string gzip(const std::string& bytes) {
  z_stream stream = {};
  deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  std::string result(compressBound(bytes.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<const Bytef*>(bytes.data());
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(result.data());
  stream.avail_out = static_cast<uInt>(result.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  result.resize(stream.total_out);
  deflateEnd(&stream);
  return result;
}

std::string error_of(const std::string& file) {
  try {
    parse_idx(file, "f");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

const std::string kElements = "0123456789ab";

TEST(Idx, PlainAndCompressedAreReadAlike) {
  const std::string file = idx({3, 2, 2}, kElements);
  for (const std::string& form : {file, gzip(file), gzip(file.substr(0, 9)) + gzip(file.substr(9))}) {
    const IdxArray array = parse_idx(form, "f");
    EXPECT_EQ(array.shape, (std::vector<std::size_t>{3, 2, 2}));
    EXPECT_EQ(std::string(array.bytes.begin(), array.bytes.end()), kElements);
  }
  for (const std::string& empty : {idx({0}, ""), gzip(idx({0}, "")), idx({0, 28, 28}, "")}) {
    EXPECT_TRUE(parse_idx(empty, "f").bytes.empty());
  }
}

TEST(Idx, EveryTruncationIsNoticed) {
  const std::string file = idx({3, 2, 2}, kElements);
  const std::string compressed = gzip(file);
  for (std::size_t size = 0; size < file.size(); ++size) EXPECT_NE(error_of(file.substr(0, size)), "no error") << size;
  for (std::size_t size = 0; size < compressed.size(); ++size)
    EXPECT_NE(error_of(compressed.substr(0, size)), "no error") << size;
}

TEST(Idx, WhatIsWrongIsNamedWithItsOffset) {
  const std::string file = idx({3, 2, 2}, kElements);
  EXPECT_EQ(error_of(""), "f: ends at offset 0; an IDX file begins with 4 bytes of magic");
  EXPECT_EQ(error_of("PK\3\4zip"),
            "f: offset 0: 50 4b is not the beginning of an IDX file (00 00), nor of gzip (1f 8b)");
  EXPECT_EQ(error_of(std::string("\0\0\x0d\1\0\0\0\0", 8)),
            "f: offset 2: elements of type 0x0d (float); expected 0x08 (unsigned byte)");
  EXPECT_EQ(error_of(std::string("\0\0\x08\0", 4)), "f: offset 3: 0 dimensions; expected 1 to 8");
  EXPECT_EQ(error_of(std::string("\0\0\x08\x09", 4)), "f: offset 3: 9 dimensions; expected 1 to 8");
  EXPECT_EQ(error_of(file.substr(0, 10)), "f: ends at offset 10, inside its header of 16 bytes");
  EXPECT_EQ(error_of(file.substr(0, 20)),
            "f: ends at offset 20; its header announces 12 bytes of elements up to offset 28");
  EXPECT_EQ(error_of(file + "xy"), "f: offset 28: 2 bytes follow the last element");
  EXPECT_EQ(error_of(idx({0xffffffff, 0xffffffff, 0xffffffff}, "")),
            "f: offset 8: dimension 1 of 4294967295 elements makes the array larger than any memory");
  EXPECT_EQ(error_of(idx({0x7fffffff, 2}, "x")),
            "f: ends at offset 13; its header announces 4294967294 bytes of elements up to offset 4294967306");
}

TEST(Idx, WhatIsWrongInsideGzip) {
  const std::string file = idx({3, 2, 2}, kElements);
  const std::string good = gzip(file);
  EXPECT_EQ(
      error_of(good.substr(0, good.size() - 1)),
      format_text("f: ends at offset {}, in the middle of its gzip data: the file is truncated", good.size() - 1));
  std::string bad_sum = good;
  bad_sum[bad_sum.size() - 8] ^= 1;
  EXPECT_NE(error_of(bad_sum).find("damaged gzip data: incorrect data check"), std::string::npos) << error_of(bad_sum);
  EXPECT_EQ(error_of(bad_sum).rfind("f: offset ", 0), 0u);
  EXPECT_EQ(error_of(good + "xy"), format_text("f: offset {}: 2 bytes that are not gzip follow its end", good.size()));
  EXPECT_EQ(error_of(gzip(file + "xy")), "f (uncompressed): offset 28: more bytes follow the last element");
  EXPECT_EQ(error_of(gzip(idx({60000, 28, 28}, std::string(5000, 'x'))) + ""),
            "f (uncompressed): offset 4: announces 47040000 bytes of elements; " +
                std::to_string(gzip(idx({60000, 28, 28}, std::string(5000, 'x'))).size()) +
                " bytes of gzip cannot hold as many");
  EXPECT_EQ(error_of(gzip(idx({3, 2, 2}, "0123456789"))),
            "f (uncompressed): ends at offset 26; its header announces 12 bytes of elements up to offset 28");
  EXPECT_EQ(error_of(gzip(idx({0x10000, 0x10000}, "x"))),
            "f (uncompressed): offset 4: announces 4294967296 bytes of elements; arrays above 1073741824 are not read");
  EXPECT_EQ(error_of(gzip(gzip(file))),
            "f (uncompressed): offset 0: 1f 8b is not the beginning of an IDX file (00 00), nor of gzip (1f 8b)");
}

class MnistFolder : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary | std::ios::trunc) << bytes;
  }
  std::string path(const std::string& name) const { return folder.path() + "/" + name; }

  /// Two images for training, three for testing, of 2 x 2 pixels.
  void write_all() const {
    write("train-images-idx3-ubyte", idx({2, 2, 2}, std::string("\0\xff\1\2\3\4\5\6", 8)));
    write("train-labels-idx1-ubyte", idx({2}, "\7\3"));
    write("t10k-images-idx3-ubyte.gz", gzip(idx({3, 2, 2}, kElements)));
    write("t10k-labels-idx1-ubyte", gzip(idx({3}, std::string("\0\1\2", 3))));  // compressed, whatever its name says
  }

  template <class Call>
  static std::string error_of(Call call) {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
  std::string error_of_train() const {
    return error_of([&] { Mnist(folder.path(), Mnist::Split::train); });
  }

  harness::TemporaryDirectory folder;
};

TEST_F(MnistFolder, IsReadAndNormalised) {
  EXPECT_FALSE(Mnist::is_in(folder.path()));
  write_all();
  EXPECT_TRUE(Mnist::is_in(folder.path()));
  Mnist train(folder.path(), Mnist::Split::train);
  ASSERT_EQ(train.size().value(), 2u);
  const auto example = train.get(0);
  EXPECT_EQ(example.data.sizes(), (std::vector<std::int64_t>{1, 2, 2}));
  EXPECT_NEAR(example.data[0][0][0].item<float>(), -0.1307 / 0.3081, 1e-6);
  EXPECT_NEAR(example.data[0][0][1].item<float>(), (1 - 0.1307) / 0.3081, 1e-6);
  EXPECT_EQ(example.target.item<std::int64_t>(), 7);
  EXPECT_EQ(train.get(1).target.item<std::int64_t>(), 3);
  EXPECT_EQ(error_of([&] { train.get(2); }), "Mnist: index 2 in a set of 2");

  Mnist test(folder.path(), Mnist::Split::test, {.mean = 0, .deviation = 1, .limit = 2});
  ASSERT_EQ(test.size().value(), 2u);
  EXPECT_NEAR(test.get(1).data[0][1][1].item<float>(), '7' / 255.0, 1e-6);
  EXPECT_EQ(error_of([&] { Mnist(folder.path(), Mnist::Split::test, {.deviation = 0}); }),
            "Mnist: a deviation of 0; expected a positive number");
}

TEST_F(MnistFolder, LoadsInBatchesWithWorkers) {
  auto loader = torch::data::make_data_loader(Mnist::drawn(50, 1).map(torch::data::transforms::Stack<>()),
                                              torch::data::DataLoaderOptions().batch_size(16).workers(2));
  std::int64_t count = 0;
  for (auto& batch : *loader) {
    EXPECT_EQ(batch.data.sizes().slice(1), (std::vector<std::int64_t>{1, 28, 28}));
    EXPECT_EQ(batch.data.size(0), batch.target.size(0));
    count += batch.target.size(0);
  }
  EXPECT_EQ(count, 50);
}

TEST_F(MnistFolder, FilesThatDoNotFitAreNamed) {
  EXPECT_EQ(error_of_train(), "cannot open " + path("train-images-idx3-ubyte") + ": No such file or directory");
  write_all();
  write("train-labels-idx1-ubyte", idx({3}, "\1\2\3"));
  EXPECT_EQ(error_of_train(), path("train-images-idx3-ubyte") + " holds 2 images, but " +
                                  path("train-labels-idx1-ubyte") + " holds 3 labels");
  write("train-labels-idx1-ubyte", idx({2}, "\1\xa"));
  EXPECT_EQ(error_of_train(), path("train-labels-idx1-ubyte") + ": offset 9: label 10 of image 1; expected 0 to 9");
  write("train-labels-idx1-ubyte", idx({2, 1}, "\1\2"));
  EXPECT_EQ(error_of_train(), path("train-labels-idx1-ubyte") + ": offset 3: 2 dimensions; labels have 1 (count)");
  write("train-labels-idx1-ubyte", idx({2}, "\1\2"));
  EXPECT_EQ(error_of_train(), "no error");
  write("train-images-idx3-ubyte", idx({2}, "\1\2"));
  EXPECT_EQ(error_of_train(),
            path("train-images-idx3-ubyte") + ": offset 3: 1 dimensions; images have 3 (count, rows, columns)");
  write("train-images-idx3-ubyte", idx({2, 0, 5}, ""));
  EXPECT_EQ(error_of_train(), path("train-images-idx3-ubyte") + ": offset 8: images of 0 x 5 pixels");
  ::unlink(path("train-images-idx3-ubyte").c_str());
  ASSERT_EQ(::mkfifo(path("train-images-idx3-ubyte").c_str(), 0600), 0);
  EXPECT_EQ(error_of_train(), path("train-images-idx3-ubyte") + ": is not a regular file");
}

TEST(DrawnDigits, AreTheSameForASeedAndBalanced) {
  const LabelledImages set = draw_digits(200, 3);
  EXPECT_EQ(set.pixels, draw_digits(200, 3).pixels);
  EXPECT_NE(set.pixels, draw_digits(200, 4).pixels);
  int counts[10] = {};
  for (const std::uint8_t label : set.labels) ++counts[label];
  for (const int count : counts) EXPECT_EQ(count, 20);
  // No two pictures are equal, and each has some ink on mostly empty ground.
  std::set<std::string> pictures;
  for (std::size_t i = 0; i < set.count; ++i) {
    const auto first = set.pixels.begin() + static_cast<std::ptrdiff_t>(i * 784);
    EXPECT_TRUE(pictures.insert(std::string(first, first + 784)).second);
    const auto dark = std::count_if(first, first + 784, [](std::uint8_t pixel) { return pixel > 128; });
    EXPECT_GT(dark, 20) << i;
    EXPECT_LT(dark, 392) << i;
  }
  EXPECT_EQ(draw_digits(0, 1).count, 0u);
}

}  // namespace
}  // namespace maniple::data_mnist_test
