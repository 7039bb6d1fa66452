// Weights of modules in files: what is saved comes back, what does not fit is named, and nothing is changed then.
#include <cstdlib>
#include <fstream>

#include <gtest/gtest.h>

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/script.h>

#include "comm/base/files.h"
#include "harness/error_of.h"
#include "harness/run_ranks.h"
#include "harness/shared_folder.h"
#include "harness/temporary_directory.h"
#include "train/models.h"
#include "train/weights/torch_file_bytes.h"
#include <maniple/train/ddp.h>
#include <maniple/train/weights.h>

namespace maniple::harness::weights_test {
namespace {

using testing_models::NetImpl;

const std::string kData = WEIGHTS_DATA;

std::shared_ptr<NetImpl> net(double value, bool batch_norm = true) {
  auto made = std::make_shared<NetImpl>(16, batch_norm);
  const torch::NoGradGuard no_grad;
  double next = value;
  for (auto& tensor : made->parameters())
    tensor.copy_(torch::arange(tensor.numel()).view(tensor.sizes()) * 0.25 + next++);
  for (auto& tensor : made->buffers()) tensor.fill_(next++);
  return made;
}

/// Every tensor of a module, in one.
torch::Tensor all_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> flat;
  for (const auto& tensor : module.parameters()) flat.push_back(tensor.detach().to(torch::kFloat64).flatten());
  for (const auto& tensor : module.buffers()) flat.push_back(tensor.to(torch::kFloat64).flatten());
  return torch::cat(flat);
}

std::string format_path(const std::string& path, int rank) {
  return path + "." + std::to_string(rank) + ".safetensors";
}

void write(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Weights, SavedWeightsAreReadBack) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/net.safetensors";
  save_weights(*net(1), path);
  auto other = net(5);
  const WeightsReport report = load_weights(*other, path);
  EXPECT_TRUE(all_of(*other).equal(all_of(*net(1))));
  EXPECT_TRUE(report.complete());
  EXPECT_EQ(report.loaded.size(), 9u);
  EXPECT_TRUE(other->fc1->weight.requires_grad());
  save_weights(*net(2), path);  // replaces it
  load_weights(*other, folder.path());
  EXPECT_TRUE(all_of(*other).equal(all_of(*net(2))));
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"net.safetensors"}) << "nothing else is left behind";
}

TEST(Weights, AreSavedInSeveralFilesAndFoundByAnyPath) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/model.safetensors";
  save_weights(*net(1), path);
  save_weights(*net(2), path, {.max_shard_bytes = 600});
  EXPECT_FALSE(std::ifstream(path).good()) << "the file of the earlier save is gone";
  EXPECT_TRUE(std::ifstream(folder.path() + "/model-00001-of-00002.safetensors").good());
  for (const std::string& name : {folder.path(), folder.path() + "/", path, path + ".index.json"}) {
    auto other = net(5);
    load_weights(*other, name);
    EXPECT_TRUE(all_of(*other).equal(all_of(*net(2)))) << name;
  }
  save_weights(*net(3), folder.path(), {.max_shard_bytes = 1});
  EXPECT_EQ(names_in(folder.path()).size(), 10u) << "nine tensors, nine files, one index";
  auto other = net(5);
  load_weights(*other, folder.path());
  EXPECT_TRUE(all_of(*other).equal(all_of(*net(3))));
  save_weights(*net(4), folder.path(), {.max_shard_bytes = 1 << 20});
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"model.safetensors"});
}

