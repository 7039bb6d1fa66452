// Combines lambdas into one visitor: std::visit(overloaded{[](const A&) { ... }, [](const B&) { ... }}, variant).
#pragma once

namespace maniple {

template <class... Functions>
struct overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
overloaded(Functions...) -> overloaded<Functions...>;  // Clang before 17 needs this

}  // namespace maniple
