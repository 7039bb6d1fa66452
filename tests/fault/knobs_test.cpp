// A knob with an invalid value: its rank reports it at once, before the rendezvous; the others report
// who is missing.
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "comm/backend/backend.h"
#include "comm/base/environment.h"
#include "comm/base/unique_fd.h"
#include "comm/net/address.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include "harness/sanitizers.h"
#include "harness/start_process.h"
#include "harness/temporary_directory.h"
#include <maniple/comm/store.h>

namespace maniple::harness {
namespace {

class Set {
 public:
  Set(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  ~Set() { ::unsetenv(name_); }
  Set(const Set&) = delete;
  Set& operator=(const Set&) = delete;

 private:
  const char* name_;
};

// A port of loopback on which everybody who calls is noticed.
class Doorbell {
 public:
  int port() const { return Address::of_socket(fd_.get()).port(); }
  bool rang() const {
    const UniqueFd caller(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    return static_cast<bool>(caller) || errno != EAGAIN;
  }

 private:
  UniqueFd fd_ = listen_on(Address::parse("127.0.0.1:0"));
};

InitOptions as_rank(int rank, const std::string& method) {
  InitOptions options;
  options.init_method = method;
  options.rank = rank;
  options.world_size = 2;
  options.timeout = Seconds(20) * kSlowdown;
  return options;
}

// Whatever the kind of rendezvous, a rank is refused before anyone else can notice that it is there.
void expect_refused(std::initializer_list<std::string> parts) {
  const Doorbell door;
  const TemporaryDirectory folder;
  const std::string file = folder.path() + "/rendezvous";
  const auto store = make_memory_store();
  const Set address("MASTER_ADDR", "127.0.0.1");
  const Set port("MASTER_PORT", std::to_string(door.port()));
  const Caught refusals[] = {
      catch_error([&] { maniple::init(as_rank(1, "env://")); }),
      catch_error([&] { maniple::init(as_rank(0, "env://")); }),  // the port is taken, but that comes later
      catch_error([&] { maniple::init(as_rank(1, fmt::format("tcp://127.0.0.1:{}", door.port()))); }),
      catch_error([&] { maniple::init(as_rank(0, "file://" + file)); }),
      catch_error([&] { maniple::init(store, as_rank(0, "env://")); }),
  };
  for (const Caught& caught : refusals) {
    EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
    for (const std::string& part : parts) EXPECT_TRUE(contains(caught.text, part)) << part << " is missing: " << caught;
    EXPECT_FALSE(contains(caught.text, "\n")) << caught;
  }
  EXPECT_FALSE(door.rang());
  EXPECT_NE(::access(file.c_str(), F_OK), 0) << "the file of the rendezvous was made";
  EXPECT_EQ(store->num_keys(), 0);
}

TEST(KnobFault, EveryKindIsRefusedBeforeAnyoneMeets) {
  const std::pair<const char*, const char*> kWrong[] = {
      {"MANIPLE_LOG", "loud"},        {"MANIPLE_TRANSPORT", "udp"},         {"MANIPLE_ALLOW_NO_SECRET", "yes"},
      {"MANIPLE_HEARTBEAT", "nan"},   {"MANIPLE_TCP_STREAMS", "17"},        {"MANIPLE_TCP_BUFFER_KIB", "1M"},
      {"MANIPLE_STAGE_KIB", "8"},     {"MANIPLE_SPIN_US", "-0.5"},          {"MANIPLE_CHECKS", " 1"},
      {"MANIPLE_RECORDER", "-1"},     {"MANIPLE_UNEXPECTED_MIB", "0"},      {"MANIPLE_MKLDNN", "perhaps"},
      {"MANIPLE_MPI", "intel"},       {"MANIPLE_MPI_PIECE", "1e6"},         {"MANIPLE_ALGORITHM", "magic"},
      {"MANIPLE_INTERFACE", "nope9"}, {"MANIPLE_TCP_CONGESTION", "pigeon"}, {"MANIPLE_TCP_BUFFER_KIB", "63"},
  };
  for (const auto& [name, value] : kWrong) {
    const Set set(name, value);
    expect_refused({fmt::format("{} is \"{}\"", name, value)});
  }
}

TEST(KnobFault, AllWrongOnesAreNamed) {
  const Set streams("MANIPLE_TCP_STREAMS", "17"), stage("MANIPLE_STAGE_KIB", "15"), mpi("MANIPLE_MPI", "intel"),
      interface_name("MANIPLE_INTERFACE", "nope9");
  expect_refused({"MANIPLE_TCP_STREAMS is \"17\"; expected a whole number from 1 to 16. ",
                  "MANIPLE_STAGE_KIB is \"15\"; expected 0 or a whole number from 16 to 1048576. ",
                  "MANIPLE_MPI is \"intel\"; expected one of auto, openmpi, mpich. ",
                  "MANIPLE_INTERFACE is \"nope9\": there is no network interface \"nope9\""});
}

// Options of the program do not hide an invalid variable.
TEST(KnobFault, OptionsOfTheProgramDoNotHideIt) {
  const Set transport("MANIPLE_TRANSPORT", "udp"), algorithm("MANIPLE_ALGORITHM", "magic");
  InitOptions options;
  options.rank = 0;
  options.world_size = 1;
  options.transport = TransportKind::loopback;
  options.algorithm = "ring";
  const Caught caught = catch_error([&] { maniple::init(make_memory_store(), options); });
  EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
  EXPECT_TRUE(contains(caught.text, "MANIPLE_TRANSPORT")) << caught;
  EXPECT_TRUE(contains(caught.text, "MANIPLE_ALGORITHM")) << caught;
}

TEST(KnobFault, EmptyOnesAndGoodOnesAreAccepted) {
  const Set empty("MANIPLE_TCP_STREAMS", ""), streams("MANIPLE_STAGE_KIB", "16"), heartbeat("MANIPLE_HEARTBEAT", "1e1"),
      congestion("MANIPLE_TCP_CONGESTION", "reno"), interface_name("MANIPLE_INTERFACE", "lo"),
      algorithm("MANIPLE_ALGORITHM", "ring");
  InitOptions options;
  options.rank = 0;
  options.world_size = 1;
  EXPECT_EQ(maniple::init(make_memory_store(), options)->size(), 1);
}

TEST(KnobFault, TheReasonForALimitIsGiven) {
  const Set buffer("MANIPLE_TCP_BUFFER_KIB", "16");
  expect_refused({"expected 0 or a whole number from 64 to 1048576: a buffer smaller than a packet stalls TCP"});
}

// With 4 or 8 KiB, TCP waits for a timer of 0.2 s after each window, because the window is smaller than a packet.
TEST(KnobFault, TheSmallestBufferCarriesLargeTransfers) {
  run_ranks({.n = 2,
             .as = As::processes,
             .transport = TransportKind::tcp,
             .env = {{"MANIPLE_TCP_BUFFER_KIB", "64"}, {"MANIPLE_TCP_STREAMS", "1"}}},
            [](Rank& r) {
              std::vector<std::int32_t> values(16 << 20, r.rank + 1);
              r.world->all_reduce(buffer_of(values));
              EXPECT_EQ(values.front(), 3);
              EXPECT_EQ(values.back(), 3);
            });
}

// Rank 1 of three has a wrong knob; the others learn that rank 1 did not come.
void join_with_a_wrong_rank_1(Rank& r) {
  if (r.rank == 1) {
    ASSERT_EQ(::setenv("MANIPLE_TCP_STREAMS", "99", 1), 0);
  }
  InitOptions options = r.init_options();
  // Rank 0 may serve the store, so it must not be the first to leave.
  options.init_timeout = Seconds(r.rank == 0 ? 3.0 : 1.5) * kSlowdown;
  r.phase("all have started");
  const Caught caught = catch_error([&] { r.init(options); });
  if (r.rank == 1) {
    EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
    EXPECT_TRUE(contains(caught.text, "MANIPLE_TCP_STREAMS is \"99\"; expected a whole number from 1 to 16")) << caught;
  } else {
    EXPECT_TRUE(caught.is(ErrorKind::timeout)) << caught;
    EXPECT_TRUE(contains(caught.text, "2 of 3 ranks joined, waiting for rank 1")) << caught;
  }
}

TEST(KnobFault, OtherRanksNameTheMissingByFile) {
  run_ranks({.n = 3, .as = As::processes, .init = false}, join_with_a_wrong_rank_1);
}

TEST(KnobFault, OtherRanksNameTheMissingByTcp) {
  run_ranks({.n = 3, .as = As::processes, .init = false, .rendezvous_by_tcp = true}, join_with_a_wrong_rank_1);
}

// A permitted value that means something else than the default.
std::string another_value(const KnobInfo& knob) {
  switch (knob.permitted.kind) {
    case Permitted::Kind::flag: return knob.default_text == std::string("0") ? "1" : "0";
    case Permitted::Kind::whole: return fmt::format("{:.0f}", knob.permitted.low);
    case Permitted::Kind::number: return "60";
    case Permitted::Kind::word: return std::string(knob.permitted.words[1]);
    case Permitted::Kind::text: break;
  }
  return "ring";
}

// Each knob that must be alike, on rank 1 alone: no rank joins, and all say the same. Then, without, they join.
void join_with_another_rank_1(Rank& r) {
  for (const KnobInfo& knob : knobs()) {
    if (knob.scope != Scope::world) continue;
    const std::string value = another_value(knob);
    if (r.rank == 1) ::setenv(knob.name, value.c_str(), 1);
    const Caught caught = catch_error([&] { r.init(r.init_options()); });
    ::unsetenv(knob.name);
    EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << knob.name << ": " << caught;
    EXPECT_TRUE(contains(caught.text, fmt::format("init: {}", knob.name))) << caught;
    EXPECT_TRUE(contains(caught.text, fmt::format("but {} on rank 1 (pid {} on ", value, r.pid_of(1)))) << caught;
    EXPECT_TRUE(contains(caught.text, " on ranks 0, 2 (")) << caught;
    EXPECT_TRUE(contains(caught.text, "; it must be alike on all ranks")) << caught;
  }
  // The same value, spelled differently, matches.
  if (r.rank == 1) ::setenv("MANIPLE_HEARTBEAT", "2.50", 1);
  r.init(r.init_options());
  int value = 1;
  r.world->all_reduce(buffer_of(value));
  EXPECT_EQ(value, 3);
}

TEST(KnobFault, SettingsOfTheWorldMustBeAlikeByFile) {
  run_ranks({.n = 3, .as = As::processes, .init = false}, join_with_another_rank_1);
}

TEST(KnobFault, SettingsOfTheWorldMustBeAlikeByTcp) {
  // (With a secret, which encryption needs.)
  run_ranks({.n = 3, .as = As::processes, .init = false, .rendezvous_by_tcp = true}, join_with_another_rank_1);
}

// What the program passes counts as the variable does.
TEST(KnobFault, OptionsOfTheWorldMustBeAlike) {
  run_ranks({.n = 2, .as = As::processes, .init = false}, [](Rank& r) {
    const auto refusal = [&](auto&& change) {
      InitOptions options = r.init_options();
      if (r.rank == 1) change(options);
      const Caught caught = catch_error([&] { r.init(options); });
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
      return caught.text;
    };
    const std::string transport = refusal([](InitOptions& options) { options.transport = TransportKind::tcp; });
    EXPECT_TRUE(contains(transport, "MANIPLE_TRANSPORT (or InitOptions::transport) is auto on rank 0 (pid"))
        << transport;
    EXPECT_TRUE(contains(transport, "but tcp on rank 1 (pid")) << transport;
    const std::string algorithm = refusal([](InitOptions& options) { options.algorithm = "ring"; });
    EXPECT_TRUE(contains(algorithm, "is not set on rank 0")) << algorithm;
    // One by its options, the other by its environment.
    InitOptions options = r.init_options();
    if (r.rank == 0) options.transport = TransportKind::tcp;
    if (r.rank == 1) ::setenv("MANIPLE_TRANSPORT", "tcp", 1);
    r.init(options);
    r.world->barrier();
  });
}

TEST(KnobFault, EncryptionNeedsTheNativeBackend) {
  const Set encrypt("MANIPLE_ENCRYPT", "1");
  for (const BackendEntry& entry : backends()) {
    if (!entry.missing().empty()) continue;
    if (entry.name == "native") {
      find_backend(entry.name);
      continue;
    }
    const Caught caught = catch_error([&] { find_backend(entry.name); });
    EXPECT_TRUE(caught.is(ErrorKind::unsupported)) << caught;
    EXPECT_TRUE(contains(caught.text, "sends data by itself, as it is")) << caught;
  }
}

TEST(KnobFault, EncryptionNeedsASecret) {
  const Set encrypt("MANIPLE_ENCRYPT", "1");
  InitOptions options;
  options.rank = 0;
  options.world_size = 1;
  options.init_method = "tcp://127.0.0.1:" + std::to_string(free_loopback_port());
  const Caught caught = catch_error([&] { maniple::init(options); });
  EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
  EXPECT_TRUE(contains(caught.text, "but the job has no secret")) << caught;
}

// Rank 0, which would serve the store, has it; the others name the address that does not reply.
TEST(KnobFault, WithoutRankZeroTheAddressIsNamed) {
  run_ranks({.n = 3, .as = As::processes, .init = false, .rendezvous_by_tcp = true}, [](Rank& r) {
    if (r.rank == 0) {
      ASSERT_EQ(::setenv("MANIPLE_HEARTBEAT", "2,5", 1), 0);
    }
    InitOptions options = r.init_options();
    options.init_timeout = Seconds(1.5) * kSlowdown;
    const Caught caught = catch_error([&] { r.init(options); });
    if (r.rank == 0) {
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
      EXPECT_TRUE(contains(caught.text, "MANIPLE_HEARTBEAT is \"2,5\"; expected a number from 0 to 1000000")) << caught;
    } else {
      EXPECT_TRUE(caught.is(ErrorKind::timeout)) << caught;
      EXPECT_TRUE(contains(caught.text, "connect to 127.0.0.1:")) << caught;
    }
  });
}

}  // namespace
}  // namespace maniple::harness
