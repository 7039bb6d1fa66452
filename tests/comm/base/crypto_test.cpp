#include "comm/base/crypto.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/crypto.h>

#include <maniple/comm/error.h>

namespace maniple {
namespace {

TEST(Crypto, FunctionsAreCalledByTheirNames) {
  EXPECT_EQ(MANIPLE_CRYPTO(CRYPTO_memcmp)("abc", "abc", 3), 0);
  EXPECT_NE(MANIPLE_CRYPTO(CRYPTO_memcmp)("abc", "abd", 3), 0);
}

TEST(Crypto, AFunctionThatThisSystemDoesNotHaveIsNamed) {
  try {
    crypto_function("EVP_of_another_release");
    FAIL() << "no error";
  } catch (const Unsupported& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("EVP_of_another_release"));
  }
}

}  // namespace
}  // namespace maniple
