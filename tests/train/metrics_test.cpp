// Metrics over batches and ranks: weights, kinds, names that differ, NaN, tensors.
#include <gtest/gtest.h>

#include <cmath>

#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include <maniple/dist.h>
#include <maniple/train/metrics.h>

namespace maniple::harness::metrics_test {
namespace {

std::vector<std::string> names_of(const MetricRow& row) {
  std::vector<std::string> names;
  for (const Metric& metric : row) names.push_back(metric.name);
  return names;
}

TEST(Metrics, OneProcess) {
  Metrics metrics;
  EXPECT_TRUE(metrics.empty());
  EXPECT_TRUE(metrics.all_reduce().empty());
  metrics.add("loss", 1.0, 30);
  metrics.add("loss", torch::tensor(4.0F), 10);
  metrics.add("empty batch", std::nan(""), 0);
  metrics.add_sum("samples", 30);
  metrics.add_sum("samples", torch::tensor(10));
  metrics.add_min("least", 3);
  metrics.add_min("least", torch::tensor({-2.5}, torch::kBFloat16));
  metrics.add_max("most", torch::tensor(3));
  metrics.add_max("most", torch::tensor(7));
  metrics.add_max("most", 5);
  EXPECT_DOUBLE_EQ(metrics.local()["loss"], 1.75);
  const auto row = metrics.all_reduce();
  EXPECT_EQ(names_of(row), (std::vector<std::string>{"loss", "samples", "least", "most"}))
      << "nothing of an empty batch";
  EXPECT_DOUBLE_EQ(row["loss"], 1.75);
  EXPECT_EQ(row.at("loss").count, 40);
  EXPECT_EQ(row["samples"], 40);
  EXPECT_EQ(row["least"], -2.5);
  EXPECT_EQ(row["most"], 7);
  EXPECT_EQ(row.at("most").kind, MetricKind::max);
  EXPECT_EQ(row.text(), "loss 1.75  samples 40  least -2.5  most 7");
  EXPECT_EQ(MetricRow({{"x", MetricKind::mean, 0.123456, 1}}).text(3), "x 0.123");
  EXPECT_TRUE(metrics.empty()) << "a row begins anew";
  EXPECT_EQ(error_of([&] { row["accuracy"]; }),
            "no metric \"accuracy\" was added on any rank; there are: loss, samples, least, most");
}

// Metrics of steps that are added to others one after the other, also in another process.
TEST(Metrics, MergedAndRestoredTheyHaveTheSameBits) {
  Metrics all, restored;
  for (int step = 0; step < 5; ++step) {
    Metrics one;
    one.add("loss", torch::tensor(0.1F * static_cast<float>(step)), 3);
    one.add("a name with spaces", 1.0 / (step + 1));
    one.add_max("most", step);
    one.add_sum("nothing", std::nan(""));
    Metrics received;
    received.load_state_dict(one.state_dict());
    all.merge(one);
    restored.merge(received);
  }
  EXPECT_EQ(all.state_dict(), restored.state_dict());
  std::vector<Metrics> parts = {all, restored};
  const MetricRow row = Metrics::row_of(parts);
  EXPECT_EQ(row["loss"], all.local()["loss"]);
  EXPECT_EQ(row.at("loss").count, 30);
  EXPECT_EQ(row["most"], 4);
  EXPECT_TRUE(std::isnan(row["nothing"]));
  EXPECT_TRUE(parts[0].empty() && parts[1].empty());
  EXPECT_THROW(all.load_state_dict("7 0 1 loss"), ProtocolError);
  EXPECT_EQ(all.state_dict(), restored.state_dict());
}

TEST(Metrics, MistakesAreNamed) {
  Metrics metrics;
  metrics.add("loss", 1.0);
  EXPECT_EQ(error_of([&] { metrics.add_max("loss", 1.0); }),
            "Metrics: \"loss\" is a mean, and cannot be a maximum as well");
  EXPECT_EQ(error_of([&] { metrics.add("loss", 1.0, -1); }),
            "Metrics: \"loss\" with a count of -1; expected a number of samples");
  EXPECT_NE(error_of([&] { metrics.add("loss", torch::ones({2})); }).find("a tensor of 2 Float elements"),
            std::string::npos);
  EXPECT_NE(error_of([&] { metrics.add("loss", torch::Tensor()); }).find("undefined"), std::string::npos);
  EXPECT_NE(error_of([&] { metrics.add("", 1.0); }).find("without a name"), std::string::npos);
  EXPECT_EQ(metrics.all_reduce().at("loss").count, 1) << "mistakes change nothing";
}

TEST(Metrics, TensorsAreTakenAsTheyAreNow) {
  Metrics metrics;
  auto value = torch::tensor(2.0, torch::requires_grad());
  metrics.add("x", value * 1);
  const torch::Tensor plain = torch::tensor(1.0, torch::kFloat64);
  metrics.add("y", plain);
  metrics.add_max("z", plain);
  plain.fill_(100);
  metrics.add("y", plain, 0);
  const auto row = metrics.all_reduce();
  EXPECT_EQ(row["x"], 2);
  EXPECT_EQ(row["y"], 1) << "a change afterwards is not seen";
  EXPECT_EQ(row["z"], 1);
}

// Whatever a tensor is on, adding must not read it: a tensor on the meta device cannot be read at all.
TEST(Metrics, AddingReadsNothingFromADevice) {
  Metrics metrics;
  const auto far_away = torch::empty({}, torch::TensorOptions().device(torch::kMeta));
  for (int i = 0; i < 3; ++i) {
    metrics.add("loss", far_away, 2);
    metrics.add_sum("sum", far_away);
    metrics.add_max("max", far_away);
    metrics.add_accuracy("accuracy", torch::empty({4, 3}, far_away.options()),
                         torch::empty({4}, far_away.options().dtype(torch::kInt64)));
  }
  EXPECT_FALSE(metrics.empty());
}

TEST(Metrics, NaNIsSeen) {
  Metrics metrics;
  const double nan = std::nan("");
  for (const double value : {1.0, nan, 2.0}) {
    metrics.add("mean", value);
    metrics.add_sum("sum", torch::tensor(value));
    metrics.add_min("min", value);
    metrics.add_max("max", torch::tensor(value));
  }
  metrics.add_max("mixed", 1);
  metrics.add_max("mixed", torch::tensor(nan));
  metrics.add("infinite", INFINITY);
  const auto row = metrics.all_reduce();
  for (const char* name : {"mean", "sum", "min", "max", "mixed"}) EXPECT_TRUE(std::isnan(row[name])) << name;
  EXPECT_EQ(row["infinite"], INFINITY);
}

TEST(Metrics, Accuracy) {
  const auto scores = torch::tensor({{0.1, 0.7, 0.2}, {0.5, 0.3, 0.2}, {0.2, 0.3, 0.5}, {0.4, 0.5, 0.1}});
  const auto target = torch::tensor({1, 1, 2, 2});
  EXPECT_DOUBLE_EQ(accuracy(scores, target).item<double>(), 0.5);
  EXPECT_DOUBLE_EQ(accuracy(scores, target, 2).item<double>(), 0.75);
  EXPECT_DOUBLE_EQ(accuracy(scores, target, 3).item<double>(), 1);
  Metrics metrics;
  metrics.add_accuracy("accuracy", scores, target);
  metrics.add_accuracy("accuracy", scores.slice(0, 0, 1), target.slice(0, 0, 1));
  metrics.add_accuracy("accuracy", scores.slice(0, 0, 0), target.slice(0, 0, 0));
  const auto row = metrics.all_reduce();
  EXPECT_DOUBLE_EQ(row["accuracy"], 0.6);
  EXPECT_EQ(row.at("accuracy").count, 5);
  // As the loss of a language model takes them: samples x classes x places.
  EXPECT_DOUBLE_EQ(accuracy(scores.t().unsqueeze(0), target.unsqueeze(0)).item<double>(), 0.5);
  EXPECT_NE(
      error_of([&] { accuracy(scores, target.slice(0, 1)); }).find("scores of shape [4, 3] with targets of shape [3]"),
      std::string::npos);
  EXPECT_EQ(error_of([&] { accuracy(scores, target, 4); }), "accuracy: the best 4 of 3 classes");
}

TEST(Metrics, OverRanks) {
  for (const int n : {1, 2, 3, 4}) {
    run_ranks({.n = n}, [n](Rank& r) {
      Metrics metrics;
      for (int round = 0; round < 3; ++round) {
        const double own = r.rank + round;
        metrics.add("mean", own, r.rank + 1);
        metrics.add_sum("sum", torch::tensor(own));
        metrics.add_min("min", own);
        metrics.add_max("max", own);
        const auto row = metrics.all_reduce(r.world);
        double sum = 0, weighted = 0, weights = 0;
        for (int other = 0; other < n; ++other) {
          sum += other + round;
          weighted += (other + round) * (other + 1);
          weights += other + 1;
        }
        EXPECT_DOUBLE_EQ(row["mean"], weighted / weights);
        EXPECT_DOUBLE_EQ(row.at("mean").count, weights);
        EXPECT_DOUBLE_EQ(row["sum"], sum);
        EXPECT_EQ(row["min"], round);
        EXPECT_EQ(row["max"], n - 1 + round);
      }
      EXPECT_TRUE(metrics.all_reduce(r.world).empty()) << "nothing was added since";
    });
  }
}

TEST(Metrics, OneCollectiveForARow) {
  run_ranks({.n = 2}, [](Rank& r) {
    Metrics metrics;
    const auto operations = [&] { return r.world->recent_operations().size(); };
    const auto row = [&](std::initializer_list<const char*> names) {
      for (const char* name : names) metrics.add(name, 1);
      const std::size_t before = operations();
      metrics.all_reduce(r.world);
      return operations() - before;
    };
    EXPECT_GT(row({"loss", "accuracy"}), 1u) << "the first agrees on the names";
    EXPECT_EQ(row({"loss", "accuracy"}), 1u);
    EXPECT_EQ(row({"accuracy", "loss"}), 1u) << "in any order";
    EXPECT_EQ(row({"loss"}), 1u) << "or fewer";
    EXPECT_EQ(row({}), 1u);
    EXPECT_GT(row({"loss", "new"}), 1u);
    EXPECT_EQ(row({"loss", "new", "accuracy"}), 1u);
  });
}

TEST(Metrics, RanksWithOtherNames) {
  run_ranks({.n = 3}, [](Rank& r) {
    Metrics metrics;
    metrics.add("all", r.rank);
    if (r.rank == 1) metrics.add("only 1", 5, 2);
    if (r.rank == 2) metrics.add_max("only 2", std::nan(""));
    auto row = metrics.all_reduce(r.world);
    EXPECT_EQ(names_of(row), (std::vector<std::string>{"all", "only 1", "only 2"}));
    EXPECT_EQ(row["all"], 1);
    EXPECT_EQ(row["only 1"], 5);
    EXPECT_EQ(row.at("only 1").count, 2);
    EXPECT_TRUE(std::isnan(row["only 2"])) << "of one rank is NaN of all";
    // Rank 0 has nothing at all, later.
    if (r.rank == 2) metrics.add("only 1", 7);
    row = metrics.all_reduce(r.world);
    EXPECT_EQ(names_of(row), (std::vector<std::string>{"only 1"}));
    EXPECT_EQ(row["only 1"], 7);
  });
}

TEST(Metrics, AnotherKindOnAnotherRankIsAnErrorOnAll) {
  run_ranks({.n = 2}, [](Rank& r) {
    Metrics metrics;
    if (r.rank == 0) metrics.add("loss", 1);
    if (r.rank == 1) metrics.add_max("loss", 1);
    EXPECT_EQ(error_of([&] { metrics.all_reduce(r.world); }),
              "Metrics: \"loss\" is a maximum on rank 1, but a mean on a rank before it, or earlier");
    metrics.reset();
    metrics.add("loss", r.rank);
    EXPECT_EQ(metrics.all_reduce(r.world)["loss"], 0.5) << "the group and the metrics stay usable";
  });
}

TEST(Metrics, AnotherGroupAgreesAnew) {
  run_ranks({.n = 3}, [](Rank& r) {
    const int pair[] = {2, 0};
    const auto group = r.world->new_group(pair);
    Metrics metrics;
    metrics.add("x", r.rank);
    EXPECT_EQ(metrics.all_reduce(r.world)["x"], 1);
    if (group->is_member()) {
      metrics.add("y", r.rank);
      EXPECT_EQ(names_of(metrics.all_reduce(group)), (std::vector<std::string>{"y"}));
    }
    metrics.add("x", r.rank, r.rank);
    EXPECT_DOUBLE_EQ(metrics.all_reduce(r.world)["x"], 5.0 / 3);
  });
}

}  // namespace
}  // namespace maniple::harness::metrics_test