TEST(Weights, WhatDoesNotFitIsNamedAndNothingChanges) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/a.safetensors";
  auto source = net(1, false);
  save_weights({{"fc1.weight", source->fc1->weight}, {"fc1.bias", torch::zeros({3})}, {"more", torch::zeros({2})}},
               path);
  auto target = net(5, false);
  const std::string text = error_of([&] { load_weights(*target, path); });
  for (const char* part :
       {"a.safetensors does not fit the module", "2 missing in the file: \"fc2.weight\", \"fc2.bias\"",
        "1 not in the module: \"more\"", "fc1.bias: F32 [3] in the file, F32 [16] in the module", "strict = false"})
    EXPECT_TRUE(holds(text, part)) << part << " in: " << text;
  EXPECT_TRUE(all_of(*target).equal(all_of(*net(5, false))));
  const WeightsReport report = load_weights(*target, path, {.strict = false});
  EXPECT_EQ(report.loaded, std::vector<std::string>{"fc1.weight"});
  EXPECT_EQ(report.missing, (std::vector<std::string>{"fc2.weight", "fc2.bias"}));
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"more"});
  EXPECT_EQ(report.mismatched.size(), 1u);
  EXPECT_TRUE(target->fc1->weight.equal(source->fc1->weight));
  EXPECT_TRUE(target->fc2->weight.equal(net(5, false)->fc2->weight));
  EXPECT_TRUE(
      holds(error_of([&] { load_weights(*target, path, {.strict = false, .rename = {{"^", "x."}}}); }), "nothing in"));
}

TEST(Weights, LongListsAreShortened) {
  const TemporaryDirectory folder;
  std::vector<std::pair<std::string, torch::Tensor>> many;
  for (int i = 0; i < 30; ++i) many.emplace_back("t" + std::to_string(100 + i), torch::zeros({1}));
  save_weights(many, folder.path());
  const std::string text = error_of([&] { load_weights(*net(1), folder.path()); });
  EXPECT_TRUE(holds(text, "30 not in the module: \"t100\"")) << text;
  EXPECT_TRUE(holds(text, "\"t109\", ... and 20 more")) << text;
}

TEST(Weights, DtypesAreConverted) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/w.safetensors";
  const torch::Tensor values = torch::arange(-8, 8, torch::kFloat32) / 4;
  for (const auto from : {torch::kFloat32, torch::kFloat64, torch::kFloat16, torch::kBFloat16}) {
    save_weights({{"w", values}, {"n", torch::full({2}, 7, torch::kInt32)}}, path, {.dtype = from});
    for (const auto to : {torch::kFloat32, torch::kFloat64, torch::kFloat16, torch::kBFloat16}) {
      const torch::Tensor w = torch::zeros({16}, to), n = torch::zeros({2}, torch::kInt64);
      load_weights({{"w", w}, {"n", n}}, path);
      EXPECT_TRUE(w.equal(values.to(to))) << c10::toString(from) << " to " << c10::toString(to);
      EXPECT_TRUE(n.equal(torch::full({2}, 7, torch::kInt64)));
    }
  }
  const torch::Tensor whole = torch::zeros({16}, torch::kInt32), n = torch::zeros({2}, torch::kInt32);
  EXPECT_TRUE(
      holds(error_of([&] { load_weights({{"w", whole}, {"n", n}}, path); }), "w: BF16 [16] in the file, I32 [16]"));
  const torch::Tensor half = torch::zeros({16}, torch::kFloat16);
  EXPECT_TRUE(
      holds(error_of([&] { load_weights({{"w", half}, {"n", n}}, path, {.convert_dtype = false}); }), "w: BF16 [16]"));
  EXPECT_TRUE(holds(error_of([&] { save_weights({{"n", n}}, path, {.dtype = torch::kInt32}); }), "floating-point"));
}

