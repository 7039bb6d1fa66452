// The operations on tensors: every one against its definition, with tensors that are contiguous and that are not, now
// and later.
#include <atomic>
#include <cstdlib>

#include "comm/base/format.h"
#include "fault/expect_error.h"
#include "harness/run_ranks.h"
#include <maniple/dist.h>

namespace maniple::harness::dist_test {
namespace {

/// How the elements of a tensor may lie.
enum class Form { plain, transposed, every_second };

torch::Tensor make(Form form, torch::IntArrayRef sizes, torch::ScalarType dtype) {
  switch (form) {
    case Form::plain: return torch::zeros(sizes, dtype);
    case Form::transposed: return torch::zeros({sizes[1], sizes[0]}, dtype).t();
    case Form::every_second: return torch::zeros({sizes[0], 2 * sizes[1]}, dtype).slice(1, 0, 2 * sizes[1], 2);
  }
  return {};
}

struct Setting {
  int n;
  Form form;
  bool async_op;
  torch::ScalarType dtype;
};

class DistOperations : public testing::TestWithParam<Setting> {
 protected:
  static constexpr std::int64_t kRows = 3, kColumns = 5;

  /// A tensor of the setting's form whose elements tell who made it.
  static torch::Tensor from(int rank, int extra = 0) {
    torch::Tensor tensor = make(GetParam().form, {kRows, kColumns}, GetParam().dtype);
    tensor.copy_(expected(rank, extra));
    return tensor;
  }
  static torch::Tensor expected(int rank, int extra = 0) {
    const torch::Tensor values = torch::arange(kRows * kColumns).view({kRows, kColumns}) % 7 + 3 * rank + extra;
    return (GetParam().dtype == torch::kBool ? values % 2 : values).to(GetParam().dtype);
  }
  static torch::Tensor empty() { return make(GetParam().form, {kRows, kColumns}, GetParam().dtype); }
  static std::vector<torch::Tensor> list(int n) {
    std::vector<torch::Tensor> result;
    for (int i = 0; i < n; ++i) result.push_back(empty());
    return result;
  }
  static DistOptions on(Rank& r) { return {.group = r.world, .async_op = GetParam().async_op}; }
  static void run(const std::function<void(Rank&)>& body) { run_ranks({.n = GetParam().n}, body); }
};

void expect_equal(const torch::Tensor& actual, const torch::Tensor& expected) {
  EXPECT_TRUE(torch::equal(actual, expected)) << actual << "\ninstead of\n" << expected;
}

TEST_P(DistOperations, Broadcast) {
  run([](Rank& r) {
    for (int root = 0; root < r.size; ++root) {
      const torch::Tensor x = from(r.rank);
      broadcast(x, root, on(r)).wait();
      expect_equal(x, expected(root));
    }
  });
}

TEST_P(DistOperations, ReduceAndAllReduce) {
  run([](Rank& r) {
    torch::Tensor sum = expected(0);
    torch::Tensor most = expected(0);
    for (int other = 1; other < r.size; ++other) {
      sum = GetParam().dtype == torch::kBool ? sum.logical_or(expected(other)) : sum + expected(other);
      most =
          GetParam().dtype == torch::kBool ? most.logical_or(expected(other)) : torch::maximum(most, expected(other));
    }
    const torch::Tensor x = from(r.rank);
    all_reduce(x, ReduceOp::sum, on(r)).wait();
    expect_equal(x, sum);
    const torch::Tensor y = from(r.rank);
    reduce(y, r.size - 1, ReduceOp::max, on(r)).wait();
    expect_equal(y, r.rank == r.size - 1 ? most : expected(r.rank));
    const torch::Tensor z = from(r.rank);
    const torch::Tensor w = from(r.rank);
    all_reduce_coalesced({z, w}, ReduceOp::max, on(r)).wait();
    expect_equal(z, most);
    expect_equal(w, most);
  });
}

TEST_P(DistOperations, GatherAndAllGather) {
  run([](Rank& r) {
    const int root = r.size - 1;
    auto here = r.rank == root ? list(r.size) : std::vector<torch::Tensor>();
    gather(from(r.rank), here, root, on(r)).wait();
    for (std::size_t i = 0; i < here.size(); ++i) expect_equal(here[i], expected(static_cast<int>(i)));

    auto all = list(r.size);
    all_gather(all, from(r.rank), on(r)).wait();
    for (int i = 0; i < r.size; ++i) expect_equal(all[static_cast<std::size_t>(i)], expected(i));

    const torch::Tensor into = make(GetParam().form, {r.size * kRows, kColumns}, GetParam().dtype);
    all_gather_into_tensor(into, from(r.rank), on(r)).wait();
    for (int i = 0; i < r.size; ++i) expect_equal(into.narrow(0, i * kRows, kRows), expected(i));
  });
}

TEST_P(DistOperations, AllGatherOfDifferentSizes) {
  run([](Rank& r) {
    std::vector<torch::Tensor> all;
    for (int i = 0; i < r.size; ++i) all.push_back(torch::zeros({i + 1}, torch::kInt32));
    all_gather(all, torch::full({r.rank + 1}, r.rank + 10, torch::kInt32), on(r)).wait();
    for (int i = 0; i < r.size; ++i)
      expect_equal(all[static_cast<std::size_t>(i)], torch::full({i + 1}, i + 10, torch::kInt32));
  });
}

TEST_P(DistOperations, ScatterAndReduceScatter) {
  run([](Rank& r) {
    std::vector<torch::Tensor> parts;
    for (int i = 0; i < r.size; ++i) parts.push_back(from(i, 1));
    const torch::Tensor x = empty();
    scatter(x, r.rank == 0 ? parts : std::vector<torch::Tensor>(), 0, on(r)).wait();
    expect_equal(x, expected(r.rank, 1));

    const auto times_n = [&](const torch::Tensor& part) {
      return GetParam().dtype == torch::kBool ? part : (part * r.size).to(GetParam().dtype);
    };
    const torch::Tensor y = empty();
    reduce_scatter(y, parts, ReduceOp::sum, on(r)).wait();
    expect_equal(y, times_n(expected(r.rank, 1)));

    const torch::Tensor all = make(GetParam().form, {r.size * kRows, kColumns}, GetParam().dtype);
    for (int i = 0; i < r.size; ++i) all.narrow(0, i * kRows, kRows).copy_(expected(i, 1));
    const torch::Tensor z = empty();
    reduce_scatter_tensor(z, all, ReduceOp::sum, on(r)).wait();
    expect_equal(z, times_n(expected(r.rank, 1)));
  });
}

TEST_P(DistOperations, AllToAll) {
  run([](Rank& r) {
    std::vector<torch::Tensor> out = list(r.size), in;
    for (int i = 0; i < r.size; ++i) in.push_back(from(r.rank, i));
    all_to_all(out, in, on(r)).wait();
    for (int i = 0; i < r.size; ++i) expect_equal(out[static_cast<std::size_t>(i)], expected(i, r.rank));

    // Rank r sends i + 1 rows to rank i.
    std::vector<std::int64_t> to_each, from_each(static_cast<std::size_t>(r.size), r.rank + 1);
    std::int64_t rows = 0;
    for (int i = 0; i < r.size; ++i) rows += to_each.emplace_back(i + 1);
    const torch::Tensor input = make(GetParam().form, {rows, 2}, GetParam().dtype);
    const torch::Tensor output = make(GetParam().form, {r.size * (r.rank + 1), 2}, GetParam().dtype);
    input.fill_(r.rank % 2);
    all_to_all_single(output, input, from_each, to_each, on(r)).wait();
    for (int i = 0; i < r.size; ++i) {
      expect_equal(output.narrow(0, i * (r.rank + 1), r.rank + 1),
                   torch::full({r.rank + 1, 2}, i % 2, GetParam().dtype));
    }
    const torch::Tensor even_out = make(GetParam().form, {r.size, 2}, GetParam().dtype);
    all_to_all_single(even_out, make(GetParam().form, {r.size, 2}, GetParam().dtype).fill_(r.rank % 2), {}, {}, on(r))
        .wait();
    for (int i = 0; i < r.size; ++i) expect_equal(even_out[i], torch::full({2}, i % 2, GetParam().dtype));
  });
}

TEST_P(DistOperations, SendAndReceive) {
  run([](Rank& r) {
    if (r.size == 1) return;
    const int next = (r.rank + 1) % r.size, before = (r.rank + r.size - 1) % r.size;
    const torch::Tensor x = empty(), y = empty(), z = empty();
    if (GetParam().async_op) {
      const Work sent = isend(from(r.rank), next, 5, on(r));
      irecv(x, before, 5, on(r)).wait();
      sent.wait();
    } else if (r.rank % 2 == 0) {
      send(from(r.rank), next, 5, on(r));
      EXPECT_EQ(recv(x, before, 5, on(r)), before);
    } else {
      EXPECT_EQ(recv(x, before, 5, on(r)), before);
      send(from(r.rank), next, 5, on(r));
    }
    expect_equal(x, expected(before));
    for (const Work& work : batch_isend_irecv({P2POp::irecv(y, before), P2POp::isend(from(r.rank, 1), next),
                                               P2POp::irecv(z, next, 9), P2POp::isend(from(r.rank, 2), before, 9)},
                                              on(r))) {
      work.wait();
    }
    expect_equal(y, expected(before, 1));
    expect_equal(z, expected(next, 2));
  });
}

std::vector<Setting> settings() {
  std::vector<Setting> result;
  for (int n = 1; n <= 4; ++n) {
    for (const Form form : {Form::plain, Form::transposed, Form::every_second}) {
      for (const bool async_op : {false, true}) result.push_back({n, form, async_op, torch::kFloat32});
    }
  }
  for (const auto dtype : {torch::kFloat64, torch::kFloat16, torch::kBFloat16, torch::kInt8, torch::kInt16,
                           torch::kInt32, torch::kInt64, torch::kUInt8, torch::kBool}) {
    result.push_back({2, Form::transposed, false, dtype});
  }
  return result;
}
std::string setting_name(const testing::TestParamInfo<Setting>& setting) {
  const char* forms[] = {"Plain", "Transposed", "EverySecond"};
  return format_text("{}Ranks{}{}{}", setting.param.n, forms[static_cast<int>(setting.param.form)],
                     setting.param.async_op ? "Async" : "Sync", c10::toString(setting.param.dtype));
}
INSTANTIATE_TEST_SUITE_P(Dist, DistOperations, testing::ValuesIn(settings()), setting_name);

TEST(Dist, ComplexTensorsAreAddedNotCompared) {
  run_ranks({.n = 2}, [](Rank& r) {
    const c10::complex<float> unit(1.0f, static_cast<float>(r.rank));
    const torch::Tensor x = torch::full({2, 2}, unit, torch::kComplexFloat).t();
    all_reduce(x, ReduceOp::sum, {.group = r.world});
    expect_equal(x, torch::full({2, 2}, c10::complex<float>(2.0f, 1.0f), torch::kComplexFloat));
    const Caught caught = catch_error([&] { all_reduce(x, ReduceOp::max, {.group = r.world}); });
    EXPECT_TRUE(caught.is(ErrorKind::invalid_argument) && contains(caught.text, "complex")) << caught;
  });
}

TEST(Dist, AnAverageOfIntegersIsWarnedOfOnce) {
  testing::internal::CaptureStderr();
  run_ranks({.n = 2}, [](Rank& r) {
    for (int i = 0; i < 2; ++i) {
      const torch::Tensor whole = torch::full({1}, 1 + r.rank, torch::kInt32);
      all_reduce(whole, ReduceOp::avg, {.group = r.world});
      EXPECT_EQ(whole.item<int>(), 1);
    }
  });
  const std::string log = testing::internal::GetCapturedStderr(), warning = "avg of an integer tensor";
  EXPECT_NE(log.find(warning), std::string::npos) << log;
  EXPECT_EQ(log.find(warning), log.rfind(warning)) << log;
}

TEST(Dist, NothingIsRecordedAndEmptyTensorsWork) {
  run_ranks({.n = 3}, [](Rank& r) {
    const torch::Tensor leaf = torch::ones({2, 3}, torch::requires_grad());
    all_reduce(leaf, ReduceOp::sum, {.group = r.world});
    expect_equal(leaf.detach(), torch::full({2, 3}, 3.0f));
    const torch::Tensor strided = torch::ones({3, 2}, torch::requires_grad()).t();
    all_reduce(strided, ReduceOp::sum, {.group = r.world, .async_op = true}).wait();
    expect_equal(strided.detach(), torch::full({2, 3}, 3.0f));
    const torch::Tensor nothing = torch::empty({0, 4});
    all_reduce(nothing, ReduceOp::sum, {.group = r.world});
    std::vector<torch::Tensor> list(3, torch::empty({0}));
    all_gather(list, torch::empty({0}), {.group = r.world});
    broadcast(torch::scalar_tensor(1.5), 0, {.group = r.world});
  });
}

// A tensor without another owner must live until the work is done.
TEST(Dist, TensorsLiveUntilTheWorkIsDone) {
  run_ranks({.n = 2}, [](Rank& r) {
    std::vector<Work> works;
    // Shared: the last to hold the tensor may be the group's thread, a moment after wait() has returned.
    const auto freed = std::make_shared<std::atomic<bool>>(false);
    {
      auto* memory = static_cast<float*>(std::malloc(1 << 20));
      const torch::Tensor x = torch::from_blob(memory, {1 << 18}, [freed](void* p) {
        *freed = true;
        std::free(p);
      });
      x.fill_(1);
      r.phase("both are about to start");
      if (r.rank == 0) works.push_back(all_reduce(x, ReduceOp::sum, {.group = r.world, .async_op = true}));
    }
    if (r.rank == 0) {
      EXPECT_FALSE(*freed) << "rank 1 has not called yet";
    }
    r.phase("rank 0 has looked");
    if (r.rank == 1) all_reduce(torch::ones({1 << 18}), ReduceOp::sum, {.group = r.world});
    for (const Work& work : works) work.wait();
  });
}

TEST(Dist, UnusableTensorsAreNamed) {
  run_ranks({.n = 1}, [](Rank& r) {
    const auto text = [&](const torch::Tensor& tensor) {
      const Caught caught = catch_error([&] { all_reduce(tensor, ReduceOp::sum, {.group = r.world}); });
      EXPECT_TRUE(caught.is(ErrorKind::invalid_argument)) << caught;
      EXPECT_TRUE(contains(caught.text, "all_reduce: tensor is")) << caught;
      return caught.text;
    };
    EXPECT_TRUE(contains(text(torch::Tensor()), "undefined"));
    EXPECT_TRUE(contains(text(torch::ones({2, 2}).to_sparse()), "sparse"));
    EXPECT_TRUE(contains(text(torch::empty({2}, torch::kMeta)), "meta"));
    EXPECT_TRUE(contains(text(torch::quantize_per_tensor(torch::ones({2}), 0.1, 0, torch::kQInt8)), "quantized"));
    const Caught list = catch_error([&] { all_gather({torch::Tensor()}, torch::ones({2}), {.group = r.world}); });
    EXPECT_TRUE(contains(list.text, "all_gather: tensor_list[0] is an undefined tensor")) << list;
    const Caught count = catch_error([&] { all_gather({}, torch::ones({2}), {.group = r.world}); });
    EXPECT_TRUE(contains(count.text, "0 tensors for 1 ranks")) << count;
    const Caught mixed =
        catch_error([&] { all_gather({torch::ones({2}, torch::kInt32)}, torch::ones({2}), {.group = r.world}); });
    EXPECT_TRUE(contains(mixed.text, "different dtypes")) << mixed;
    const Caught root = catch_error([&] { gather(torch::ones({2}), {}, 3, {.group = r.world}); });
    EXPECT_TRUE(contains(root.text, "dst is 3")) << root;
  });
}

TEST(Dist, ErrorsNameTheCallersLine) {
  run_ranks({.n = 2}, [](Rank& r) {
    const Caught caught = catch_error([&] {
      if (r.rank == 0) all_reduce(torch::ones({2}), ReduceOp::sum, {.group = r.world});
      if (r.rank == 1) all_reduce(torch::ones({3}), ReduceOp::sum, {.group = r.world});
    });
    EXPECT_TRUE(caught.is(ErrorKind::mismatch)) << caught;
    EXPECT_TRUE(contains(caught.text, "dist_test.cpp")) << caught;
  });
}

TEST(Dist, TheDefaultGroup) {
  run_ranks({.n = 3, .as = As::processes, .init = false, .limit = std::chrono::seconds(180)}, [](Rank& r) {
    EXPECT_TRUE(is_available());
    EXPECT_FALSE(is_initialized());
    EXPECT_TRUE(is_backend_available("native"));
    EXPECT_FALSE(is_backend_available("pigeon"));
    const Caught none = catch_error([] { all_reduce(torch::ones({1})); });
    EXPECT_TRUE(contains(none.text, "init_process_group")) << none;

    init_process_group(r.init_options());
    EXPECT_TRUE(is_initialized());
    EXPECT_EQ(get_rank(), r.rank);
    EXPECT_EQ(get_world_size(), 3);
    EXPECT_EQ(get_backend(), "native");
    const Caught twice = catch_error([&] { init_process_group(r.init_options()); });
    EXPECT_TRUE(contains(twice.text, "before")) << twice;

    const torch::Tensor x = torch::full({4}, r.rank + 1.0f);
    all_reduce(x);
    expect_equal(x, torch::full({4}, 6.0f));
    const auto pair = new_group({2, 0});
    ASSERT_NE(pair, nullptr);
    EXPECT_EQ(pair->is_member(), r.rank != 1);
    if (pair->is_member()) {
      EXPECT_EQ(get_world_size(pair), 2);
      EXPECT_EQ(get_group_rank(pair, 2), 0);
      EXPECT_EQ(get_global_rank(pair, 1), 0);
      EXPECT_THROW(get_group_rank(pair, 1), InvalidArgument);
      const torch::Tensor y = torch::full({2}, static_cast<float>(r.rank));
      broadcast(y, 2, {.group = pair});
      expect_equal(y, torch::full({2}, 2.0f));
    }
    EXPECT_EQ(broadcast_object(r.rank == 1 ? "hello" : "", 1), "hello");
    EXPECT_EQ(all_gather_object(std::string(static_cast<std::size_t>(r.rank), 'x')),
              (std::vector<std::string>{"", "x", "xx"}));
    EXPECT_EQ(gather_object(std::to_string(r.rank), 2).size(), r.rank == 2 ? 3u : 0u);
    EXPECT_EQ(scatter_object(r.rank == 0 ? std::vector<std::string>{"a", "b", "c"} : std::vector<std::string>{}),
              std::string(1, static_cast<char>('a' + r.rank)));
    barrier();
    monitored_barrier();
    barrier({.async_op = true}).wait();
    destroy_process_group();
    EXPECT_FALSE(is_initialized());
    destroy_process_group();

    // Once more, in another place.
    r.phase("all have left");
    InitOptions again = r.init_options();
    again.init_method += "-again";
    init_process_group(again);
    barrier();
    // Left to the end of the program.
  });
}

}  // namespace
}  // namespace maniple::harness::dist_test
