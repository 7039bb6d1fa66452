// with_uneven_inputs, and the error texts for uneven inputs without it.
#include "comm/base/check.h"
#include "train/ddp/reducer.h"
#include "train/tensor/public_call.h"
#include <maniple/train/uneven_inputs.h>

namespace maniple {
namespace {

constexpr const char* kBackward = "the backward of DistributedDataParallel";

std::string remedy(const std::string& who) {
  return format_text(
      "; {}no more batches? Give all ranks the same number (DistributedSampler does), or train inside "
      "with_uneven_inputs",
      who);
}

/// A rank that left may have thrown: unwinding its stack destroyed its group, which looks like an orderly departure.
constexpr const char* kUnlessItFailed = "its own output says whether it failed; if it did not: ";

ErrorInfo with_remedy(const Error& error, const std::string& who) {
  ErrorInfo info = error.info();
  info.reason += remedy(who);
  return info;
}

/// "rank 2 has ", "ranks 2, 5 have "; `nobody` if the list is empty. Errors number ranks in the world.
std::string ranks_have(const ErrorInfo& error, const std::vector<int>& ranks, const char* nobody) {
  if (ranks.empty()) return nobody;
  return format_text("{}{} {} {} ", error.group == "world" ? "" : "global ", ranks.size() == 1 ? "rank" : "ranks",
                     joined(ranks), ranks.size() == 1 ? "has" : "have");
}

/// The ranks that were not in a backward when ranks called different operations.
std::vector<int> elsewhere(const ErrorInfo& error) {
  std::vector<int> ranks;
  for (const RankCall& call : error.calls) {
    if (!call.place.empty() && call.place.find(kBackward) == std::string::npos) ranks.push_back(call.rank);
  }
  return ranks;
}

}  // namespace

namespace detail {

void Reducer::explained(const std::function<void()>& communicate) const {
  const PublicCall call(kBackward);
  try {
    communicate();
  } catch (const Mismatch& error) {
    throw Mismatch(with_remedy(error, ranks_have(error.info(), elsewhere(error.info()), "a rank has ")));
  } catch (const PeerLost& error) {
    const LossKind loss = error.info().loss;
    if (loss != LossKind::left && loss != LossKind::left_or_ended) throw;  // it died: its own output gives the reason
    const std::string who = ranks_have(error.info(), error.info().ranks, "it has ");
    throw PeerLost(with_remedy(error, kUnlessItFailed + who));
  } catch (const Timeout& error) {
    throw Timeout(with_remedy(error, ranks_have(error.info(), error.info().ranks, "a rank that did not arrive has ")));
  }
}

}  // namespace detail

namespace {

struct UnevenInputsGuard {
  UnevenInputsGuard(detail::Reducer& of, const ActiveRanks::Mode& mode) : reducer(&of) { of.start_uneven_inputs(mode); }
  ~UnevenInputsGuard() {
    if (reducer != nullptr) reducer->end_uneven_inputs();
  }
  UnevenInputsGuard(UnevenInputsGuard&& other) noexcept : reducer(std::exchange(other.reducer, nullptr)) {}
  UnevenInputsGuard& operator=(UnevenInputsGuard&&) = delete;
  detail::Reducer* reducer;
};

}  // namespace

void with_uneven_inputs(const std::vector<GradientAverager*>& ddps, const UnevenInputsOptions& options,
                        const std::function<void()>& train) {
  MANIPLE_REQUIRE(!ddps.empty(), "with_uneven_inputs: no DistributedDataParallel was given");
  for (const GradientAverager* ddp : ddps)
    MANIPLE_REQUIRE(ddp != nullptr, "with_uneven_inputs: a DistributedDataParallel is null");
  if (!options.enable) return train();
  const PublicCall call("with_uneven_inputs, which all ranks call");
  std::vector<UnevenInputsGuard> guards;
  for (GradientAverager* ddp : ddps) {
    guards.emplace_back(*ddp->reducer(),
                        ActiveRanks::Mode{options.divide_by_initial_world_size, options.throw_on_early_termination});
  }
  train();

  // The first module's exchange decides whether there is another step; the exchanges of the other modules are part of
  // that step.
  detail::Reducer& first = *guards.front().reducer;
  for (;;) {
    bool more = false;
    first.explained([&] { more = first.active_ranks().exchange(false); });
    if (!more) break;
    bool done = false;
    const auto backward = [&] {
      if (std::exchange(done, true))
        throw InvalidArgument("with_uneven_inputs: shadow_step called backward more than once");
      first.shadow();
      for (std::size_t i = 1; i < guards.size(); ++i) {
        detail::Reducer& next = *guards[i].reducer;
        next.explained([&] { more = next.active_ranks().exchange(false); });
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

void with_uneven_inputs(GradientAverager& ddp, const UnevenInputsOptions& options, const std::function<void()>& train) {
  with_uneven_inputs(std::vector<GradientAverager*>{&ddp}, options, train);
}

void with_uneven_inputs(GradientAverager& ddp, const std::function<void()>& train) {
  with_uneven_inputs(ddp, {}, train);
}

}  // namespace maniple
