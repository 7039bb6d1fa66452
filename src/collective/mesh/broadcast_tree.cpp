// broadcast, tree: down a binomial tree from the root, chunk by chunk, each passed on as it comes.
//
// log2(n) steps; the root sends log2(n) B. Every rank receives B once.
#include "collective/mesh/algorithms.h"
#include "collective/mesh/headers.h"
#include "collective/mesh/memory.h"

#include <vector>

namespace maniple {

void mesh_broadcast_tree(Exchange& exchange, const Operation& operation) {
  const BinomialTree tree = binomial_tree(exchange.rank(), operation.root, exchange.size());
  const std::size_t element = operation.element();
  const Chunks chunks{{0, operation.count}, chunk_elements(operation.count, element)};
  post_headers(exchange);

  std::vector<Exchange::Ticket> receives;
  if (tree.parent >= 0) {
    for (std::size_t c = 0; c < chunks.count(); ++c) {
      receives.push_back(exchange.recv(tree.parent, bytes_at(operation.out, element, chunks.at(c))));
    }
  }
  for (std::size_t c = 0; c < chunks.count(); ++c) {
    if (tree.parent >= 0) exchange.wait(receives[c]);
    // The largest subtree first: it has the longest way to go.
    for (auto child = tree.children.rbegin(); child != tree.children.rend(); ++child) {
      exchange.send(*child, bytes_at(operation.out, element, chunks.at(c)));
    }
  }
  exchange.wait_all();
}

}  // namespace maniple
