// What the fuzzers call: any bytes may come in; only the library's own typed errors may come out.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace maniple::fuzz {

/// As an acceptor and as a dialler would read them, in one piece and byte by byte.
void handshake(std::string_view bytes);
/// As a store's server would read them from two clients, and as a client would read a server's replies.
void store(std::string_view bytes);

/// Well-formed inputs to begin with.
std::vector<std::string> handshake_seeds();
std::vector<std::string> store_seeds();

}  // namespace maniple::fuzz