TEST(Weights, AreRenamedAndTransposed) {
  // The form of Hugging Face's GPT-2: no prefix, and Conv1D weights with input features first.
  const torch::Tensor weight = torch::zeros({6, 2}), bias = torch::zeros({6}), wte = torch::zeros({3, 2});
  const WeightsReport report = load_weights(
      {{"transformer.blocks.0.c_attn.weight", weight}, {"transformer.blocks.0.c_attn.bias", bias}, {"wte.weight", wte}},
      kData + "/gpt2.safetensors",
      {.rename = {{"^h\\.(\\d+)\\.mask$", ""}, {"^h\\.([0-9]+)\\.", "blocks.\\1."}},
       .rename_by = [](const std::string& name) { return name.starts_with("blocks") ? "transformer." + name : name; },
       .transpose = {"c_(attn|proj|fc)\\.weight$"}});
  EXPECT_TRUE(weight.equal(torch::arange(12, torch::kFloat32).view({2, 6}).t()));
  EXPECT_TRUE(bias.equal(torch::arange(6) * 0.5));
  EXPECT_TRUE(wte.equal(torch::arange(1, 7, torch::kFloat32).view({3, 2})));
  EXPECT_EQ(report.ignored, std::vector<std::string>{"h.0.mask (left out by renaming)"});

  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/w.safetensors";
  save_weights({{"a.weight", weight}}, path, {.rename = {{"^a", "h.b"}}, .transpose = {"weight"}});
  const auto read = read_weights(path);
  EXPECT_TRUE(read["h.b.weight"].equal(weight.t()));
  EXPECT_TRUE(read_weights(path, {.rename = {{".*\\.", ""}}, .transpose = {"^h"}})["weight"].equal(weight));

  EXPECT_TRUE(holds(error_of([&] { load_weights({{"x", bias}}, path, {.rename = {{"(", ""}}}); }),
                    "\"(\" is not a regular expression"));
  save_weights({{"a", bias}, {"b", bias + 1}}, path);
  EXPECT_TRUE(holds(error_of([&] { load_weights({{"x", bias}}, path, {.rename = {{".", "x"}}}); }),
                    "renaming calls both \"a\" and \"b\" \"x\""));
  EXPECT_TRUE(holds(error_of([&] { save_weights({{"a", bias}, {"b", wte}}, path, {.rename = {{".", "x"}}}); }),
                    "under the name \"x\""));
  EXPECT_TRUE(
      holds(error_of([&] { load_weights({{"a", bias}, {"b", bias}}, path, {.transpose = {"a"}}); }), "only matrices"));
}

struct Layer : torch::nn::Module {
  explicit Layer(const torch::Tensor& tensor) : weight(register_parameter("weight", tensor)) {}
  torch::Tensor weight;
};

/// One matrix under two names.
struct Tied : torch::nn::Module {
  explicit Tied(double value) {
    embed = register_module("embed", std::make_shared<Layer>(torch::full({6, 4}, value)));
    head = register_module("head", std::make_shared<Layer>(embed->weight));
  }
  std::shared_ptr<Layer> embed, head;
};

TEST(Weights, TiedOnesAreSavedOnceAndLoadedFromEitherName) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/tied.safetensors";
  save_weights(Tied(3), path);
  const auto read = read_weights(path);
  ASSERT_EQ(read.keys(), std::vector<std::string>{"embed.weight"});
  Tied tied(1);
  EXPECT_EQ(load_weights(tied, path).loaded.size(), 2u);
  EXPECT_TRUE(tied.head->weight.equal(torch::full({6, 4}, 3.0)));
  save_weights({{"head.weight", torch::full({6, 4}, 4.0)}}, path);
  load_weights(tied, path);
  EXPECT_TRUE(tied.embed->weight.equal(torch::full({6, 4}, 4.0)));
  save_weights({{"head.weight", torch::full({6, 4}, 5.0)}, {"embed.weight", torch::full({6, 4}, 5.0)}}, path);
  EXPECT_EQ(load_weights(tied, path).loaded.size(), 2u);
  EXPECT_TRUE(tied.embed->weight.equal(torch::full({6, 4}, 5.0)));
}

TEST(Weights, OfAnyLayoutAndLength) {
  // Several pieces, rows that are not next to each other, and tensors that are not aligned in the file.
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/w.safetensors";
  const torch::Tensor large = torch::arange(3 * 1000 * 1000, torch::kFloat32).view({1500, 2000});
  const torch::Tensor wide = torch::arange(200 * 30, torch::kFloat64).view({200, 30});
  save_weights({{"large", large},
                {"wide", wide.slice(1, 3, 20)},
                {"bytes", torch::ones({3}, torch::kUInt8)},
                {"none", torch::zeros({0, 4})}},
               path);
  const torch::Tensor same = torch::zeros({1500, 2000}), turned = torch::zeros({2000, 1500}),
                      half = torch::zeros({1500, 2000}, torch::kFloat16);
  const torch::Tensor parts = torch::zeros({17, 400}).slice(1, 0, 400, 2).t(), bytes = torch::zeros({3}, torch::kUInt8);
  const torch::Tensor none = torch::zeros({0, 4});
  load_weights({{"large", same}, {"wide", parts}, {"bytes", bytes}, {"none", none}}, path);
  EXPECT_TRUE(same.equal(large));
  EXPECT_TRUE(parts.equal(wide.slice(1, 3, 20).to(torch::kFloat32)));
  EXPECT_TRUE(bytes.equal(torch::ones({3}, torch::kUInt8)));
  load_weights({{"large", turned}}, path, {.strict = false, .transpose = {"large"}});
  EXPECT_TRUE(turned.equal(large.t()));
  load_weights({{"large", half}}, path, {.strict = false});
  EXPECT_TRUE(half.equal(large.to(torch::kFloat16)));
}

