// A rank for the tests of the launcher: launch_worker WORD [ARGUMENT]
//   join           joins, passes a barrier, adds up the ranks
//   leave R        rank R ends with exit code 0 before it joins; the others join
//   die R          joins; rank R kills itself, the others wait for it
//   quit R         joins; rank R ends with exit code 0 without leaving its group, the others wait for it
//   part R         the same, but rank R leaves its group first
//   cascade R      the same as quit, and the others abort a second group without rank R
//   report R FILE  rank R kills itself; when it is gone the others report that they lost it, print that and end with
//                  exit code 1. Without a file it was not a rank of this job
//   recover R      all report that they lost rank R, print that and go on: exit code 0
//   mismatch R     joins; rank R calls something else than the others, and all print that and end with exit code 1
//   mismatch R out the same, but they print it on standard output, and a line before and after it
//   crash R        joins; rank R writes to address 8
//   until FILE     joins and adds up until rank 0 sees the file
//   flood BYTES    writes numbered lines
//   print FILE     prints lines without flushing; when the file is there, one more, and aborts
//   eat            takes memory until somebody objects
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

#include "comm/base/error_codec.h"
#include <maniple/comm.h>

namespace {

/// One rank leaves its number in the file and dies. The others return when the launcher has noticed, and outlive what
/// it does about it.
void die_before_the_others_report(bool dies, const std::string& file) {
  if (dies) {
    std::ofstream(file + ".new") << ::getpid();
    std::rename((file + ".new").c_str(), file.c_str());
    ::kill(::getpid(), SIGKILL);
  }
  ::signal(SIGTERM, SIG_IGN);
  while (::access(file.c_str(), F_OK) != 0) ::usleep(1000);  // sleep: between two polls for the file
  pid_t pid = 0;
  std::ifstream(file) >> pid;
  while (::kill(pid, 0) == 0) ::usleep(1000);  // sleep: between two polls for the process
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string word = argc > 1 ? argv[1] : "join";
  const long argument = argc > 2 ? std::atol(argv[2]) : 0;
  if (word == "flood") {
    const char* rank = std::getenv("RANK");
    long written = 0;
    for (long i = 0; written < argument; ++i)
      written += std::printf("%s:%ld:%s\n", rank, i, "0123456789abcdefghijklmnopqrstuvwxyz");
    return 0;
  }
  if (word == "print") {
    std::printf("terminal %d colour %s term %s\nfirst\n", ::isatty(STDOUT_FILENO), std::getenv("NO_COLOR"),
                std::getenv("TERM"));
    while (::access(argv[2], F_OK) != 0) ::usleep(10'000);  // sleep: between two polls for the file
    std::printf("last\nof them");
    std::abort();
  }
  if (word == "eat") {
    std::vector<char*> pieces;
    constexpr std::size_t kPiece = 4u << 20;
    for (int i = 0; i < 4096; ++i) {
      pieces.push_back(static_cast<char*>(std::malloc(kPiece)));
      std::memset(pieces.back(), 1, kPiece);
    }
    return 0;
  }
  if (word == "report" || word == "recover") {
    const int rank = std::atoi(std::getenv("RANK"));
    if (argc > 3) die_before_the_others_report(rank == argument, argv[3]);
    const maniple::PeerLost lost({.operation = "barrier",
                                  .sequence = 1,
                                  .group = "world",
                                  .rank = rank,
                                  .size = std::atoi(std::getenv("WORLD_SIZE")),
                                  .ranks = {static_cast<int>(argument)},
                                  .reason = "rank " + std::to_string(argument) + " is lost: its process ended"});
    maniple::report_failure(lost.info());
    if (word == "report") throw lost;
    std::fprintf(stderr, "%s\nrank %d goes on\n", lost.what(), rank);
    return 0;
  }
  maniple::InitOptions options;
  if (word == "leave" && std::atol(std::getenv("RANK")) == argument) return 0;
  if (const char* size = std::getenv("JOIN_WORLD_SIZE")) {
    options.world_size = std::atoi(size);
    options.rank = std::atoi(std::getenv("RANK"));
    options.init_method = std::string("tcp://127.0.0.1:") + std::getenv("MASTER_PORT");
  }
  if (const char* limit = std::getenv("JOIN_TIMEOUT")) options.init_timeout = std::chrono::seconds(std::atol(limit));
  if (const char* limit = std::getenv("CALL_TIMEOUT")) options.timeout = std::chrono::seconds(std::atol(limit));
  auto world = maniple::init(options);
  float sum = static_cast<float>(world->rank());
  world->all_reduce(maniple::buffer_of(sum));
  if (word == "die") {
    if (world->rank() == argument) ::kill(::getpid(), SIGKILL);
    world->barrier();
  }
  if (word == "quit" || word == "part") {
    if (world->rank() == argument && word == "quit") ::_exit(0);
    if (world->rank() == argument) return 0;
    world->barrier();
  }
  if (word == "cascade") {
    const auto others = world->split(world->rank() == argument ? 1 : 0);
    if (world->rank() == argument) ::_exit(0);
    try {
      world->barrier();
    } catch (const maniple::PeerLost&) {
      others->abort("the world has lost a rank");
      throw;
    }
  }
  if (word == "mismatch") {
    if (argc > 3) ::signal(SIGTERM, SIG_IGN);  // so that each prints all of its lines
    double number = 1;
    world->rank() == argument ? world->all_reduce(maniple::buffer_of(number))
                              : world->all_reduce(maniple::buffer_of(sum));
  }
  if (word == "crash") {
    volatile std::uintptr_t nowhere = 8;
    if (world->rank() == argument) *reinterpret_cast<volatile int*>(nowhere) = 1;
    world->barrier();
  }
  if (word == "until") {
    std::printf("joined\n");
    std::fflush(stdout);
    for (float end = 0; end == 0;) {
      end = world->rank() == 0 && ::access(argv[2], F_OK) == 0 ? 1.0F : 0.0F;
      world->all_reduce(maniple::buffer_of(end));
    }
  }
  world->barrier();
  std::printf("sum %g of %d restart %s\n", static_cast<double>(sum), world->size(),
              std::getenv("MANIPLE_RESTART_COUNT"));
  return 0;
} catch (const std::exception& error) {
  if (argc > 3 && std::strcmp(argv[3], "out") == 0) {
    std::printf("caught\n%s\nsaved\n", error.what());
  } else {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
