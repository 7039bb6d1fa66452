// Shows every collective on tensors as a picture: the values of each rank before and after. Rank r starts with numbers
// that begin with the digit r + 1: 10, 11, ... on rank 0, 20, 21, ... on rank 1.
//
//   build/bin/maniple run -n 4 build/bin/examples/03_collectives
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <maniple/maniple.h>

namespace {

using Tensors = std::vector<torch::Tensor>;

std::string text_of(const Tensors& tensors) {
  std::string text;
  for (const auto& tensor : tensors) {
    const auto flat = tensor.reshape({-1});
    for (std::int64_t i = 0; i < flat.numel(); ++i) text += std::to_string(flat[i].item<int>()) + " ";
  }
  if (!text.empty()) text.pop_back();
  return text.empty() ? "-" : text;
}

/// Rank 0 collects one line from every rank and prints them below the title.
void show(const char* title, const std::string& before, const Tensors& after) {
  const auto befores = maniple::gather_object(before);
  const auto afters = maniple::gather_object(text_of(after));
  std::size_t width = 0;
  for (const auto& text : befores) width = std::max(width, text.size());
  if (maniple::get_rank() == 0) std::printf("\n%s\n", title);
  for (std::size_t rank = 0; rank < befores.size(); ++rank) {
    std::printf("  rank %zu  %-*s  ->  %s\n", rank, static_cast<int>(width), befores[rank].c_str(),
                afters[rank].c_str());
  }
}

}  // namespace

int main() try {
  maniple::init_process_group();
  const int rank = maniple::get_rank();
  const int ranks = maniple::get_world_size();
  const int last = ranks - 1;

  // own: this rank's n numbers. blank: room for n numbers. blanks: a list with one blank tensor per rank. Lists that
  // only the root passes are empty on other ranks.
  const auto own = [&](int n) { return torch::arange(n, torch::kInt) + 10 * (rank + 1); };
  const auto blank = [](int n) { return torch::zeros({n}, torch::kInt); };
  const auto blanks = [&](int n) {
    Tensors list;
    for (int i = 0; i < ranks; ++i) list.push_back(blank(n));
    return list;
  };
  const auto on = [&](int root, Tensors list) { return rank == root ? std::move(list) : Tensors{}; };
  const auto x = [&] { return own(2); };

  auto t = x();
  maniple::broadcast(t, /*src=*/0);
  show("broadcast from rank 0", text_of({x()}), {t});

  maniple::reduce(t = x(), /*dst=*/last);
  show("reduce (sum) to the last rank; the others keep what they had", text_of({x()}), {t});

  maniple::all_reduce(t = x());
  show("all_reduce (sum)", text_of({x()}), {t});

  maniple::all_reduce(t = x(), maniple::ReduceOp::max);
  show("all_reduce (max)", text_of({x()}), {t});

  auto list = on(0, blanks(2));
  maniple::gather(x(), list, /*dst=*/0);
  show("gather to rank 0", text_of({x()}), list);

  list = blanks(2);
  maniple::all_gather(list, x());
  show("all_gather", text_of({x()}), list);

  list = on(0, own(ranks).chunk(ranks));
  maniple::scatter(t = blank(1), list, /*src=*/0);
  show("scatter from rank 0", text_of(list), {t});

  maniple::reduce_scatter_tensor(t = blank(1), own(ranks));
  show("reduce_scatter (sum)", text_of({own(ranks)}), {t});

  maniple::all_to_all_single(t = blank(ranks), own(ranks));
  show("all_to_all", text_of({own(ranks)}), {t});

  // Asynchronous: the rank can compute meanwhile.
  t = x();
  auto work = maniple::all_reduce(t, maniple::ReduceOp::sum, {.async_op = true});
  const auto meanwhile = torch::ones({64, 64}).mm(torch::ones({64, 64})).sum().item<float>();
  work.wait();
  show("all_reduce (sum), asynchronous", text_of({x()}), {t});

  const bool right = meanwhile == 64.F * 64 * 64 && t[0].item<int>() == 5 * ranks * (ranks + 1);
  maniple::barrier();
  return right ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
