// The caller's mistakes: InvalidArgument before anything is sent, and the group stays usable.
#include <maniple/comm/error.h>

#include "multirank/matrix.h"

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
    r.world->all_gather(ConstBuffer{x.data(), counts[r.rank], DType::float32}, Buffer{y.data(), total, DType::float32}, counts);
  });
}

TEST_P(Arguments, RegisteredMemoryThatCannotBe) {
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
