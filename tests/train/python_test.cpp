// What PyTorch writes, read and continued here, and the reverse. Its files are in tests/data; where Python has torch,
// tests/data/python_torch.py writes them anew, with the PyTorch that is installed, and the same checks hold for those.
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/script.h>

#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "harness/temporary_directory.h"
#include "train/models.h"
#include <maniple/dist.h>
#include <maniple/train/ddp.h>
#include <maniple/train/lr_scheduler.h>
#include <maniple/train/optim.h>
#include <maniple/train/weights.h>

namespace maniple::harness::python_test {
namespace {

using torch::Tensor;
using Dict = std::map<std::string, Tensor>;
using Parameters = std::vector<Tensor>;

const std::string kData = WEIGHTS_DATA;
constexpr int kNoTorch = 77;

/// Runs the script with the first Python that has torch; Debian's own comes first, as another one in PATH seldom has
/// it.
int run_script(const std::string& arguments) {
  for (const std::string python : {"/usr/bin/python3", "python3"}) {
    const std::string command =
        "PYTHONDONTWRITEBYTECODE=1 " + python + " -W ignore '" + kData + "/python_torch.py' " + arguments;
    const int status = ::system((command + (python == "python3" ? " 2>/dev/null" : "")).c_str());
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code != kNoTorch && code != 127) return code;
  }
  return kNoTorch;
}

Dict read(const std::string& path) {
  Dict result;
  for (const auto& item : read_weights(path)) result[item.key()] = item.value();
  return result;
}

// ---- State dicts ----------------------------------------------------------------------------------------------------

Dict expected_state() {
  Dict result;
  const std::map<std::string, torch::ScalarType> dtypes = {
      {"float32", torch::kFloat32},   {"float64", torch::kFloat64}, {"float16", torch::kFloat16},
      {"bfloat16", torch::kBFloat16}, {"int8", torch::kInt8},       {"int16", torch::kInt16},
      {"int32", torch::kInt32},       {"int64", torch::kInt64},     {"uint8", torch::kUInt8}};
  for (const auto& [name, dtype] : dtypes) result["dtype." + name] = torch::arange(5).to(dtype) * 3;
  const Tensor base = torch::arange(24, torch::kFloat32).view({4, 6});
  result["dtype.bool"] = torch::tensor({true, false, true});
  result["whole"] = base;
  result["turned"] = base.t();
  result["part"] = base.slice(0, 1, 3).slice(1, 2, 5);
  result["stepped"] = base.slice(0, 0, 4, 2).slice(1, 0, 6, 3);
  result["expanded"] = torch::full({1}, 7.0).expand({3, 2});
  result["channels_last"] =
      torch::arange(24, torch::kFloat32).view({1, 2, 3, 4}).contiguous(torch::MemoryFormat::ChannelsLast);
  result["embed.weight"] = torch::arange(6, torch::kFloat32).view({2, 3}) - 2.5;
  result["head.weight"] = result["embed.weight"];
  result["scalar"] = torch::tensor(-7, torch::kInt64);
  result["empty"] = torch::zeros({0, 5});
  return result;
}

void check_state(const std::string& folder) {
  for (const int protocol : {2, 3, 4, 5}) {
    const std::string path = folder + "/python_state_" + std::to_string(protocol) + ".pt";
    const Dict found = read(path), expected = expected_state();
    ASSERT_EQ(found.size(), expected.size()) << path;
    std::vector<std::pair<std::string, Tensor>> places;
    for (const auto& [name, tensor] : expected) {
      ASSERT_EQ(found.count(name), 1u) << path << " " << name;
      EXPECT_EQ(found.at(name).scalar_type(), tensor.scalar_type()) << path << " " << name;
      EXPECT_TRUE(torch::equal(found.at(name), tensor)) << path << " " << name;
      places.emplace_back(name, torch::zeros(tensor.sizes(), tensor.dtype()));
    }
    EXPECT_EQ(found.at("head.weight").data_ptr(), found.at("embed.weight").data_ptr()) << "tied in the file";
    EXPECT_TRUE(load_weights(places, path).complete());
    for (const auto& [name, tensor] : places)
      EXPECT_TRUE(torch::equal(tensor, expected.at(name))) << path << " " << name;
  }
}

// ---- Optimizers -----------------------------------------------------------------------------------------------------

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(Parameters)>;

template <class Optimizer, class Options>
Make make(Options options) {
  return [options](Parameters p) { return std::make_unique<Optimizer>(std::move(p), options); };
}

/// Those of python_torch.py.
const std::map<std::string, Make>& optimizers() {
  namespace t = torch::optim;
  static const std::map<std::string, Make> all = {
      {"sgd", make<optim::SGD>(t::SGDOptions(0.05).momentum(0.9).weight_decay(0.01).nesterov(true))},
      {"sgd_dampened", make<optim::SGD>(t::SGDOptions(0.05).momentum(0.8).dampening(0.3))},
      {"adam", make<optim::Adam>(t::AdamOptions(0.02).betas({0.8, 0.95}).weight_decay(0.1))},
      {"adam_amsgrad", make<optim::Adam>(t::AdamOptions(0.02).amsgrad(true))},
      {"adamw", make<optim::AdamW>(t::AdamWOptions(0.03).weight_decay(0.2).eps(1e-6))}};
  return all;
}

constexpr int kHalf = 5, kSteps = 10;

Parameters parameters_in(const Dict& file, const std::string& prefix) {
  Parameters result;
  for (int i = 0; i < 2; ++i)
    result.push_back(file.at(prefix + ".parameter." + std::to_string(i)).clone().requires_grad_());
  return result;
}

void train(torch::optim::Optimizer& optimizer, const Parameters& parameters, const Dict& file, int from, int to) {
  for (int step = from; step < to; ++step) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = file.at("gradient." + std::to_string(step) + "." + std::to_string(i)).clone();
    }
    optimizer.step();
  }
}

