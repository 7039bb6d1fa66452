// A test in which no variable of a rendezvous is set, whatever started it; those it sets end with it.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace maniple {

class CleanEnvironment : public testing::Test {
 protected:
  CleanEnvironment() {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "NODE_RANK",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "MANIPLE_JOB",
                             "MANIPLE_GENERATION",
                             "MANIPLE_STORE_HOSTED",
                             "MANIPLE_SECRET_FD",
                             "MANIPLE_SECRET_FILE",
                             "MANIPLE_ALLOW_NO_SECRET",
                             "MANIPLE_INTERFACE",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "SLURM_PROCID",
                             "SLURM_NTASKS",
                             "PMIX_NAMESPACE"}) {
      set(name, nullptr);
    }
  }
  ~CleanEnvironment() override {
    for (const auto& [name, value] : before_) put(name.c_str(), value ? value->c_str() : nullptr);
  }

  void set(const char* name, const char* value) {
    const char* old = std::getenv(name);
    before_.try_emplace(name, old == nullptr ? std::nullopt : std::optional<std::string>(old));
    put(name, value);
  }

 private:
  static void put(const char* name, const char* value) {
    if (value == nullptr) {
      ::unsetenv(name);
    } else {
      ::setenv(name, value, 1);
    }
  }
  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace maniple
