// The models and the data of elastic_worker and elastic_faults_worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <torch/torch.h>

namespace elastic_bench {

struct Images {
  torch::data::Example<> get(std::size_t index) const {
    return {torch::full({1, 28, 28}, static_cast<float>(index % 17) / 17),
            torch::tensor(static_cast<std::int64_t>(index % 10), torch::kLong)};
  }
  std::size_t size() const { return 1 << 20; }
};

/// "cnn", otherwise an MLP of 5.8 million parameters.
inline torch::nn::Sequential made(const std::string& model) {
  if (model == "cnn") {
    return torch::nn::Sequential(torch::nn::Conv2d(1, 16, 5), torch::nn::BatchNorm2d(16), torch::nn::ReLU(),
                                 torch::nn::MaxPool2d(2), torch::nn::Conv2d(16, 32, 5), torch::nn::ReLU(),
                                 torch::nn::MaxPool2d(2), torch::nn::Flatten(), torch::nn::Linear(512, 128),
                                 torch::nn::ReLU(), torch::nn::Dropout(0.1), torch::nn::Linear(128, 10));
  }
  return torch::nn::Sequential(torch::nn::Flatten(), torch::nn::Linear(784, 2048), torch::nn::ReLU(),
                               torch::nn::Linear(2048, 2048), torch::nn::ReLU(), torch::nn::Linear(2048, 10));
}

}  // namespace elastic_bench