/// The part of a file below a prefix, without it.
Dict below(const Dict& file, const std::string& prefix) {
  Dict result;
  for (const auto& [name, tensor] : file) {
    if (name.starts_with(prefix)) result[name.substr(prefix.size())] = tensor;
  }
  return result;
}

void expect_near(const Tensor& actual, const Tensor& expected, const std::string& what, double tolerance = 1e-6) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const Tensor a = actual.detach().to(torch::kFloat64), b = expected.detach().to(torch::kFloat64);
  EXPECT_TRUE(torch::allclose(a, b, tolerance, tolerance)) << what << "\n" << a << "\n" << b;
}

void check_optimizers(const std::string& folder) {
  const Dict file = read(folder + "/python_optim.pt");
  for (const auto& [name, make_one] : optimizers()) {
    for (const int from : {0, kHalf}) {  // from the beginning, and from Python's state dict
      const std::string at = name + "." + std::to_string(from);
      const Parameters parameters = parameters_in(file, at), after = parameters_in(file, name + ".10");
      const auto optimizer = make_one(parameters);
      if (from > 0) {
        for (auto& group : optimizer->param_groups()) group.options().set_lr(123);  // to be replaced
        Dict state = below(file, at + ".");
        for (int i = 0; i < 2; ++i) state.erase("parameter." + std::to_string(i));
        for (auto& [key, tensor] : state) tensor = tensor.clone();  // the file's own are mapped
        optim::load_state_dict(*optimizer, state);
      }
      train(*optimizer, parameters, file, from, kSteps);
      for (std::size_t i = 0; i < 2; ++i) expect_near(parameters[i], after[i], at);
      // Every name and number that we know is in Python's dict, and the reverse for the state.
      const Dict theirs = below(file, name + ".10."), ours = optim::state_dict(*optimizer);
      for (const auto& [key, tensor] : ours) {
        ASSERT_EQ(theirs.count(key), 1u) << name << " " << key;
        expect_near(tensor, theirs.at(key), name + " " + key);
      }
      for (const auto& [key, tensor] : theirs) {
        if (key.starts_with("state.")) {
          EXPECT_EQ(ours.count(key), 1u) << name << " " << key;
        }
      }
    }
  }
}

// ---- Schedules ------------------------------------------------------------------------------------------------------