TEST(Weights, AreMappedNotCopied) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/w.safetensors";
  save_weights({{"b", torch::arange(5)}, {"a", torch::ones({2, 2})}}, path);
  auto read = read_weights(path);
  EXPECT_EQ(read.keys(), (std::vector<std::string>{"b", "a"}));
  const torch::Tensor a = read["a"];
  read.clear();
  a.add_(1);  // neither the file nor others see it
  EXPECT_TRUE(a.equal(torch::full({2, 2}, 2.0)));
  EXPECT_TRUE(read_weights(path)["a"].equal(torch::ones({2, 2})));
}

TEST(Weights, OfTorchSaveAreReadWithoutPython) {
  const auto read = read_weights(kData + "/state_dict.pt");
  const torch::Tensor weight = torch::arange(12, torch::kFloat32).view({3, 4}) / 4;
  EXPECT_EQ(read.keys(), (std::vector<std::string>{"fc.weight", "fc.bias", "turned", "part", "half", "brain", "steps",
                                                   "mask", "empty"}));
  EXPECT_TRUE(read["fc.weight"].equal(weight));
  EXPECT_TRUE(read["fc.bias"].equal(torch::arange(-1, 2, torch::kFloat32)));
  EXPECT_TRUE(read["turned"].equal(weight.t()));
  EXPECT_TRUE(read["part"].equal(torch::tensor({{101.F, 102.F}, {105.F, 106.F}})));
  EXPECT_TRUE(read["half"].equal(torch::tensor({0.5, -2.0}, torch::kFloat16)));
  EXPECT_TRUE(read["brain"].equal(torch::tensor({1.5, -3.0, 256.0}, torch::kBFloat16)));
  EXPECT_TRUE(read["steps"].equal(torch::tensor(-7, torch::kInt64)));
  EXPECT_TRUE(read["mask"].equal(torch::tensor({true, false})));
  EXPECT_EQ(read["empty"].sizes(), torch::IntArrayRef({0, 5}));
  EXPECT_TRUE(read_weights(kData + "/untyped.pt")["numbers"].equal(torch::tensor({-2, -4}, torch::kInt32)));

  const torch::Tensor turned = torch::zeros({4, 3}, torch::kFloat64), again = torch::zeros({3, 4});
  load_weights({{"turned", turned}}, kData + "/state_dict.pt", {.strict = false});
  EXPECT_TRUE(turned.equal(weight.t().to(torch::kFloat64)));
  load_weights({{"turned", again}}, kData + "/state_dict.pt", {.strict = false, .transpose = {"turned"}});
  EXPECT_TRUE(again.equal(weight));

  torch::nn::Linear fc(3, 2);
  const std::string text = error_of([&] { load_weights(*fc, kData + "/checkpoint.pt"); });
  EXPECT_TRUE(holds(text, "checkpoint.pt: the tensors in it are in dictionaries") && holds(text, "\"model\"")) << text;
  EXPECT_TRUE(holds(error_of([&] { load_weights(*fc, kData + "/checkpoint.pt", {.key = "net"}); }),
                    "there is no key \"net\" in it; there are \"model\""));
  load_weights(*fc, kData + "/checkpoint.pt", {.rename = {{"^fc\\.", ""}}, .key = "model"});
  EXPECT_TRUE(fc->weight.equal(torch::arange(6, torch::kFloat32).view({2, 3})));
  EXPECT_TRUE(fc->bias.equal(torch::tensor({7.F, 8.F})));
  EXPECT_EQ(read_weights(kData + "/checkpoint.pt", {.key = "model/"}).size(), 2u);
}

