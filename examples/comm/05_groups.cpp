// Arranges the ranks as a grid of two columns: sums along the rows, then a ring of messages down each column.
//
//   build/bin/maniple run -n 4 build/bin/examples/comm/05_groups
#include <cstdio>
#include <exception>

#include <maniple/comm.h>

int main() try {
  const auto world = maniple::init();
  const int row_index = world->rank() / 2;
  const int column_index = world->rank() % 2;
  const auto row = world->split(row_index);
  const auto column = world->split(column_index);

  int row_sum = world->rank();
  row->all_reduce(maniple::buffer_of(row_sum));

  // Every rank sends down and receives from above. Posting both together cannot deadlock, whatever the order.
  const int below = (column->rank() + 1) % column->size();
  const int above = (column->rank() + column->size() - 1) % column->size();
  int from_above = -1;
  if (column->size() > 1) {
    const maniple::PointToPoint batch[] = {
        maniple::PointToPoint::send(maniple::buffer_of(row_sum), below),
        maniple::PointToPoint::recv(maniple::buffer_of(from_above), above),
    };
    for (const maniple::Work& work : column->batch_isend_irecv(batch)) work.wait();
  }

  std::printf("rank %d: row %d sums to %d, the row above to %d\n", world->rank(), row_index, row_sum, from_above);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
