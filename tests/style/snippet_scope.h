// What the snippets of the documents on LibTorch find around them; see snippets.sh.
#pragma once

#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <vector>

#include <torch/torch.h>

#include <maniple/maniple.h>

using namespace maniple;  // NOLINT: as short as a document

struct Net : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return torch::log_softmax(fc->forward(x.flatten(1)), 1); }
  torch::nn::Linear fc = register_module("fc", torch::nn::Linear(784, 10));
};

inline auto net = std::make_shared<Net>();
inline torch::Tensor tensor, loss, x, y;
inline torch::data::Example<> batch;
inline std::size_t epoch = 0, epochs = 1, batch_size = 64;
