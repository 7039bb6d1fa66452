// Shows every collective as a picture: the values of each rank before and after. Rank r starts with numbers that begin
// with the digit r + 1: 10, 11, ... on rank 0, 20, 21, ... on rank 1.
//
//   build/bin/maniple run -n 4 build/bin/examples/comm/02_collectives
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <maniple/comm.h>

namespace {

using maniple::buffer_of;
using maniple::ReduceOp;
using Numbers = std::vector<int>;

std::string text_of(const Numbers& numbers) {
  std::string text;
  for (const int number : numbers) text += (text.empty() ? "" : " ") + std::to_string(number);
  return text.empty() ? "-" : text;
}

class Pictures {
 public:
  explicit Pictures(maniple::ProcessGroup& group) : group_(group) {}

  /// Rank 0 collects one line from every rank and prints them below the title.
  void show(const char* title, const Numbers& before, const Numbers& after) {
    const auto befores = group_.gather_objects(text_of(before), 0);
    const auto afters = group_.gather_objects(text_of(after), 0);
    if (group_.rank() != 0) return;
    std::size_t width = 0;
    for (const auto& text : befores) width = std::max(width, text.size());
    std::printf("\n%s\n", title);
    for (int rank = 0; rank < group_.size(); ++rank) {
      std::printf("  rank %d  %-*s  ->  %s\n", rank, static_cast<int>(width), befores[rank].c_str(),
                  afters[rank].c_str());
    }
  }

 private:
  maniple::ProcessGroup& group_;
};

}  // namespace

int main() try {
  const auto world = maniple::init();
  const int ranks = world->size();
  const int last = ranks - 1;
  Pictures pictures(*world);

  // `own(n)`: this rank's n numbers. `blank(n)`: room for n numbers. Results for the root only are empty on other
  // ranks.
  const auto own = [&](int count) {
    Numbers numbers(count);
    for (int i = 0; i < count; ++i) numbers[i] = 10 * (world->rank() + 1) + i;
    return numbers;
  };
  const auto blank = [](int count) { return Numbers(count, 0); };
  const auto on = [&](int root, const Numbers& numbers) { return world->rank() == root ? numbers : Numbers{}; };

  Numbers before = own(2);
  Numbers after = before;
  world->broadcast(buffer_of(after), 0);
  pictures.show("broadcast from rank 0", before, after);

  after = on(last, blank(2));
  world->reduce(buffer_of(std::as_const(before)), buffer_of(after), last);
  pictures.show("reduce (sum) to the last rank", before, after);

  after = before;
  world->all_reduce(buffer_of(after));
  pictures.show("all_reduce (sum)", before, after);

  after = before;
  world->all_reduce(buffer_of(after), ReduceOp::max);
  pictures.show("all_reduce (max)", before, after);

  after = on(0, blank(2 * ranks));
  world->gather(buffer_of(std::as_const(before)), buffer_of(after), 0);
  pictures.show("gather to rank 0", before, after);

  after = blank(2 * ranks);
  world->all_gather(buffer_of(std::as_const(before)), buffer_of(after));
  pictures.show("all_gather", before, after);

  before = on(0, own(ranks));
  after = blank(1);
  world->scatter(buffer_of(std::as_const(before)), buffer_of(after), 0);
  pictures.show("scatter from rank 0", before, after);

  before = own(ranks);
  world->reduce_scatter(buffer_of(std::as_const(before)), buffer_of(after));
  pictures.show("reduce_scatter (sum)", before, after);

  after = blank(ranks);
  world->all_to_all(buffer_of(std::as_const(before)), buffer_of(after));
  pictures.show("all_to_all", before, after);

  world->barrier();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
