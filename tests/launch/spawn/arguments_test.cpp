// Every kind of argument there and back; hostile and truncated bytes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include <maniple/launch/arguments.h>

namespace shop {

enum class Colour : std::uint8_t { red = 1, green = 200 };
struct Item {
  int price = 0;
  std::string name;
  Colour colour = Colour::red;
  friend bool operator==(const Item&, const Item&) = default;
};
void encode(maniple::ArgumentWriter& out, const Item& item) {
  out.put(item.price);
  out.put(item.name);
  out.put(item.colour);
}
void decode(maniple::ArgumentReader& in, Item& item) {
  in.get(item.price);
  in.get(item.name);
  in.get(item.colour);
}

struct Nothing {
  friend bool operator==(const Nothing&, const Nothing&) = default;
};
void encode(maniple::ArgumentWriter&, const Nothing&) {}
void decode(maniple::ArgumentReader&, Nothing&) {}

}  // namespace shop

namespace maniple {
namespace {

template <class T>
T there_and_back(const T& value) {
  ArgumentWriter out;
  out.put(value);
  ArgumentReader in(out.bytes());
  T result = in.get<T>();
  in.expect_end();
  return result;
}

template <class T>
void expect_kept(const T& value) {
  EXPECT_EQ(there_and_back(value), value);
  ArgumentWriter out;
  out.put(value);
  const std::string whole = out.bytes();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    ArgumentReader in(std::string_view(whole).substr(0, length));
    EXPECT_THROW(in.get<T>(), ProtocolError) << "cut after " << length << " of " << whole.size() << " bytes";
  }
}

TEST(SpawnArguments, Numbers) {
  expect_kept(true);
  expect_kept(false);
  expect_kept('x');
  expect_kept(std::int8_t{-128});
  expect_kept(std::numeric_limits<std::int64_t>::min());
  expect_kept(std::numeric_limits<std::uint64_t>::max());
  expect_kept(1.5f);
  expect_kept(-0.1);
  expect_kept(3.25L);
  EXPECT_TRUE(std::isnan(there_and_back(std::nan(""))));
  expect_kept(shop::Colour::green);
  expect_kept(std::chrono::milliseconds(1234));
  expect_kept(std::chrono::duration<double>(0.5));
}

TEST(SpawnArguments, Text) {
  expect_kept(std::string());
  expect_kept(std::string("with \0 inside", 13));
  expect_kept(std::string(100'000, 'x').substr(0, 300));
  expect_kept(std::string("Größe \xff"));
}

TEST(SpawnArguments, Containers) {
  expect_kept(std::vector<int>{});
  expect_kept(std::vector<double>{1, 2, 3});
  expect_kept(std::vector<bool>{true, false, true});
  expect_kept(std::vector<std::string>{"", "a", "bc"});
  expect_kept(std::vector<std::vector<int>>{{}, {1}, {2, 3}});
  expect_kept(std::array<int, 3>{1, 2, 3});
  expect_kept(std::array<int, 0>{});
  expect_kept(std::array<std::string, 2>{"a", "b"});
  expect_kept(std::pair<int, std::string>{1, "one"});
  expect_kept(std::tuple<>());
  expect_kept(std::tuple<int, std::string, double>{1, "one", 1.0});
  expect_kept(std::vector<std::tuple<>>(3));
  expect_kept(std::map<std::string, std::vector<int>>{{"a", {1}}, {"b", {}}});
  expect_kept(std::unordered_map<int, std::string>{{1, "a"}, {2, "b"}});
  expect_kept(std::set<int>{3, 1, 2});
  expect_kept(std::multiset<int>{1, 1, 2});
  expect_kept(std::optional<std::string>());
  expect_kept(std::optional<std::string>("x"));
  expect_kept(std::optional<std::optional<int>>(std::optional<int>()));
}

TEST(SpawnArguments, TypesWithTheirOwnFunctions) {
  expect_kept(shop::Item{.price = 5, .name = "lamp", .colour = shop::Colour::green});
  expect_kept(std::vector<shop::Item>{{1, "a"}, {2, "b"}});
  expect_kept(std::map<std::string, shop::Item>{{"x", {7, "seven"}}});
  expect_kept(std::optional<shop::Item>(shop::Item{9, "nine"}));
  expect_kept(std::vector<shop::Nothing>(4));
}

TEST(SpawnArguments, ImpossibleLengthsAreRefusedBeforeMemoryIsTaken) {
  for (const std::uint64_t count :
       {std::uint64_t{9}, std::uint64_t{1} << 32, std::uint64_t{1} << 61, ~std::uint64_t{0}}) {
    ArgumentWriter out;
    out.put(count);
    out.put_bytes("12345678", 8);
    EXPECT_THROW(ArgumentReader(out.bytes()).get<std::string>(), ProtocolError) << count;
    EXPECT_THROW(ArgumentReader(out.bytes()).get<std::vector<double>>(), ProtocolError) << count;
    EXPECT_THROW(ArgumentReader(out.bytes()).get<std::vector<std::string>>(), ProtocolError) << count;
    EXPECT_THROW(ArgumentReader(out.bytes()).get<std::vector<std::tuple<>>>(), ProtocolError) << count;
    EXPECT_THROW(ArgumentReader(out.bytes()).get<std::vector<shop::Nothing>>(), ProtocolError) << count;
    EXPECT_THROW((ArgumentReader(out.bytes()).get<std::map<int, int>>()), ProtocolError) << count;
  }
}

TEST(SpawnArguments, ABoolIsTrueOrFalse) {
  EXPECT_THROW(ArgumentReader("\x02").get<bool>(), ProtocolError);
  EXPECT_THROW(ArgumentReader("\xff").get<std::optional<int>>(), ProtocolError);
}

TEST(SpawnArguments, BytesLeftOverAreNoticed) {
  ArgumentReader in("abc");
  EXPECT_EQ(in.get<char>(), 'a');
  EXPECT_EQ(in.left(), 2u);
  EXPECT_THROW(in.expect_end(), ProtocolError);
}

// Random bytes either make a value or a ProtocolError, nothing else.
TEST(SpawnArguments, RandomBytesDoNoHarm) {
  std::mt19937 random(1);
  int refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes(random() % 64, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random() % 3 == 0 ? random() : random() % 4);
    try {
      ArgumentReader in(bytes);
      in.get<std::tuple<std::vector<std::string>, std::map<int, std::optional<shop::Item>>, std::vector<bool>>>();
    } catch (const ProtocolError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace maniple
