// Tars and CSV files as they come: every form that is read, and every damage that is named.
#include <zlib.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <fstream>

#include "comm/base/format.h"
#include "harness/error_of.h"
#include "harness/temporary_directory.h"
#include "train/data/csv_records.h"
#include "train/data/tar_bytes.h"
#include "train/data/tar_reader.h"
#include <maniple/maniple.h>

namespace maniple::shards_test {
namespace {

using harness::TemporaryDirectory;

std::string write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

/// "key{extension=bytes,...}" of all samples.
std::string samples_in(const std::string& bytes) {
  const auto reader = tar_samples(bytes_in_memory(bytes, "x.tar"), "x.tar");
  std::string all;
  for (RawSample sample; reader->next(&sample);) {
    all += sample.key + "{";
    for (const auto& [extension, file] : sample.files) all += extension + "=" + file + ",";
    all += "}";
  }
  return all;
}

TEST(Tar, FilesThatShareAPathUpToTheFirstDotAreASample) {
  EXPECT_EQ(samples_in(tar_file("d/1.jpg", "A") + tar_file("d/1.seg.PNG", "B") + tar_file("d.e/1.jpg", "C") +
                       tar_file("./2.cls", "") + tar_end()),
            "d/1{jpg=A,seg.png=B,}d.e/1{jpg=C,}2{cls=,}");
  // What belongs to no sample: directories, links, names without a dot, hidden files.
  EXPECT_EQ(samples_in(tar_file("d/", "", '5') + tar_file("d/README", "x") + tar_file("1.a", "", '2') +
                       tar_file(".b", "x") + tar_file("c.", "x") + tar_file("1.txt", "y") + tar_end()),
            "1{txt=y,}");
  EXPECT_EQ(samples_in(tar_end()), "");
}

TEST(Tar, LongNamesAndSizesOfPaxAndGnu) {
  const std::string long_name = std::string(300, 'n') + ".txt";
  EXPECT_EQ(samples_in(tar_file("pax", pax_record("path", long_name) + pax_record("mtime", "1.5"), 'x') +
                       tar_file("short", "A") + tar_end()),
            std::string(300, 'n') + "{txt=A,}");
  EXPECT_EQ(samples_in(tar_file("././@LongLink", long_name + '\0', 'L') + tar_file("short", "A") + tar_end()),
            std::string(300, 'n') + "{txt=A,}");
  EXPECT_EQ(samples_in(tar_file("pax", pax_record("size", "3"), 'x') + tar_header("1.txt", 0) + "ABC" +
                       std::string(509, '\0') + tar_end()),
            "1{txt=ABC,}");
  EXPECT_EQ(samples_in(tar_file("g", pax_record("comment", "x"), 'g') + tar_file("1.txt", "A") + tar_end()),
            "1{txt=A,}");
}

TEST(Tar, MayBeInsideGzip) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/a.tar.gz";
  const std::string tar = tar_file("1.txt", std::string(5000, 'A')) + tar_file("2.txt", "B") + tar_end();
  gzFile file = ::gzopen(path.c_str(), "wb");
  ::gzwrite(file, tar.data(), static_cast<unsigned>(tar.size()));
  ::gzclose(file);
  EXPECT_EQ(count_samples({path}), std::vector<std::size_t>{2});
  RawSample sample;
  const auto reader = open_tar(path);
  ASSERT_TRUE(reader->next(&sample));
  EXPECT_EQ(sample.files.at("txt"), std::string(5000, 'A'));
  ASSERT_TRUE(reader->next(&sample));
  EXPECT_EQ(sample.files.at("txt"), "B");
  EXPECT_EQ(sample.shard, path);
  EXPECT_FALSE(reader->next(&sample));

