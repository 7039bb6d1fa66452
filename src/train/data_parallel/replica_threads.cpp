#include "train/data_parallel/replica_threads.h"

#include <algorithm>

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>

#include "base/check.h"
#include "train/data_parallel/thread_settings.h"
#include <maniple/train/data_parallel.h>

namespace maniple {
namespace {

std::string text_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

[[noreturn]] void throw_with_cause(const std::exception_ptr& cause, const ReplicaError& error) {
  try {
    std::rethrow_exception(cause);
  } catch (...) {
    std::throw_with_nested(error);
  }
}

}  // namespace

ReplicaThreads::ReplicaThreads(std::vector<torch::Device> devices, int threads)
    : devices_(std::move(devices)), threads_(threads), workers_(devices_.size()) {}

int ReplicaThreads::intra_op_threads() const {
  if (threads_ > 0) return threads_;
  const auto on_cpu = std::count_if(devices_.begin(), devices_.end(), [](torch::Device one) { return one.is_cpu(); });
  return std::max(1, at::get_num_threads() / static_cast<int>(std::max<std::ptrdiff_t>(1, on_cpu)));
}

void ReplicaThreads::require_outside() const {
  MANIPLE_REQUIRE(!workers_.inside(), "DataParallel: a replica's forward calls the DataParallel that it belongs to");
}

void ReplicaThreads::run(std::size_t count, const char* what, const Workers::Task& task) {
  const CallerSettings settings;
  const int threads = intra_op_threads();
  const BlasThreads blas(threads);
  const auto thrown = workers_.run(count, [&](std::size_t i) {
    use_intra_op_threads(threads);
    const CallerSettings::Scope scope(settings);
    const c10::DeviceGuard device(devices_[i]);
    task(i);
  });
  const auto failed = [](const std::exception_ptr& one) { return one != nullptr; };
  const auto first = std::find_if(thrown.begin(), thrown.end(), failed);
  if (first == thrown.end()) return;
  const auto index = static_cast<std::size_t>(first - thrown.begin());
  const auto more = std::count_if(first + 1, thrown.end(), failed);
  throw_with_cause(*first, ReplicaError(format_text("DataParallel: replica {} of {}, on {}, failed in {}: {}{}", index,
                                                    devices_.size(), devices_[index].str(), what, text_of(*first),
                                                    more > 0 ? format_text(" (and {} more)", more) : ""),
                                        index, devices_[index]));
}

}  // namespace maniple
