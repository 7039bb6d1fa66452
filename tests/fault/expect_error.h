// Catching what a fault does to a call, and reading the text as a person would.
#pragma once

#include <cctype>
#include <initializer_list>
#include <ostream>
#include <string>

#include <gtest/gtest.h>

#include "comm/base/format.h"
#include "harness/rank.h"
#include <maniple/comm/error.h>

namespace maniple::harness {

struct Caught {
  bool any = false;
  ErrorKind kind = ErrorKind::invalid_argument;
  std::string text = "no error";
  int lost_rank = -1;
  double took = 0;  ///< seconds until the error
  ErrorInfo info = {};

  bool is(ErrorKind wanted) const { return any && kind == wanted; }
  bool is_one_of(std::initializer_list<ErrorKind> kinds) const {
    for (const ErrorKind wanted : kinds) {
      if (is(wanted)) return true;
    }
    return false;
  }
};

inline std::ostream& operator<<(std::ostream& out, const Caught& caught) {
  return caught.any ? out << to_string(caught.kind) << ": " << caught.text : out << "no error";
}

/// The error of the library that the call throws; other exceptions pass through.
template <class Call>
Caught catch_error(Call call) {
  Caught caught;
  const double start = now_s();
  try {
    call();
  } catch (const PeerLost& error) {
    caught = {true, error.kind(), error.what(), error.rank(), 0, error.info()};
  } catch (const Error& error) {
    caught = {true, error.kind(), error.what(), -1, 0, error.info()};
  }
  caught.took = now_s() - start;
  return caught;
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Whether the text, after its "[all_reduce #12 world rank 3/8]", speaks of this rank.
inline bool names_rank(const std::string& text, int rank) {
  const std::size_t prefix = text.find("] ");
  const std::string message = prefix == std::string::npos ? text : text.substr(prefix + 2);
  const std::string number = std::to_string(rank);
  const auto in_word = [&](std::size_t at) {
    return at < message.size() && (std::isalnum(static_cast<unsigned char>(message[at])) != 0 || message[at] == '_');
  };
  for (std::size_t at = message.find(number); at != std::string::npos; at = message.find(number, at + 1)) {
    if ((at == 0 || !in_word(at - 1)) && !in_word(at + number.size())) return true;
  }
  return false;
}

/// Whether the text says which operation, which call of it, and on which rank.
inline bool names_call(const std::string& text, const std::string& op, const Rank& r) {
  const std::string start = format_text("[{} #", op);
  const std::string rest = format_text(" world rank {}/{}]", r.rank, r.size);
  for (std::size_t at = text.find(start); at != std::string::npos; at = text.find(start, at + 1)) {
    const std::size_t number = at + start.size();
    const std::size_t end = text.find_first_not_of("0123456789", number);
    if (end != std::string::npos && end != number && text.compare(end, rest.size(), rest) == 0) return true;
  }
  return false;
}

/// After the first failure every later call throws at once, with the same cause.
inline void expect_aborted_from_now_on(Rank& r) {
  int value = 0;
  Caught later = catch_error([&] { r.world->all_reduce(buffer_of(value)); });
  // Over a network a call may find all it needs in messages that were sent before the others heard of the failure; the
  // next one cannot.
  if (!later.any && r.world->transport().find("tcp") != std::string_view::npos) {
    later = catch_error([&] { r.world->all_reduce(buffer_of(value)); });
  }
  EXPECT_TRUE(later.is(ErrorKind::aborted)) << later;
  EXPECT_LT(later.took, 5.0);  // at once; a call that does not notice waits for its deadline
  EXPECT_NE(r.world->error(), nullptr);
}

}  // namespace maniple::harness