  std::ifstream in(path, std::ios::binary);
  const std::string zipped((std::istreambuf_iterator<char>(in)), {});
  const std::string cut = write(folder.path() + "/cut.tar.gz", zipped.substr(0, zipped.size() / 2));
  EXPECT_NE(error_of([&] { count_samples({cut}); }).find(cut + ": ends at offset"), std::string::npos);
}

TEST(Tar, DamageIsNamedWithFileAndOffset) {
  const auto error_in = [](const std::string& bytes) { return error_of([&] { samples_in(bytes); }); };
  const std::string good = tar_file("1.txt", "A");
  EXPECT_EQ(error_in(""), "x.tar: ends at offset 0 without the blocks of zeros that end a tar: it is truncated");
  EXPECT_EQ(error_in(good), "x.tar: ends at offset 1024 without the blocks of zeros that end a tar: it is truncated");
  EXPECT_EQ(error_in(good + std::string(100, 'x')),
            "x.tar: ends at offset 1124, in the middle of a header: the tar is truncated");
  EXPECT_EQ(error_in(good + tar_header("2.txt", 5000)),
            "x.tar: offset 1024: \"2.txt\" has 5000 bytes, but the tar ends after 0: it is truncated");
  std::string changed = good + tar_file("2.txt", "B") + tar_end();
  changed[1030] ^= 1;
  EXPECT_EQ(error_in(changed), "x.tar: offset 1024: no header of a tar: its checksum is wrong");
  EXPECT_EQ(error_in(good + tar_file("1.txt", "B") + tar_end()),
            "x.tar: offset 1024: the sample \"1\" has a second file \"txt\"");
  EXPECT_EQ(error_in(tar_header("pax", std::size_t{1} << 30, 'x')),
            "x.tar: offset 0: a header of 1073741824 bytes; longer ones than 1048576 are not read");
  EXPECT_EQ(error_in(tar_file("pax", "99 path=a\n", 'x') + good + tar_end()),
            "x.tar: offset 512: no record of a pax header; expected \"LENGTH KEY=VALUE\" and a line end");
  EXPECT_EQ(error_in(tar_file("pax", pax_record("size", "-1"), 'x') + good + tar_end()),
            "x.tar: offset 512: \"-1\" is not a file size");
  EXPECT_EQ(error_in(tar_file("1.txt", "", 'S') + tar_end()),
            "x.tar: offset 0: a sparse file; make the tar without --sparse");
}

// ---- CSV -----------------------------------------------------------------------------------------------------------

std::vector<std::vector<std::string>> records_in(const std::string& text, char separator = ',') {
  CsvRecords records(bytes_in_memory(text, "x.csv"), separator);
  std::vector<std::vector<std::string>> all;
  std::vector<CsvField> fields;
  for (CsvRecord record; records.next(record);) {
    split_csv(record, separator, "x.csv", fields);
    all.emplace_back();
    for (const CsvField& field : fields) all.back().emplace_back(field.text);
  }
  return all;
}

TEST(Csv, RecordsOfRfc4180) {
  using Records = std::vector<std::vector<std::string>>;
  EXPECT_EQ(records_in("a,b\r\nc,d"), (Records{{"a", "b"}, {"c", "d"}}));
  EXPECT_EQ(records_in("\xef\xbb\xbf\"a,b\",\"c\r\nd\",\"\"\n\n,\n"), (Records{{"a,b", "c\r\nd", ""}, {"", ""}}));
  EXPECT_EQ(records_in("\"a\"\"b\";c\n", ';'), (Records{{"a\"\"b", "c"}}));
  EXPECT_EQ(records_in(""), Records{});
  // A record that is longer than what is read at a time.
  const std::string text(200'000, 'x');
  EXPECT_EQ(records_in("a\n\"" + text + "\n\"\nb\n"), (Records{{"a"}, {text + "\n"}, {"b"}}));
}

TEST(Csv, DamageIsNamedWithLineAndColumn) {
  const auto error_in = [](const std::string& text) { return error_of([&] { records_in(text); }); };
  EXPECT_EQ(error_in("a,b\nc,\"d\n"), "x.csv:2:3: the quote that begins here is not closed");
  EXPECT_EQ(error_in("a\n1,2\"3\nx\n"), "x.csv:2:4: a quote inside a field that does not begin with one");
  EXPECT_EQ(
      error_in("\"a\nb\"c,d\n"),
      "x.csv:2:3: a closing quote must be followed by \",\" or the line end; write a quote inside a field as two");
}

TEST(Csv, ColumnsByNameAndNumberAreTheSameOfADatasetAndAStream) {
  const TemporaryDirectory folder;
  const std::string path =
      write(folder.path() + "/t.csv", "id,\"w,x\",y,label\n7,1.5,-2e3,3\n\n8, +0.25 ,,1\n9,1e-50,nan,0\n");
  CsvOptions options{.columns = {"y", "1"}, .label = "label", .missing = 9.5F};
  const CsvDataset table(path, options);
  ASSERT_EQ(table.size(), 3u);
  EXPECT_EQ(table.columns(), 2u);
  EXPECT_TRUE(torch::equal(table.get(0).data, torch::tensor({-2000.F, 1.5F})));
  EXPECT_EQ(table.get(0).target.item<std::int64_t>(), 3);
  EXPECT_TRUE(torch::equal(table.get(1).data, torch::tensor({9.5F, 0.25F})));
  EXPECT_TRUE(std::isnan(table.get(2).data[0].item<float>()));
  EXPECT_EQ(table.get(2).data[1].item<float>(), 0.F);
  std::size_t index = 0;
  DataLoader loader(csv_stream(path, options), {.batch_size = 1, .workers = 1});
  for (auto& batch : loader) {
    EXPECT_TRUE(torch::allclose(batch.data[0], table.get(index).data, 0, 0, true));
    EXPECT_TRUE(torch::equal(batch.target[0], table.get(index).target));
    ++index;
  }
  EXPECT_EQ(index, 3u);
  // Several files, and no header.
  const std::string a = write(folder.path() + "/a.csv", "1,2\n3,4\n"), b = write(folder.path() + "/b.csv", "5,6");
  const CsvDataset both(folder.path() + "/[ab].csv", {.header = false, .label = "1", .real_label = true});
  ASSERT_EQ(both.size(), 3u);
  EXPECT_EQ(both.get(2).data.item<float>(), 5.F);
  EXPECT_EQ(both.get(1).target.item<float>(), 4.F);
}

TEST(Csv, InvalidNumbersAreNamed) {
  const TemporaryDirectory folder;
  const std::string path =
      write(folder.path() + "/t.csv", "x,y,label\n1,2,3\n1,abc,3\n1,2\n1,,3\n1,2,0.5\n1e999,2,3\n\"1\n2\",3,4\n");
  const CsvDataset table(path, {.label = "label"});
  const auto error_at = [&](std::size_t index) { return error_of([&] { table.get(index); }); };
  EXPECT_EQ(error_at(0), "no error");
  EXPECT_EQ(error_at(1), path + ":3:3: \"abc\" in column \"y\"; expected a number");
  EXPECT_EQ(error_at(2), path + ":4:1: a record of 2 fields; the header has 3");
  EXPECT_EQ(error_at(3),
            path + ":5:3: nothing in column \"y\"; expected a number (CsvOptions::missing says what nothing means)");
  EXPECT_EQ(
      error_at(4),
      path +
          ":6:5: \"0.5\" in column \"label\"; expected a whole number as label (CsvOptions::real_label takes others)");
  EXPECT_EQ(error_at(5), path + ":7:1: \"1e999\" in column \"x\"; expected a number that a float can hold");
  EXPECT_EQ(error_at(6), path + ":8:2: \"1 2\" in column \"x\"; expected a number");
  DataLoader stream(csv_stream(path, {.label = "label"}), {.batch_size = 1});
  EXPECT_EQ(
      error_of([&] {
        for ([[maybe_unused]] auto& batch : stream) {
        }
      }),
      format_text("DataLoader: sample \"line 3\" of {} (offset 16): {}:3:3: \"abc\" in column \"y\"; expected a number",
                  path, path));
  EXPECT_EQ(error_of([&] { CsvDataset(path, {.label = "z"}); }),
            path + ":1:1: there is no label \"z\"; its header has x, y, label");
  EXPECT_EQ(error_of([&] { CsvDataset(folder.path() + "/*.txt"); }),
            "find_shards: no file fits \"" + folder.path() + "/*.txt\"");
}

}  // namespace
}  // namespace maniple::shards_test
