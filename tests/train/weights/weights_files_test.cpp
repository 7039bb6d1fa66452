// Files of weights that are damaged, or made to do damage: each is refused with what is wrong, and costs neither memory
// nor time.
#include <gtest/gtest.h>

#include <cstring>

#include "train/weights/name_rules.h"
#include "train/weights/pickle.h"
#include "train/weights/torch_file.h"
#include "train/weights/torch_file_bytes.h"
#include "train/weights/weights_files.h"
#include "train/weights/zip_archive.h"
#include <maniple/comm/error.h>

namespace maniple::weights_files_test {
namespace {

using namespace torch_file_bytes;

template <class Call>
std::string trouble(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

StoredTensors stored_in(const std::string& bytes, std::string_view key = "") {
  return read_torch_file(
      bytes.size(),
      [&](std::uint64_t offset, void* to, std::size_t count) {
        ASSERT_LE(offset + count, bytes.size());
        std::memcpy(to, bytes.data() + offset, count);
      },
      key);
}

std::string trouble_with_file(const std::string& bytes) {
  return trouble([&] { stored_in(bytes); });
}
std::string trouble_with_pickle(const std::string& value) {
  return trouble([&] { read_state_dict(pickle(value), ""); });
}

#define EXPECT_HOLDS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

const std::string kFloats = storage("FloatStorage", "0", 6);
const std::string kGood = pickle(dictionary({{"a", tensor(kFloats, 1, {2, 2}, {3, 1})}}));

TEST(TorchFile, OffsetsMatchTheFile) {
  for (const bool zip64 : {false, true}) {
    const std::string bytes = torch_file(kGood, {{"0", "0000111122223333444455556666"}}, zip64);
    EXPECT_HOLDS(trouble_with_file(bytes), "6 elements of 4 bytes, but the file has 28 bytes");
    const std::string right = torch_file(kGood, {{"0", "000011112222333344445555"}}, zip64);
    const StoredTensors stored = stored_in(right);
    ASSERT_EQ(stored.tensors.size(), 1u);
    EXPECT_EQ(right.substr(stored.tensors[0].begin, 8), "11112222");
    EXPECT_EQ(stored.tensors[0].shape, (std::vector<std::int64_t>{2, 2}));
    EXPECT_FALSE(is_row_major(stored.tensors[0]));
  }
}

TEST(TorchFile, TruncatedAnywhereItIsRefused) {
  const std::string bytes = torch_file(kGood, {{"0", std::string(24, 'x')}}, true);
  for (std::size_t length = 0; length < bytes.size(); ++length)
    ASSERT_NE(trouble_with_file(bytes.substr(0, length)), "accepted") << length;
}

TEST(TorchFile, InconsistentArchivesAreRefused) {
  const auto changed = [](std::string bytes, const std::string& from, const std::string& to) {
    const std::size_t at = bytes.rfind(from);
    EXPECT_NE(at, std::string::npos);
    return bytes.replace(at, to.size(), to);
  };
  const std::string good = torch_file(kGood, {{"0", std::string(24, 'x')}});
  const std::string entry = "archive/data/0";
  const std::size_t central = good.rfind(entry) - 46;
  const auto with = [&](std::size_t field, const std::string& value) {
    return std::string(good).replace(central + field, value.size(), value);
  };
  EXPECT_EQ(trouble_with_file(good), "accepted");
  EXPECT_HOLDS(trouble_with_file(with(10, little(8, 2))), "\"archive/data/0\" is compressed (method 8)");
  EXPECT_HOLDS(trouble_with_file(with(8, little(1, 2))), "is encrypted");
  EXPECT_HOLDS(trouble_with_file(with(20, little(25, 4))), "25 bytes in the file and 24 in memory");
  EXPECT_HOLDS(trouble_with_file(with(20, little(1 << 30, 4) + little(1 << 30, 4))), "reaches beyond the data");
  EXPECT_HOLDS(trouble_with_file(with(20, std::string(8, '\xff'))), "zip64 field is missing");
  EXPECT_HOLDS(trouble_with_file(with(42, little(0, 4))), "zip entry \"archive/data");
  EXPECT_HOLDS(trouble_with_file(with(42, little(1 << 30, 4))), "lies outside of the file");
  EXPECT_HOLDS(trouble_with_file(with(20, little(40, 4) + little(40, 4))), "overlaps");
  EXPECT_HOLDS(trouble_with_file(zip_of({{"a/data.pkl", kGood}, {"a/data.pkl", kGood}})), "two entries");
  EXPECT_HOLDS(trouble_with_file(zip_of({{"a/data.pkl", kGood}, {"b/data.pkl", kGood}})), "two entries data.pkl");
  EXPECT_HOLDS(trouble_with_file(zip_of({{"a/data.pkl", kGood}, {"a/constants.pkl", ""}})), "TorchScript archive");
  EXPECT_HOLDS(trouble_with_file(zip_of({{"a/data.pkl", kGood}, {"a/byteorder", "big"}})), "byte order is \"big\"");
  EXPECT_HOLDS(trouble_with_file(torch_file(kGood, {})), "\"archive/data/0\", is missing");
  EXPECT_HOLDS(trouble_with_file(changed(good, "PK\5\6", "PK\5\7")), "no directory at its end");
  const std::size_t end = good.rfind("PK\5\6");
  EXPECT_HOLDS(trouble_with_file(std::string(good).replace(end + 10, 2, little(9, 2))), "ends after 4 of 9 entries");
  EXPECT_HOLDS(trouble_with_file(std::string(good).replace(end + 12, 4, little(1 << 30, 4))), "directory lies outside");
}

TEST(Pickle, ViewsMustLieInTheirStorage) {
  const auto with = [](std::int64_t offset, std::vector<std::int64_t> shape, std::vector<std::int64_t> strides) {
    return trouble_with_pickle(dictionary({{"a", tensor(kFloats, offset, shape, strides)}}));
  };
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  EXPECT_EQ(with(0, {2, 3}, {3, 1}), "accepted");
  EXPECT_EQ(with(5, {}, {}), "accepted");
  EXPECT_EQ(with(0, {1000, 0}, {1, 1}), "accepted") << "it has no elements";
  EXPECT_EQ(with(0, {1000}, {0}), "accepted") << "one element, expanded";
  EXPECT_HOLDS(with(0, {2, 4}, {3, 1}), "reaches element 6 of a storage of 6");
  EXPECT_HOLDS(with(6, {}, {}), "reaches element 6");
  EXPECT_HOLDS(with(1, {6}, {1}), "reaches element 6");
  EXPECT_HOLDS(with(0, {2}, {-1}), "strides of a tensor");
  EXPECT_HOLDS(with(-1, {2}, {1}), "offset of a tensor");
  EXPECT_HOLDS(with(0, {-2}, {1}), "shape of a tensor");
  EXPECT_HOLDS(with(0, {2, 2}, {kHuge, kHuge}), "lead out of its storage");
  EXPECT_HOLDS(with(0, {3, 3}, {kHuge, 1}), "lead out of its storage");
  EXPECT_HOLDS(with(kHuge, {2}, {1}), "reaches element");
  EXPECT_HOLDS(with(0, {kHuge, kHuge}, {0, 0}), "larger than any file");
  EXPECT_HOLDS(with(0, {2}, {1, 1}), "1 extents and 2 strides");
  EXPECT_HOLDS(with(0, std::vector<std::int64_t>(65, 1), std::vector<std::int64_t>(65, 1)), "more than 64 dimensions");
  EXPECT_HOLDS(trouble_with_pickle(dictionary({{"a", tensor(storage("FloatStorage", "0", kHuge), 0, {1}, {1})}})),
               "larger than any file");
  EXPECT_HOLDS(trouble_with_pickle(dictionary({{"a", tensor(storage("FloatStorage", "0", -1), 0, {}, {})}})),
               "less than no elements");
}

TEST(Pickle, UnsupportedPicklesAreRefusedByName) {
  EXPECT_HOLDS(trouble_with_pickle(global("os", "system")), "it refers to os.system");
  EXPECT_HOLDS(trouble_with_pickle(text("builtins") + text("eval") + "\x93"), "it refers to builtins.eval");
  EXPECT_HOLDS(trouble_with_pickle(global("torch", "save")), "it refers to torch.save");
  EXPECT_HOLDS(trouble_with_pickle(global("argparse", "Namespace") + ")\x81"), "argparse.Namespace");
  EXPECT_HOLDS(trouble_with_pickle("I1\n"), "instruction 0x49 is not one");
  EXPECT_HOLDS(trouble_with_pickle(integer(1)), "it holds a whole number");
  EXPECT_HOLDS(trouble([] { read_state_dict("\x80\x01}.", ""); }), "protocol 1");
}

TEST(Pickle, DamagedPicklesAreRefused) {
  EXPECT_HOLDS(trouble([] { read_state_dict("", ""); }), "ends inside an instruction");
  EXPECT_HOLDS(trouble_with_pickle("X\xff\xff\xff\x7f"
                                   "abc"),
               "ends inside an instruction");
  EXPECT_HOLDS(trouble_with_pickle("\x8d" + little(~std::uint64_t{0}, 8) + "abc"), "ends inside an instruction");
  EXPECT_HOLDS(trouble_with_pickle("u"), "a mark is missing");
  EXPECT_HOLDS(trouble_with_pickle("(u"), "its stack is empty");
  EXPECT_HOLDS(trouble_with_pickle("}("), "another number of values");
  EXPECT_HOLDS(trouble_with_pickle("}" + std::string("h\7")), "recalls what it has not made");
  EXPECT_HOLDS(trouble_with_pickle("](K\1u"), "adds to a list what belongs to a dictionary");
  EXPECT_HOLDS(trouble_with_pickle("}(K\1u"), "a key has no value");
  EXPECT_HOLDS(trouble_with_pickle("}K\1\x85R"), "a dictionary is called");
  EXPECT_HOLDS(trouble_with_pickle("}K\1Q"), "a storage is not described");
  EXPECT_HOLDS(trouble_with_pickle(dictionary({{"a", tensor(kFloats, 0, {}, {})}, {"a", tensor(kFloats, 1, {}, {})}})),
               "two tensors are called \"a\"");
}

TEST(Pickle, BombsCostLittle) {
  // Each tuple holds the one before twice: 2^5000 in all, if anyone counted.
  std::string doubling = ")";
  for (int i = 0; i < 5000; ++i) doubling += "2\x86";
  EXPECT_HOLDS(trouble_with_pickle(doubling), "it holds a tuple");
  EXPECT_EQ(trouble_with_pickle(dictionary({{"a", doubling}})), "accepted");
  // Nested deeply.
  EXPECT_HOLDS(trouble_with_pickle(std::string(1'000'000, ')') + std::string(999'999, '\x86')), "it holds a tuple");
  EXPECT_HOLDS(trouble_with_pickle(std::string(1'000'000, '(') + std::string(1'000'000, 't')), "it holds a tuple");
  // Many values in few bytes.
  EXPECT_HOLDS(trouble_with_pickle(std::string(5'000'000, 'N')), "more than 4000000 values");
  // One list of pairs for many dictionaries.
  std::string pairs = "](";
  for (int i = 0; i < 1000; ++i) pairs += "K\1K\1\x86";
  std::string many = pairs + "e\x85\x94";
  for (int i = 0; i < 5000; ++i) many += global("collections", "OrderedDict") + std::string("h\0R", 3);
  EXPECT_HOLDS(trouble_with_pickle(many), "too many entries");
  // A dictionary that holds itself.
  EXPECT_EQ(trouble_with_pickle("}\x94" + text("me") + std::string("h\0s", 3)), "accepted");
}

TEST(WeightsIndex, ThatLie) {
  const auto with = [](const std::string& text) { return trouble([&] { parse_weights_index(text); }); };
  EXPECT_EQ(with(R"({"metadata":{"total_size":7},"weight_map":{"a":"x.safetensors","b":"x.safetensors"}})"),
            "accepted");
  EXPECT_HOLDS(with("{"), "not valid JSON");
  EXPECT_HOLDS(with("[]"), "has no weight_map");
  EXPECT_HOLDS(with(R"({"weight_map":[]})"), "has no weight_map");
  EXPECT_HOLDS(with(R"({"weight_map":{"a":7}})"), "expected the name of a file");
  EXPECT_HOLDS(with(R"({"weight_map":{"a":"../x"}})"), "expected the name of a file");
  EXPECT_HOLDS(with(R"({"weight_map":{"a":"/etc/passwd"}})"), "expected the name of a file");
  EXPECT_HOLDS(with(R"({"weight_map":{"a":".."}})"), "expected the name of a file");
  EXPECT_HOLDS(with(R"({"weight_map":{"a":"x","a":"y"}})"), "\"a\" twice");
  EXPECT_HOLDS(with(R"({"weight_map":)" + std::string(100, '[') + std::string(100, ']') + "}"), "nested too deeply");
}

TEST(NameRules, AreAppliedInOrder) {
  using Rules = std::vector<std::pair<std::string, std::string>>;
  const auto renamed = [](const Rules& rules, const std::string& name) { return NameRules(rules).apply(name); };
  EXPECT_EQ(renamed({{"^module\\.", ""}}, "module.fc.module.weight"), "fc.module.weight");
  EXPECT_EQ(renamed({{"a", "b"}, {"b", "c"}}, "aba"), "ccc");
  EXPECT_EQ(renamed({{"h\\.(\\d+)\\.(attn|mlp)", "\\2_\\1 \\0"}}, "x.h.12.mlp.w"), "x.mlp_12 h.12.mlp.w");
  EXPECT_EQ(renamed({{"[\\d_]+", "#"}}, "a1_2b"), "a#b");
  EXPECT_EQ(renamed({{"x*", "-"}}, "abxx"), "-a-b--");
  EXPECT_EQ(renamed({{"$", ".weight"}}, "fc"), "fc.weight");
  EXPECT_EQ(renamed({{"(b)?c", "<\\1>"}}, "ac"), "a<>");
  EXPECT_TRUE(NameRules(std::vector<std::string>{"x", "^a"}).matches("ab"));
  EXPECT_FALSE(NameRules(std::vector<std::string>{}).matches("ab"));
  EXPECT_HOLDS(trouble([&] { renamed({{"[", ""}}, "a"); }), "is not a regular expression");
  EXPECT_HOLDS(trouble([&] { renamed({{"a", std::string(100, 'a')}, {"a", std::string(100, 'a')}}, "a"); }),
               "more than 4096 bytes");
}

}  // namespace
}  // namespace maniple::weights_files_test