TEST(Weights, OfLibTorchsOwnWriterAreRead) {
  const TemporaryDirectory folder;
  c10::Dict<std::string, torch::Tensor> state;
  state.insert("w", torch::arange(6, torch::kFloat32).view({2, 3}));
  state.insert("n", torch::tensor(7, torch::kInt64));
  const std::vector<char> bytes = torch::jit::pickle_save(state);
  write(folder.path() + "/cpp.pt", std::string(bytes.begin(), bytes.end()));
  const auto read = read_weights(folder.path() + "/cpp.pt");
  EXPECT_TRUE(read["w"].equal(state.at("w")));
  EXPECT_TRUE(read["n"].equal(state.at("n")));

  torch::save(net(1), folder.path() + "/archive.pt");
  EXPECT_TRUE(holds(error_of([&] { load_weights(*net(1), folder.path() + "/archive.pt"); }), "TorchScript archive"));
}

TEST(Weights, OfAScriptedModule) {
  const TemporaryDirectory folder;
  save_weights({{"w", torch::full({2}, 3.0)}}, folder.path());
  torch::jit::Module module("m");
  module.register_parameter("w", torch::zeros({2}), false);
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  for (const auto& parameter : module.named_parameters()) tensors.emplace_back(parameter.name, parameter.value);
  load_weights(tensors, folder.path());
  EXPECT_TRUE(module.attr("w").toTensor().equal(torch::full({2}, 3.0)));
}

TEST(Weights, FilesThatAreNotWeightsAreNamed) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/w";
  const auto error = [&](const std::string& bytes) -> std::string {
    write(path, bytes);
    try {
      read_weights(path);
    } catch (const Error& failure) {
      return failure.what();
    }
    return "no error";
  };
  using namespace torch_file_bytes;
  EXPECT_TRUE(holds(error(""), path + ": 0 bytes are too few"));
  EXPECT_TRUE(holds(error(std::string(100, 'x')), path + ": it is neither a safetensors file nor one of torch.save"));
  EXPECT_TRUE(holds(error("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."), "before PyTorch 1.6"));
  EXPECT_TRUE(holds(error(zip_of({{"a/b", "c"}})), "without data.pkl"));
  EXPECT_TRUE(
      holds(error(torch_file(pickle(global("os", "system") + "(" + text("touch " + folder.path() + "/x") + "tR"), {})),
            "it refers to os.system"));
  EXPECT_TRUE(holds(error(torch_file(pickle("]"), {})), "it holds a list; expected a dictionary"));
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"w"});
  EXPECT_TRUE(holds(error_of([&] { read_weights(folder.path()); }), "this folder holds no weights"));
  EXPECT_THROW(read_weights(folder.path() + "/missing"), SystemError);
  EXPECT_TRUE(holds(error_of([&] { save_weights(*net(1), folder.path() + "/x.pt"); }), "ends in .safetensors"));
  EXPECT_THROW(save_weights(*net(1), folder.path() + "/missing/x.safetensors"), SystemError);
  write(folder.path() + "/m.index.json", R"({"weight_map":{"a":"w"}})");
  write(path,
        torch_file(pickle(dictionary({{"b", tensor(storage("FloatStorage", "0", 1), 0, {}, {})}})), {{"0", "abcd"}}));
  EXPECT_THROW(read_weights(folder.path() + "/m.index.json"), ProtocolError)
      << "the tensor is not where the index says";
}

TEST(Weights, RankZeroLoadsForAll) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() + "/w.safetensors";
  save_weights(*net(1), path);
  for (const int n : {1, 2, 3}) {
    run_ranks({.n = n}, [&](Rank& r) {
      auto mine = net(10 + r.rank);
      if (r.rank == 0) load_weights(*mine, path);
      DistributedDataParallel<NetImpl> ddp(mine, {.group = r.world});
      EXPECT_TRUE(all_of(*mine).equal(all_of(*net(1))));
      const std::string own = format_path(path, r.rank);
      save_weights(ddp, own);  // under the names of the module inside
      auto alone = net(20);
      EXPECT_EQ(load_weights(*alone, own).loaded.size(), 9u);
      EXPECT_TRUE(all_of(*alone).equal(all_of(*net(1))));
      load_weights(ddp, path);
    });
  }
}

}  // namespace
}  // namespace maniple::harness::weights_test
