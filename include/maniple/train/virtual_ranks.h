// Virtual ranks: the fixed number of batches of which every training step consists, whatever the number of processes.
//
//   maniple::Trainer trainer(net, optimizer, {.epochs = 3, .virtual_ranks = 8});   // the same weights on 1 to 8 ranks
//
// Each rank computes the batches of a contiguous range of virtual ranks. docs/elastic.md has the rules under which the
// results do not depend on the number of ranks.
#pragma once

#include <maniple/export.h>

namespace MANIPLE_API maniple {

/// The virtual ranks of one rank: `first`, `first` + 1, ..., `first` + `count` - 1, of `total`.
struct VirtualRanks {
  int total = 1;
  int first = 0;
  int count = 1;

  /// The share of `rank` among `ranks`. Shares differ by one virtual rank at most; the first ranks have the larger
  /// shares. Throws InvalidArgument if there are more ranks than virtual ranks.
  static VirtualRanks of(int total, int rank, int ranks);
  bool operator==(const VirtualRanks&) const = default;
};

}  // namespace maniple