void check_schedules(const std::string& folder) {
  const Dict file = read(folder + "/python_schedules.pt");
  const std::map<std::string, LrSchedule> schedules = {
      {"linear", lr::linear({.start_factor = 0.1, .end_factor = 0.9, .steps = 7})},
      {"constant", lr::constant(0.25, 4)},
      {"cosine", lr::cosine({.steps = 12, .minimum = 0.02})},
      {"cosine_restarts", lr::cosine_restarts({.steps = 3, .growth = 2, .minimum = 0.01})},
      {"one_cycle", lr::one_cycle({.max_lr = 0.8, .steps = 30})},
      {"one_cycle_three",
       lr::one_cycle({.max_lr = 0.8, .steps = 30, .rise = 0.4, .anneal = lr::Anneal::linear, .three_phases = true})},
      {"step", lr::step(4, 0.5)},
      {"multi_step", lr::multi_step({3, 8, 20}, 0.3)},
      {"exponential", lr::exponential(0.93)},
      {"lambda", lr::lambda([](std::int64_t step) { return 1.0 / (1.0 + static_cast<double>(step)); })},
      {"sequential", lr::sequential({lr::linear({.start_factor = 0.1, .steps = 5}), lr::exponential(0.9)}, {5})},
      {"chained", lr::chained({lr::constant(0.1, 6), lr::exponential(0.9)})},
      {"polynomial", lr::polynomial(20, 1.5)}};
  std::size_t compared = 0;
  for (const auto& [name, schedule] : schedules) {
    if (file.count(name) == 0) continue;  // PolynomialLR is new in 1.13
    ++compared;
    const Tensor weight = torch::zeros({1}).requires_grad_();
    torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.4).momentum(0.9));
    LrScheduler scheduler(optimizer, schedule);
    const auto& options = static_cast<const torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
    std::vector<double> rates, momenta;
    for (int step = 0; step < 30; ++step, scheduler.step()) {
      rates.push_back(options.lr());
      momenta.push_back(options.momentum());
    }
    // Python's recursions round in every step.
    expect_near(torch::tensor(rates, torch::kFloat64), file.at(name), name, 1e-9);
    if (file.count(name + ".momentum") != 0)
      expect_near(torch::tensor(momenta, torch::kFloat64), file.at(name + ".momentum"), name + "'s momentum", 1e-9);
  }
  EXPECT_GE(compared, 12u);

  const Tensor weight = torch::zeros({1}).requires_grad_(), metric = file.at("plateau.metric");
  torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.4));
  PlateauScheduler plateau(optimizer, {.factor = 0.5, .patience = 2, .threshold = 0.01, .cooldown = 1, .min_lr = 0.03});
  for (std::int64_t step = 0; step < 30; ++step) {
    plateau.step(metric[step].item<double>());
    EXPECT_NEAR(optimizer.param_groups()[0].options().get_lr(), file.at("plateau")[step].item<double>(), 1e-12) << step;
  }
}

// ---- A scripted model -----------------------------------------------------------------------------------------------

void check_script(const std::string& folder) {
  const Dict run = read(folder + "/python_script_run.pt");
  const Tensor data = run.at("data"), target = run.at("target"), losses = run.at("losses");
  for (const int n : {1, 2, 3}) {
    run_ranks({.n = n}, [&](Rank& r) {
      torch::jit::Module model = torch::jit::load(folder + "/python_script.pt");
      model.train();
      DistributedDataParallel ddp(model, {.group = r.world});
      Parameters trained;
      for (const Tensor& one : ddp.parameters()) {
        if (one.requires_grad()) trained.push_back(one);
      }
      EXPECT_EQ(trained.size(), 6u) << "all but the frozen one";
      optim::AdamW optimizer(trained, torch::optim::AdamWOptions(0.02));
      for (std::int64_t step = 0; step < data.size(0); ++step) {
        optimizer.zero_grad();
        const Tensor output = ddp(testing_models::shard(data[step], r.rank, r.size)).toTensor();
        Tensor loss = torch::mse_loss(output, testing_models::shard(target[step], r.rank, r.size));
        loss.backward();
        optimizer.step();
        loss = loss.detach().clone();
        all_reduce(loss, ReduceOp::avg, {.group = r.world});
        EXPECT_NEAR(loss.item<double>(), losses[step].item<double>(), 2e-6) << "step " << step << ", " << n << " ranks";
      }
      std::size_t compared = 0;
      for (const auto& item : ddp.module().named_parameters()) {
        expect_near(item.value, run.at("trained." + item.name), item.name, 1e-4);
        ++compared;
      }
      EXPECT_EQ(compared, 7u);
      EXPECT_EQ(ddp.module().attr("calls").toTensor().item<std::int64_t>(), 8);
    });
  }
}

// ---- The tests ------------------------------------------------------------------------------------------------------

TEST(Python, StateDictsOfEveryProtocol) { check_state(kData); }
TEST(Python, OptimizersGoOnFromItsStateDicts) { check_optimizers(kData); }
TEST(Python, SchedulesHaveItsRates) { check_schedules(kData); }
TEST(Python, AScriptTrainsLossByLoss) { check_script(kData); }

