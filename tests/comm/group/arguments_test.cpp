// The caller's mistakes: InvalidArgument before anything is sent, and the group stays usable.
#include <functional>
#include <limits>

#include <maniple/comm/error.h>

#include "comm/group/matrix.h"

namespace maniple::harness {
namespace {

class Arguments : public Operations {
 protected:
  /// Runs the mistake on every rank, then a real operation.
  void run_mistake(const std::function<void(Rank&)>& mistake) {
    run([&](Rank& r) {
      for (int round = 0; round < 2; ++round) {
        EXPECT_THROW(mistake(r), InvalidArgument);
        int value = 1;
        r.world->all_reduce(buffer_of(value));
        EXPECT_EQ(value, r.size);
        EXPECT_EQ(r.world->error(), nullptr);
      }
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Few, Arguments, testing::ValuesIn(places({1, 3})), name_of);

TEST_P(Arguments, RootOutOfRange) {
  run_mistake([](Rank& r) {
    float x = 1;
    r.world->broadcast(buffer_of(x), r.size);
  });
}

TEST_P(Arguments, NegativeRoot) {
  run_mistake([](Rank& r) {
    float x = 1, y = 0;
    r.world->reduce(buffer_of(x), buffer_of(y), -1);
  });
}

TEST_P(Arguments, NullBufferWithElements) {
  run_mistake([](Rank& r) { r.world->all_reduce(Buffer{nullptr, 3, DType::float32}); });
}

TEST_P(Arguments, NullBufferWithoutElementsIsFine) {
  run([](Rank& r) {
    r.world->all_reduce(Buffer{nullptr, 0, DType::float32});
    r.world->broadcast(Buffer{nullptr, 0, DType::int8}, 0);
    r.world->all_gather(ConstBuffer{nullptr, 0, DType::int8}, Buffer{nullptr, 0, DType::int8});
  });
}

TEST_P(Arguments, DifferentDtypesOfInputAndOutput) {
  run_mistake([](Rank& r) {
    float x = 1;
    double y = 0;
    r.world->all_reduce(buffer_of(x), buffer_of(y));
  });
}

TEST_P(Arguments, DifferentCountsOfInputAndOutput) {
  run_mistake([](Rank& r) {
    std::vector<float> x(4), y(5);
    r.world->all_reduce(buffer_of(x), buffer_of(y));
  });
}

TEST_P(Arguments, OutputThatIsNotAllParts) {
  run_mistake([](Rank& r) {
    std::vector<float> x(4), y(4 * r.size + 1);
    r.world->all_gather(buffer_of(x), buffer_of(y));
  });
}

TEST_P(Arguments, ReduceScatterInputThatIsNotAllParts) {
  run_mistake([](Rank& r) {
    std::vector<float> x(4 * r.size + 1), y(4);
    r.world->reduce_scatter(buffer_of(x), buffer_of(y));
  });
}

TEST_P(Arguments, ListOfCountsOfTheWrongLength) {
  run_mistake([](Rank& r) {
    std::vector<float> x(4), y(4 * (r.size + 1));
    r.world->all_gather(buffer_of(x), buffer_of(y), std::vector<std::size_t>(r.size + 1, 4));
  });
}

TEST_P(Arguments, CountsThatDoNotFitTheBuffers) {
  run_mistake([](Rank& r) {
    std::vector<float> x(4), y(4 * r.size);
    r.world->all_gather(buffer_of(x), buffer_of(y), std::vector<std::size_t>(r.size, 3));
  });
}

TEST_P(Arguments, CountsWhoseSumWrapsAround) {
  run_mistake([](Rank& r) {
    // The first is what 0 - 1 gives.
    std::vector<std::size_t> counts(r.size, 2);
    counts[0] = static_cast<std::size_t>(-1);
    std::vector<float> x(2), y(2 * r.size);
    const std::size_t total = counts[0] + 2 * static_cast<std::size_t>(r.size - 1);
    r.world->all_gather(ConstBuffer{x.data(), counts[r.rank], DType::float32}, Buffer{y.data(), total, DType::float32},
                        counts);
  });
}

TEST_P(Arguments, InvalidRegisteredMemory) {
  run_mistake([](Rank& r) { r.world->allocate(static_cast<std::size_t>(-1)); });
}

TEST_P(Arguments, AllToAllThatDoesNotDivide) {
  run_mistake([](Rank& r) {
    std::vector<float> x(2 * r.size + 1), y(2 * r.size);
    r.world->all_to_all(buffer_of(x), buffer_of(y));
  });
}

TEST_P(Arguments, BitwiseReductionOfFloats) {
  run_mistake([](Rank& r) {
    float x = 1;
    r.world->all_reduce(buffer_of(x), ReduceOp::band);
  });
}

TEST_P(Arguments, AverageOfBooleans) {
  run_mistake([](Rank& r) {
    bool x = true;
    r.world->all_reduce(buffer_of(x), ReduceOp::avg);
  });
}

TEST_P(Arguments, FractionalFactorForIntegers) {
  run_mistake([](Rank& r) {
    int x = 1;
    r.world->all_reduce(buffer_of(x), ReduceOp::premultiplied(0.5));
  });
}

TEST_P(Arguments, PeerOutOfRange) {
  run_mistake([](Rank& r) {
    int x = 1;
    r.world->send(buffer_of(x), r.size);
  });
}

TEST_P(Arguments, NegativePeerOfASend) {
  run_mistake([](Rank& r) {
    int x = 1;
    r.world->send(buffer_of(x), kAnySource);
  });
}

// What 0 - 1 gives; what makes 0 bytes of eight each; what fits as bytes, but not as parts of several ranks.
const std::size_t kTooMany[] = {static_cast<std::size_t>(-1), std::size_t{1} << 61, (std::size_t{1} << 48) + 1};

TEST_P(Arguments, ElementCountBeyondTheLimit) {
  run([](Rank& r) {
    ProcessGroup& w = *r.world;
    std::byte memory[64] = {};
    for (int d = 0; d < kDTypeCount; ++d) {
      for (const std::size_t count : kTooMany) {
        const Buffer many{memory, count, static_cast<DType>(d)};
        const Buffer all{memory, count * static_cast<std::size_t>(r.size),
                         static_cast<DType>(d)};  // as a caller would reckon it
        const auto op = many.dtype == DType::bool8 ? ReduceOp::max : ReduceOp::sum;
        const PointToPoint batch[] = {PointToPoint::send(many, 0)};
        const CallOptions later{.async_op = true};
        const std::function<void()> calls[] = {
            [&] { w.broadcast(many, 0); },
            [&] { w.broadcast(many, 0, later); },
            [&] { w.reduce(many, many, 0, op); },
            [&] { w.reduce(many, many, 0, op, later); },
            [&] { w.all_reduce(many, op); },
            [&] { w.all_reduce(many, op, later); },
            [&] { w.all_reduce(ConstBuffer(many), many, op); },
            [&] { w.all_reduce_coalesced(std::span(&many, 1), op); },
            [&] { w.all_reduce_coalesced(std::span(&many, 1), op, later); },
            [&] { w.gather(many, all, 0); },
            [&] { w.gather(many, all, 0, {}, later); },
            [&] { w.all_gather(many, all); },
            [&] { w.all_gather(many, all, {}, later); },
            [&] { w.scatter(all, many, 0); },
            [&] { w.scatter(all, many, 0, {}, later); },
            [&] { w.reduce_scatter(all, many, op); },
            [&] { w.reduce_scatter(all, many, op, {}, later); },
            [&] { w.all_to_all(many, Buffer{memory + 32, many.count, many.dtype}); },
            [&] { w.all_to_all(many, Buffer{memory + 32, many.count, many.dtype}, {}, {}, later); },
            [&] { w.send(many, 0); },
            [&] { w.isend(many, 0); },
            [&] { w.recv(many, 0); },
            [&] { w.irecv(many, 0); },
            [&] { w.batch_isend_irecv(batch); },
        };
        for (std::size_t i = 0; i < std::size(calls); ++i) {
          EXPECT_THROW(calls[i](), InvalidArgument)
              << "call " << i << " of " << count << " x " << to_string(many.dtype);
        }
      }
    }
    int value = 1;
    w.all_reduce(buffer_of(value));
    EXPECT_EQ(value, r.size);
  });
}

TEST_P(Arguments, SumOfPartsBeyondTheLimit) {
  run_mistake([](Rank& r) {
    const std::size_t each = (std::size_t{1} << 48) / static_cast<std::size_t>(r.size) + 1;
    std::byte memory[8] = {};
    r.world->gather({memory, each, DType::uint8}, Buffer{memory, each * static_cast<std::size_t>(r.size), DType::uint8},
                    0);
  });
}

TEST_P(Arguments, UnknownReduceOpOrDType) {
  run([](Rank& r) {
    ProcessGroup& w = *r.world;
    std::vector<float> x(4), all(4 * r.size);
    for (const int number : {ReduceOp::kKindCount, 99, 255}) {
      const ReduceOp op(static_cast<ReduceOp::Kind>(number));
      EXPECT_THROW(w.all_reduce(buffer_of(x), op), InvalidArgument);
      EXPECT_THROW(w.all_reduce(buffer_of(x), op, {.async_op = true}), InvalidArgument);
      EXPECT_THROW(w.all_reduce_coalesced(std::vector<Buffer>{buffer_of(x)}, op), InvalidArgument);
      EXPECT_THROW(w.reduce(buffer_of(x), buffer_of(x), 0, op), InvalidArgument);
      EXPECT_THROW(w.reduce_scatter(buffer_of(all), buffer_of(x), op), InvalidArgument);
    }
    for (const int number : {kDTypeCount, 99, 255}) {
      const Buffer odd{x.data(), 1, static_cast<DType>(number)};
      const Buffer parts{all.data(), static_cast<std::size_t>(r.size), odd.dtype};
      EXPECT_THROW(w.all_reduce(odd), InvalidArgument);
      EXPECT_THROW(w.reduce(odd, odd, 0), InvalidArgument);
      EXPECT_THROW(w.broadcast(odd, 0), InvalidArgument);
      EXPECT_THROW(w.gather(odd, parts, 0), InvalidArgument);
      EXPECT_THROW(w.all_gather(odd, parts), InvalidArgument);
      EXPECT_THROW(w.scatter(parts, odd, 0), InvalidArgument);
      EXPECT_THROW(w.reduce_scatter(parts, odd), InvalidArgument);
      EXPECT_THROW(w.all_to_all(parts, Buffer{x.data(), parts.count, odd.dtype}), InvalidArgument);
      EXPECT_THROW(w.send(odd, 0), InvalidArgument);
      EXPECT_THROW(w.recv(odd, 0), InvalidArgument);
    }
    int value = 1;
    w.all_reduce(buffer_of(value));
    EXPECT_EQ(value, r.size);
  });
}

TEST_P(Arguments, NegativeTag) {
  run_mistake([](Rank& r) {
    int x = 1;
    EXPECT_THROW(r.world->isend(buffer_of(x), 0, -7), InvalidArgument);
    EXPECT_THROW(r.world->irecv(buffer_of(x), kAnySource, -1), InvalidArgument);
    EXPECT_THROW(r.world->recv(buffer_of(x), 0, -1), InvalidArgument);
    r.world->send(buffer_of(x), 0, -1);
  });
}

TEST_P(Arguments, InvalidTimeOuts) {
  for (const double seconds : {-1.0, -1e300, std::numeric_limits<double>::quiet_NaN()}) {
    const CallOptions call{.timeout = Seconds(seconds)};
    run_mistake([&call](Rank& r) {
      int x = 1;
      EXPECT_THROW(r.world->barrier({.timeout = call.timeout, .async_op = true}), InvalidArgument);
      EXPECT_THROW(r.world->all_gather_objects("x", call), InvalidArgument);
      EXPECT_THROW(r.world->irecv(buffer_of(x), 0, 0, nullptr, call), InvalidArgument);
      EXPECT_THROW(r.world->split(0, 0, {}, call), InvalidArgument);
      r.world->all_reduce(buffer_of(x), ReduceOp::sum, call);
    });
  }
}

TEST_P(Arguments, TextNamesWhatIsWrong) {
  run([](Rank& r) {
    float x = 1;
    try {
      r.world->broadcast(buffer_of(x), 77);
      ADD_FAILURE() << "no error";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("77"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("broadcast"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace maniple::harness
