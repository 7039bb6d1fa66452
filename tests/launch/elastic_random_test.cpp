// Random elastic jobs: workers die, come, leave and meet at random times, on several nodes that come and go; the job is
// resized.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "launch/elastic_stage.h"

namespace maniple::launch {
namespace {

class RandomJob {
 public:
  explicit RandomJob(unsigned seed)
      : random_(seed),
        most_(1 + below(8)),
        least_(1 + below(most_)),
        nodes_(1 + below(3)),
        job_(0, {least_, most_}, nodes_ > 1) {
    for (int node = 1; node <= nodes_; ++node) add_node(node, 1 + below(3));
  }

  void run() {
    for (int event = 0; event < 80 && !over(); ++event) {
      const int worker = below(static_cast<int>(processes_.size()));
      switch (below(9)) {
        case 0:
        case 1: become_ready(worker); break;
        case 2: end(worker, /*well=*/false); break;
        case 3: job_.all_join(); break;
        case 4:
          if (job_.members.generation() > 0) job_.resize(least_ + below(most_ - least_ + 1));
          break;
        case 5:
          if (!job_.asked.empty() && of(job_.asked.front()) == Process::waiting) leave(job_.asked.front());
          if (!job_.asked.empty()) job_.asked.erase(job_.asked.begin());
          break;
        case 6:
          if (below(4) == 0) lose_node(1 + below(nodes_));
          break;
        case 7:
          if (below(4) == 0) add_node(++nodes_, 1);
          break;
        default: job_.wait(0.1 * below(100)); break;
      }
      ASSERT_NO_FATAL_FAILURE(check());
    }
    // Everything that can come comes: the last generation has all that live.
    for (int round = 0; round < 20 && !over(); ++round) {
      job_.wait(31);
      ASSERT_NO_FATAL_FAILURE(check());
      for (int worker = 0; worker < static_cast<int>(processes_.size()); ++worker) become_ready(worker);
      job_.all_join();
      ASSERT_NO_FATAL_FAILURE(check());
    }
    if (over()) return;
    Members live, last = job_.formed.empty() ? Members() : job_.formed.back();
    for (int worker = 0; worker < static_cast<int>(processes_.size()); ++worker) {
      if (of(worker) == Process::waiting) live.push_back(worker);
    }
    std::sort(last.begin(), last.end());
    if (static_cast<int>(live.size()) >= least_) {
      ASSERT_EQ(last, live);
    }
  }

 private:
  enum class Process { starting, waiting, gone };

  int below(int most) { return static_cast<int>(random_() % static_cast<unsigned>(most)); }
  bool over() const { return job_.ended || job_.finished; }
  Process& of(int worker) {
    if (processes_.size() <= static_cast<std::size_t>(worker))
      processes_.resize(static_cast<std::size_t>(worker) + 1, Process::gone);
    return processes_[static_cast<std::size_t>(worker)];
  }
  void add_node(int node, int workers) {
    workers = std::min(workers, most_ - job_.members.active());
    if (workers < 1) return;
    const int first = job_.members.add_node(node, workers, job_.now);
    for (int worker = first; worker < first + workers; ++worker) {
      ASSERT_EQ(of(worker), Process::gone);
      of(worker) = Process::starting;
      forget(worker);
    }
    job_.count = static_cast<int>(processes_.size());
  }
  void lose_node(int node) {
    for (int worker = 0; worker < static_cast<int>(processes_.size()); ++worker) {
      if (job_.members.node_of(worker) == node) of(worker) = Process::gone;
    }
    job_.take(job_.members.on_node_gone(node, false, job_.now));
  }
  void become_ready(int worker) {
    if (of(worker) != Process::starting) return;
    of(worker) = Process::waiting;
    job_.ready(worker);
  }
  void end(int worker, bool well) {
    if (of(worker) == Process::gone) return;
    of(worker) = Process::gone;
    if (well) {
      job_.ends(worker);
    } else {
      job_.dies(worker);
    }
  }
  void leave(int worker) {
    job_.take(job_.members.on_leaving(worker, job_.now));
    end(worker, /*well=*/true);
  }
  void forget(int worker) { before_.erase(std::remove(before_.begin(), before_.end(), worker), before_.end()); }

  void check() {
    for (; seen_killed_ < job_.killed.size(); ++seen_killed_) end(job_.killed[seen_killed_], /*well=*/false);
    for (; seen_ < job_.formed.size(); ++seen_) {
      const Members& now = job_.formed[seen_];
      ASSERT_TRUE(job_.ended || static_cast<int>(now.size()) >= least_);
      ASSERT_LE(static_cast<int>(now.size()), most_ + static_cast<int>(job_.asked.size()));
      for (const int worker : now) ASSERT_EQ(of(worker), Process::waiting) << "a member that cannot answer";
      Members survivors;
      for (const int worker : before_) {
        if (std::find(now.begin(), now.end(), worker) != now.end()) survivors.push_back(worker);
      }
      ASSERT_TRUE(std::equal(survivors.begin(), survivors.end(), now.begin())) << "survivors keep their order";
      before_ = now;
    }
    for (; seen_replaced_ < job_.replaced.size(); ++seen_replaced_) {
      const int worker = job_.replaced[seen_replaced_].worker;
      ASSERT_EQ(of(worker), Process::gone);
      of(worker) = Process::starting;
      forget(worker);
    }
    ASSERT_LE(job_.members.active(), most_);
  }

  std::mt19937 random_;
  int most_, least_, nodes_;
  ElasticStage job_;
  std::vector<Process> processes_;
  std::size_t seen_ = 0, seen_replaced_ = 0, seen_killed_ = 0;
  Members before_;
};

TEST(ElasticMembers, RandomJobs) {
  for (unsigned seed = 0; seed < 20'000; ++seed) {
    ASSERT_NO_FATAL_FAILURE(RandomJob(seed).run()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace maniple::launch