TEST(Python, StateDictsOfOptimizersHaveItsNames) {
  Parameters p;
  for (const std::int64_t size : {4, 5, 6}) p.push_back(testing_models::numbers({size}).requires_grad_());
  const auto make = [&] {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Parameters{p[0], p[1]});
    groups.emplace_back(Parameters{p[2]}, std::make_unique<torch::optim::AdamWOptions>(0.5));
    return std::make_unique<optim::AdamW>(groups, torch::optim::AdamWOptions(0.1).betas({0.8, 0.9}));
  };
  const auto optimizer = make();
  for (const Tensor& one : p) one.mutable_grad() = torch::ones_like(one);
  for (int step = 0; step < 3; ++step) optimizer->step();
  auto dict = optim::state_dict(*optimizer);
  EXPECT_EQ(dict.at("param_groups.1.lr").item<double>(), 0.5);
  EXPECT_EQ(dict.at("param_groups.0.betas")[1].item<double>(), 0.9);
  EXPECT_EQ(dict.at("param_groups.1.params").item<std::int64_t>(), 2);
  EXPECT_EQ(dict.at("param_groups.0.amsgrad").scalar_type(), torch::kBool);
  EXPECT_EQ(dict.at("state.2.step").item<double>(), 3);
  EXPECT_EQ(dict.at("state.2.step").scalar_type(), torch::kFloat32);
  EXPECT_EQ(dict.at("state.1.exp_avg_sq").sizes(), p[1].sizes());
  EXPECT_EQ(dict.count("state.0.max_exp_avg_sq"), 0u);

  dict["param_groups.0.fused"] = torch::zeros({});  // of Python's; not known here
  dict.erase("param_groups.1.eps");
  const auto again = make();
  optim::load_state_dict(*again, dict);
  for (const auto& [name, tensor] : optim::state_dict(*again)) {
    if (name == "param_groups.1.eps") continue;
    EXPECT_TRUE(torch::equal(tensor, dict.at(name))) << name;
  }
  auto wrong = dict;
  wrong["state.1.exp_avg"] = torch::zeros({9});
  EXPECT_NE(error_of([&] { optim::load_state_dict(*again, wrong); }).find("state.1.exp_avg has shape [9]"),
            std::string::npos);
  wrong = dict;
  wrong["param_groups.2.params"] = torch::zeros({1}, torch::kInt64);
  EXPECT_NE(error_of([&] { optim::load_state_dict(*again, wrong); }).find("more parameter groups"), std::string::npos);
  wrong.erase("param_groups.1.params");
  EXPECT_NE(error_of([&] { optim::load_state_dict(*again, wrong); }).find("no param_groups.1.params"),
            std::string::npos);
}

TEST(Python, FilesOfTheInstalledOne) {
  const TemporaryDirectory folder;
  const int code = run_script("write '" + folder.path() + "'");
  if (code == kNoTorch) GTEST_SKIP() << "needs python3 with torch";
  ASSERT_EQ(code, 0);
  check_state(folder.path());
  check_optimizers(folder.path());
  check_schedules(folder.path());
  check_script(folder.path());
}

TEST(Python, ReadsWhatIsWrittenHere) {
  const TemporaryDirectory folder;
  std::vector<std::pair<std::string, Tensor>> state;
  for (const auto& [name, tensor] : expected_state()) state.emplace_back(name, tensor);
  save_weights(state, folder.path() + "/state.safetensors");
  ASSERT_EQ(::system(("mkdir '" + folder.path() + "/shards'").c_str()), 0);
  save_weights(state, folder.path() + "/shards/model.safetensors", {.max_shard_bytes = 200});
  const Dict file = read(kData + "/python_optim.pt");
  Dict expected;
  for (const auto& [name, make_one] : optimizers()) {
    const Parameters parameters = parameters_in(file, name + ".0");
    const auto optimizer = make_one(parameters);
    train(*optimizer, parameters, file, 0, kHalf);
    std::vector<std::pair<std::string, Tensor>> saved;
    for (const auto& [key, tensor] : optim::state_dict(*optimizer)) saved.emplace_back(key, tensor);
    for (std::size_t i = 0; i < 2; ++i) saved.emplace_back("parameter." + std::to_string(i), parameters[i].detach());
    save_weights(saved, folder.path() + "/" + name + ".safetensors");
    train(*optimizer, parameters, file, kHalf, kSteps);
    for (std::size_t i = 0; i < 2; ++i) expected[name + "." + std::to_string(i)] = parameters[i].detach();
  }
  const int code = run_script("read '" + folder.path() + "'");
  if (code == kNoTorch) GTEST_SKIP() << "needs python3 with torch";
  ASSERT_EQ(code, 0) << "what is wrong is above";
  const Dict answer = read(folder.path() + "/answer.pt");
  ASSERT_EQ(answer.size(), expected.size());
  for (const auto& [name, tensor] : expected) expect_near(answer.at(name), tensor, name);
}

}  // namespace
}  // namespace maniple::harness::python_test
