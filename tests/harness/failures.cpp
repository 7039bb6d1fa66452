#include "harness/failures.h"

#include <gtest/gtest.h>

#include <exception>
#include <mutex>
#include <typeinfo>

#include <maniple/comm/error.h>

namespace maniple::harness {
namespace {

std::mutex watch_mutex;
const FailureWatch::Sink* watch_sink = nullptr;
int runs_of_this_test = 0;

class Listener : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { runs_of_this_test = 0; }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.passed()) return;
    const std::lock_guard lock(watch_mutex);
    if (watch_sink == nullptr) return;
    (*watch_sink)({result.file_name() == nullptr ? "" : result.file_name(), result.line_number(), result.message()},
                  result.skipped());
  }
};

}  // namespace

FailureWatch::FailureWatch(Sink sink) {
  const std::lock_guard lock(watch_mutex);
  watch_sink = new Sink(std::move(sink));
}

FailureWatch::~FailureWatch() {
  const std::lock_guard lock(watch_mutex);
  delete watch_sink;
  watch_sink = nullptr;
}

std::string describe_current_exception() {
  try {
    throw;
  } catch (const Error& error) {
    return std::string(to_string(error.kind())) + ": " + error.what();
  } catch (const std::exception& error) {
    return std::string(typeid(error).name()) + ": " + error.what();
  } catch (...) {
    return "something that is not a std::exception";
  }
}

void install_listener() { testing::UnitTest::GetInstance()->listeners().Append(new Listener); }

int next_run_index() { return runs_of_this_test++; }

}  // namespace maniple::harness
