// Ranks that have run out of batches, and what the others are told where nobody shadows.
#include <regex>

#include "base/check.h"
#include "train/ddp/reducer.h"
#include <maniple/train/uneven_inputs.h>

namespace maniple {
namespace {

constexpr const char* kDdpSources = "train/ddp/";  // in the place of a call that DistributedDataParallel made

std::string remedy(const std::string& who) {
  return format_text(
      "; {}no more batches? Give all ranks equally many (DistributedSampler does), or train inside with_uneven_inputs", who);
}

/// From "rank 0: all_reduce ... at src/train/ddp/reducer.cpp:3; rank 1: barrier at main.cpp:12": the ranks that were not
/// in a backward.
std::string elsewhere(const std::string& text) {
  static const std::regex call("rank ([0-9]+): [^;]* at ([^;]+)");
  std::string ranks;
  int count = 0;
  for (std::sregex_iterator it(text.begin(), text.end(), call), end; it != end; ++it) {
    if ((*it)[2].str().find(kDdpSources) != std::string::npos) continue;
    ranks += format_text("{}{}", count == 0 ? "" : ", ", (*it)[1].str());
    ++count;
  }
  if (count == 0) return "a rank has ";
  return format_text("{} {} {} ", count == 1 ? "rank" : "ranks", ranks, count == 1 ? "has" : "have");
}

}  // namespace

void Reducer::explained(const std::function<void()>& communicate) const {
  try {
    communicate();
  } catch (const Mismatch& error) {
    throw Mismatch(error.what() + remedy(elsewhere(error.what())));
  } catch (const PeerLost& error) {
    const std::string text = error.what();
    const bool left = text.find("left the group") != std::string::npos;
    // Over a network a rank that leaves and one that ends look alike.
    const bool closed = text.find("connection closed by the peer") != std::string::npos;
    if (!left && !closed) throw;  // it died: its own output says why
    const std::string who = error.rank() < 0 ? "it has " : format_text("rank {} has ", error.rank());
    throw PeerLost(text + remedy((left ? "" : "if it did not fail: ") + who), error.rank());
  } catch (const Timeout& error) {
    throw Timeout(error.what() + remedy("one that did not come has "));
  }
}

void Reducer::start_join(UnevenInputsMode mode) {
  MANIPLE_REQUIRE(!join_, "with_uneven_inputs: this DistributedDataParallel is inside another with_uneven_inputs");
  MANIPLE_REQUIRE(!running_, "with_uneven_inputs: called inside a backward");
  join_ = mode;
  uneven_ = false;
  last_source_ = 0;
}

void Reducer::end_join() noexcept {
  join_.reset();
  shadowing_ = false;
  active_ = group_->size();
  source_ = 0;
}

bool Reducer::meet(bool active) {
  std::vector<std::uint8_t> marks(static_cast<std::size_t>(group_->size()), 0);
  marks[static_cast<std::size_t>(group_->rank())] = active ? 1 : 0;
  group_->all_reduce(buffer_of(marks), ReduceOp::max);
  active_ = 0;
  std::vector<int> out;
  for (int r = group_->size(); r-- > 0;) {
    if (marks[static_cast<std::size_t>(r)] == 0) {
      out.insert(out.begin(), r);
      continue;
    }
    ++active_;
    source_ = r;
  }
  if (active_ == 0) return false;
  last_source_ = source_;
  uneven_ = uneven_ || !out.empty();
  if (!out.empty() && join_->throw_on_early_termination) {
    throw UnevenInputs(format_text("{}{} {} {} no more batches, {} still {}; throw_on_early_termination is set", who(),
                                   out.size() == 1 ? "rank" : "ranks", joined(out),
                                   out.size() == 1 ? "has" : "have", active_, active_ == 1 ? "trains" : "train"));
  }
  return true;
}

void Reducer::shadow() {
  const torch::NoGradGuard no_grad;
  shadowing_ = true;
  try {
    explained([&] {
      reset();
      if (buckets_.empty()) lay_out();
      average_all();
      buffers_.copy_from(source_);
    });
  } catch (...) {
    shadowing_ = false;
    abandon();
    throw;
  }
  saved_.assign(parameters_.size(), torch::Tensor());
  communicated_ = false;
  shadowing_ = false;
}

void Reducer::copy_final_model() {
  if (uneven_) Replicator(group_, state_).copy_from(last_source_);
}

// ---- with_uneven_inputs -----------------------------------------------------------------------------------------------------

namespace {

struct UnevenInputsGuard {
  explicit UnevenInputsGuard(Reducer& of, Reducer::UnevenInputsMode mode) : reducer(&of) { of.start_join(mode); }
  ~UnevenInputsGuard() {
    if (reducer != nullptr) reducer->end_join();
  }
  UnevenInputsGuard(UnevenInputsGuard&& other) noexcept : reducer(std::exchange(other.reducer, nullptr)) {}
  UnevenInputsGuard& operator=(UnevenInputsGuard&&) = delete;
  Reducer* reducer;
};

}  // namespace

void with_uneven_inputs(const std::vector<DdpCore*>& ddps, const UnevenInputsOptions& options, const std::function<void()>& train) {
  MANIPLE_REQUIRE(!ddps.empty(), "with_uneven_inputs: no DistributedDataParallel was given");
  for (const DdpCore* ddp : ddps) MANIPLE_REQUIRE(ddp != nullptr, "with_uneven_inputs: a DistributedDataParallel is null");
  if (!options.enable) return train();
  std::vector<UnevenInputsGuard> guards;
  for (DdpCore* ddp : ddps) {
    guards.emplace_back(*ddp->reducer(),
                        Reducer::UnevenInputsMode{options.divide_by_initial_world_size, options.throw_on_early_termination});
  }
  train();

  // The first module's meeting tells whether there is another step; the others' follow in its course.
  Reducer& first = *guards.front().reducer;
  for (;;) {
    bool more = false;
    first.explained([&] { more = first.meet(false); });
    if (!more) break;
    bool done = false;
    const auto backward = [&] {
      if (std::exchange(done, true)) throw InvalidArgument("with_uneven_inputs: shadow_step called backward more than once");
      first.shadow();
      for (std::size_t i = 1; i < guards.size(); ++i) {
        Reducer& next = *guards[i].reducer;
        next.explained([&] { more = next.meet(false); });
        if (more) next.shadow();
      }
    };
    if (!options.shadow_step) {
      backward();
      continue;
    }
    options.shadow_step(backward);
    if (!done) first.fail("with_uneven_inputs: shadow_step did not call backward, for which the other ranks wait");
  }
  for (const UnevenInputsGuard& guard : guards) guard.reducer->copy_final_model();
}

void with_uneven_inputs(DdpCore& ddp, const UnevenInputsOptions& options, const std::function<void()>& train) {
  with_uneven_inputs(std::vector<DdpCore*>{&ddp}, options, train);
}

void with_uneven_inputs(DdpCore& ddp, const std::function<void()>& train) { with_uneven_inputs(ddp, {}, train); }

}  // namespace maniple
