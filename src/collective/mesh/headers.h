// The header round: every rank shows every other what it called, so that ranks that disagree learn it instead of
// waiting for each other.
//
// Algorithms in which some pairs exchange no data begin with it. It costs a header of 64 bytes each way for a pair and
// no waiting of its own: the headers go ahead of the data, and are compared while the data are awaited. Beyond 64 ranks
// only pairs at distances 1, 2, 4, ... compare; as these connect all ranks, any disagreement still meets one of them.
#pragma once

#include "transport/exchange.h"

namespace maniple {

/// Posts the messages; the algorithm's wait_all() completes them.
void post_headers(Exchange& exchange);

/// A message without payload to and from one rank.
void send_header(Exchange& exchange, int peer);
void recv_header(Exchange& exchange, int peer);

}  // namespace maniple
