// Collates samples into a batch: the default collate function of DataLoader.
//
//   Tensor                          stacked, with a new first dimension
//   numbers, bool                   a 1-D tensor (integers: int64)
//   Example, tuple, pair, array     member by member
//   vector, map                     element by element, key by key; lengths and keys must agree between samples
//   anything else (std::string)     a std::vector
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/data/example.h>
#include <torch/types.h>

#include <maniple/comm/error.h>
#include <maniple/export.h>
#include <maniple/train/tensor_nest.h>

namespace MANIPLE_API maniple {
namespace detail {

template <class Sample>
struct Collation {
  static std::vector<Sample> of(std::vector<Sample> samples) { return samples; }
};

template <class Sample>
auto collated(std::vector<Sample> samples) {
  return Collation<Sample>::of(std::move(samples));
}

/// Collects one member of each sample.
template <class Sample, class Take>
auto member_of_all(std::vector<Sample>& samples, Take take) {
  std::vector<std::decay_t<decltype(take(samples.front()))>> members;
  members.reserve(samples.size());
  for (Sample& sample : samples) members.push_back(std::move(take(sample)));
  return collated(std::move(members));
}

/// Throws InvalidArgument, which names the first tensor with a different shape.
torch::Tensor stacked(const std::vector<torch::Tensor>& tensors);

template <>
struct Collation<torch::Tensor> {
  static torch::Tensor of(const std::vector<torch::Tensor>& samples) { return stacked(samples); }
};

template <class Number>
  requires std::is_arithmetic_v<Number>
struct Collation<Number> {
  static torch::Tensor of(const std::vector<Number>& samples) {
    using Stored =
        std::conditional_t<std::is_same_v<Number, bool> || std::is_floating_point_v<Number>, Number, std::int64_t>;
    auto batch = torch::empty({static_cast<std::int64_t>(samples.size())}, c10::CppTypeToScalarType<Stored>::value);
    auto* to = batch.template data_ptr<Stored>();
    for (std::size_t i = 0; i < samples.size(); ++i) to[i] = static_cast<Stored>(samples[i]);
    return batch;
  }
};

template <class Data, class Target>
struct Collation<torch::data::Example<Data, Target>> {
  using Sample = torch::data::Example<Data, Target>;
  static auto of(std::vector<Sample> samples) {
    auto data = member_of_all(samples, [](Sample& sample) -> Data& { return sample.data; });
    auto target = member_of_all(samples, [](Sample& sample) -> Target& { return sample.target; });
    return torch::data::Example<decltype(data), decltype(target)>(std::move(data), std::move(target));
  }
};
template <class Data>
struct Collation<torch::data::Example<Data, torch::data::example::NoTarget>> {
  using Sample = torch::data::Example<Data, torch::data::example::NoTarget>;
  static auto of(std::vector<Sample> samples) {
    auto data = member_of_all(samples, [](Sample& sample) -> Data& { return sample.data; });
    return torch::data::Example<decltype(data), torch::data::example::NoTarget>(std::move(data));
  }
};

template <class... Parts>
struct Collation<std::tuple<Parts...>> {
  using Sample = std::tuple<Parts...>;
  static auto of(std::vector<Sample> samples) { return all(samples, std::index_sequence_for<Parts...>()); }
  template <std::size_t... i>
  static auto all(std::vector<Sample>& samples, std::index_sequence<i...>) {
    return std::make_tuple(member_of_all(samples, [](Sample& sample) -> auto& { return std::get<i>(sample); })...);
  }
};
template <class First, class Second>
struct Collation<std::pair<First, Second>> {
  using Sample = std::pair<First, Second>;
  static auto of(std::vector<Sample> samples) {
    auto first = member_of_all(samples, [](Sample& sample) -> First& { return sample.first; });
    return std::make_pair(std::move(first),
                          member_of_all(samples, [](Sample& sample) -> Second& { return sample.second; }));
  }
};

template <class T>
struct Collation<std::vector<T>> {
  static auto of(std::vector<std::vector<T>> samples) {
    std::vector<decltype(collated(std::vector<T>()))> batch;
    for (const auto& sample : samples) {
      if (sample.size() != samples.front().size())
        throw InvalidArgument("samples are vectors of different lengths, " + std::to_string(samples.front().size()) +
                              " and " + std::to_string(sample.size()) + "; give the loader a collate function");
    }
    for (std::size_t i = 0; i < samples.front().size(); ++i)
      batch.push_back(member_of_all(samples, [i](std::vector<T>& sample) -> T& { return sample[i]; }));
    return batch;
  }
};
template <class T, std::size_t size>
struct Collation<std::array<T, size>> {
  using Sample = std::array<T, size>;
  static auto of(std::vector<Sample> samples) {
    std::array<decltype(collated(std::vector<T>())), size> batch;
    for (std::size_t i = 0; i < size; ++i)
      batch[i] = member_of_all(samples, [i](Sample& sample) -> T& { return sample[i]; });
    return batch;
  }
};
template <class Key, class T>
struct Collation<std::map<Key, T>> {
  using Sample = std::map<Key, T>;
  static auto of(std::vector<Sample> samples) {
    std::map<Key, decltype(collated(std::vector<T>()))> batch;
    for (const Sample& sample : samples) {
      if (sample.size() != samples.front().size()) throw InvalidArgument("samples are maps with different keys");
    }
    for (const auto& [key, unused] : Sample(samples.front()))
      batch.emplace(key, member_of_all(samples, [&k = key](Sample& sample) -> T& {
                      const auto found = sample.find(k);
                      if (found == sample.end()) throw InvalidArgument("samples are maps with different keys");
                      return found->second;
                    }));
    return batch;
  }
};

}  // namespace detail

/// Default collate function of DataLoader.
struct StackCollate {
  template <class Sample>
  auto operator()(std::vector<Sample> samples) const {
    return detail::collated(std::move(samples));
  }
};

}  // namespace maniple
