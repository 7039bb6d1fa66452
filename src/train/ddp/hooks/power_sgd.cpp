// PowerSGD; the header describes the algorithm.
//
// A *matrix* is a compressed gradient of shape n x m; P is n x r, Q is m x r. The first message holds all Ps of the
// bucket, followed by the gradients that are not compressed; the second holds all Qs. Cost for a bucket: two
// all_reduces, of r (n + m) numbers per matrix and of the other gradients unchanged; about 6 n m r multiplications.
#include <maniple/train/power_sgd.h>

#include <cmath>
#include <limits>
#include <vector>

#include "comm/base/check.h"
#include "train/checkpoint/named_state.h"
#include "train/data/split_mix.h"
#include "train/ddp/hooks/hook_parts.h"
#include "train/tensor/device.h"
#include "train/tensor/public_call.h"
#include <maniple/dist.h>

namespace maniple {
namespace {

using Column = std::vector<double>;

double product(const Column& a, const Column& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Subtracts the projection on earlier columns; twice, because the first pass leaves its own rounding error.
void project(Column& column, const std::vector<Column>& before) {
  for (int pass = 0; pass < 2; ++pass) {
    for (const Column& one : before) {
      const double along = product(one, column);
      for (std::size_t i = 0; i < column.size(); ++i) column[i] -= along * one[i];
    }
  }
}

template <class T>
void orthogonalize_as(T* data, std::size_t rows, std::size_t columns, double epsilon, std::uint64_t seed) {
  const double rounding = sizeof(T) == 4 ? 1e-6 : 1e-14;
  SplitMix random(seed);
  std::vector<Column> units;
  for (std::size_t c = 0; c < columns; ++c) {
    Column column(rows);
    for (std::size_t r = 0; r < rows; ++r) column[r] = static_cast<double>(data[r * columns + c]);
    const double before = std::sqrt(product(column, column));
    project(column, units);
    double length = std::sqrt(product(column, column));
    while (!(length > rounding * before)) {
      for (double& x : column) x = 2 * random.unit() - 1;
      project(column, units);
      length = std::sqrt(product(column, column));
      if (length > 1e-3) break;
    }
    for (double& x : column) x /= length;
    for (std::size_t r = 0; r < rows; ++r) {
      data[r * columns + c] = static_cast<T>(column[r] * (length / (length + epsilon)));
    }
    units.push_back(std::move(column));
  }
}

}  // namespace

void orthogonalize_by_tensors(const torch::Tensor& matrix, double epsilon) {
  const double rounding = matrix.scalar_type() == torch::kFloat64 ? 1e-14 : 1e-6;
  const std::int64_t rows = matrix.size(0), columns = matrix.size(1);
  const auto options = matrix.options().dtype(torch::kFloat64);
  const torch::Tensor units = torch::empty({columns, rows}, options);  // each row holds one column
  const torch::Tensor given = matrix.t().to(torch::kFloat64), place = torch::arange(1, rows + 1, options);
  for (std::int64_t c = 0; c < columns; ++c) {
    const torch::Tensor wave = torch::sin(place.square() * (0.7390851332151607 / static_cast<double>(c + 1)));
    torch::Tensor both = torch::stack({given[c], wave}, 1);  // rows x 2
    const torch::Tensor before = both.norm(2, 0);
    for (int pass = 0; pass < 2 && c > 0; ++pass) {
      const torch::Tensor known = units.narrow(0, 0, c);
      both = torch::addmm(both, known.t(), torch::mm(known, both), 1, -1);
    }
    const torch::Tensor lengths = both.norm(2, 0);
    both.div_(lengths);
    units[c].copy_(torch::where(lengths[0] > before[0] * rounding, both.select(1, 0), both.select(1, 1)));
    if (epsilon > 0) {
      matrix.select(1, c).copy_(units[c] * (lengths[0] / (lengths[0] + epsilon)));
    } else {
      matrix.select(1, c).copy_(units[c]);
    }
  }
}

void orthogonalize(const torch::Tensor& matrix, double epsilon, std::uint64_t seed) {
  MANIPLE_ASSERT(matrix.is_contiguous() && matrix.size(1) <= matrix.size(0));
  if (!matrix.is_cpu()) return orthogonalize_by_tensors(matrix, epsilon);
  const std::size_t rows = matrix.size(0), columns = matrix.size(1);
  if (matrix.scalar_type() == torch::kFloat64) {
    orthogonalize_as(matrix.data_ptr<double>(), rows, columns, epsilon, seed);
  } else {
    orthogonalize_as(matrix.data_ptr<float>(), rows, columns, epsilon, seed);
  }
}

torch::Tensor random_matrix(std::int64_t rows, std::int64_t columns, torch::ScalarType dtype, std::uint64_t seed) {
  const torch::Tensor matrix = torch::empty({rows, columns}, torch::TensorOptions(torch::kFloat64));
  SplitMix random(seed);
  double* data = matrix.data_ptr<double>();
  for (std::int64_t i = 0; i < rows * columns; ++i) data[i] = 2 * random.unit() - 1;
  return matrix.to(dtype);
}

namespace {

constexpr const char* kQ = "q/";
constexpr const char* kIteration = "iteration";

/// The same on every rank, but different for every parameter and iteration.
std::uint64_t seed_of(std::uint64_t seed, const std::string& name, std::int64_t iteration) {
  std::uint64_t hash = mixed(seed + SplitMix::kStep);
  for (const char c : name) hash = mixed(hash ^ static_cast<unsigned char>(c));
  return mixed(hash + static_cast<std::uint64_t>(iteration));
}

struct Matrix {
  std::size_t place = 0;  // index in the bucket
  torch::Tensor values;   // n x m: this rank's gradient plus the error of the previous one
  std::int64_t rank = 0;  // r
  torch::Tensor p, q;     // views into the messages
};

}  // namespace

struct PowerSGDState::Impl {
  PowerSGDOptions options;
  std::int64_t iteration = 0;
  HookTraffic traffic;
  ErrorFeedback errors;
  std::map<std::string, torch::Tensor> qs;

  Work average(GradBucket& bucket, CommContext& comm);
  void compress(GradBucket& bucket, const std::shared_ptr<ProcessGroup>& group);

  /// The rank r for a gradient of this shape; 0: not compressed.
  std::int64_t rank_for(const torch::Tensor& gradient) const {
    if (gradient.dim() < 2 || gradient.numel() == 0) return 0;
    const std::int64_t n = gradient.size(0), m = gradient.numel() / n;
    const std::int64_t r = std::min({n, m, static_cast<std::int64_t>(options.matrix_approximation_rank)});
    const double compressed = static_cast<double>(r * (n + m));
    return compressed * options.min_compression_rate < static_cast<double>(n * m) ? r : 0;
  }

  /// The initial Q of this step: the previous step's Q, or a random one with orthonormal columns.
  torch::Tensor start_of(const std::string& name, std::int64_t m, std::int64_t r, const torch::TensorOptions& like) {
    const std::uint64_t seed = seed_of(options.random_seed, name, iteration);
    torch::Tensor& q = qs[name];
    if (options.warm_start && q.defined()) {
      MANIPLE_REQUIRE(
          q.dim() == 2 && q.size(0) == m && q.size(1) == r,
          "powerSGD_hook: the state has a Q of [{}] for parameter {}, where [{}, {}] is needed; load the state "
          "that was saved with this model and matrix_approximation_rank",
          joined(q.sizes()), name, m, r);
      q = q.to(like).contiguous();
    } else {
      q = copy_ahead(random_matrix(m, r, c10::typeMetaToScalarType(like.dtype()), seed), like.device());
    }
    orthogonalize(q, options.orthogonalization_epsilon, seed);
    return q;
  }
};

Work PowerSGDState::Impl::average(GradBucket& bucket, CommContext& comm) {
  const torch::Tensor& buffer = bucket.buffer();
  const int n = comm.group()->size();
  count_plain(traffic, buffer.nbytes(), n);
  const bool early = iteration < options.start_powerSGD_iter;
  if (bucket.is_last()) ++iteration;
  if (early || !buffer.is_floating_point()) {
    count_all_reduce(traffic, buffer.nbytes(), n);
    return comm.all_reduce(buffer, ReduceOp::avg);
  }
  compress(bucket, comm.group());
  return {};
}

void PowerSGDState::Impl::compress(GradBucket& bucket, const std::shared_ptr<ProcessGroup>& group) {
  const torch::NoGradGuard no_grad;
  const DistOptions over{.group = group};
  const SourceLocation place = public_place();
  const torch::Tensor& buffer = bucket.buffer();
  const torch::ScalarType dtype = buffer.scalar_type() == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
  const torch::Tensor flat = buffer.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  if (options.use_error_feedback) flat.add_(errors.of(bucket, dtype));

  std::vector<Matrix> matrices;
  std::vector<std::size_t> plain;
  std::int64_t first_size = 0, second_size = 0;
  for (std::size_t i = 0; i < bucket.gradients().size(); ++i) {
    const torch::Tensor& gradient = bucket.gradients()[i];
    const std::int64_t r = rank_for(gradient);
    first_size += r == 0 ? gradient.numel() : gradient.size(0) * r;
    if (r == 0) {
      plain.push_back(i);
      continue;
    }
    matrices.push_back({i, part_of(flat, bucket, i).reshape({gradient.size(0), -1}), r, {}, {}});
    second_size += matrices.back().values.size(1) * r;
  }

  const torch::Tensor first = torch::empty({first_size}, flat.options());
  const torch::Tensor second = torch::empty({second_size}, flat.options());
  std::int64_t at = 0, q_at = 0;
  for (Matrix& one : matrices) {
    const std::int64_t n = one.values.size(0), m = one.values.size(1);
    one.p = first.narrow(0, at, n * one.rank).view({n, one.rank});
    one.q = second.narrow(0, q_at, m * one.rank).view({m, one.rank});
    at += n * one.rank;
    q_at += m * one.rank;
    const torch::Tensor start = start_of(bucket.names()[one.place], m, one.rank, flat.options());
    torch::mm_out(one.p, one.values, start);
  }
  const std::int64_t plain_at = at;
  for (const std::size_t i : plain) {
    const std::int64_t count = bucket.gradients()[i].numel();
    first.narrow(0, at, count).view(bucket.gradients()[i].sizes()).copy_(bucket.gradients()[i]);
    at += count;
  }
  all_reduce(first, ReduceOp::avg, over, place);
  count_all_reduce(traffic, first.nbytes() + second.nbytes(), group->size());

  // On a GPU the host does not wait for this value; results from numbers that are not finite are replaced on the device
  // at the end.
  const torch::Tensor finite = torch::isfinite(first.narrow(0, 0, plain_at)).all();
  const bool on_device = !finite.is_cpu();
  const bool sound = on_device || finite.item<bool>();
  for (Matrix& one : matrices) {
    if (!sound) {
      one.q.zero_();
      continue;
    }
    orthogonalize(one.p, options.orthogonalization_epsilon,
                  seed_of(options.random_seed + 1, bucket.names()[one.place], iteration));
    torch::mm_out(one.q, one.values.t(), one.p);
  }
  all_reduce(second, ReduceOp::avg, over, place);

  const torch::Tensor error = options.use_error_feedback ? errors.of(bucket, dtype) : torch::Tensor();
  if (error.defined()) error.zero_();
  for (const Matrix& one : matrices) {
    const std::string& name = bucket.names()[one.place];
    const torch::Tensor& gradient = bucket.gradients()[one.place];
    if (!sound) {
      gradient.fill_(std::numeric_limits<double>::quiet_NaN());
      qs.erase(name);
      continue;
    }
    torch::Tensor product = torch::mm(one.p, one.q.t());
    if (on_device) product.masked_fill_(finite.logical_not(), std::numeric_limits<double>::quiet_NaN());
    gradient.copy_(product.view(gradient.sizes()));
    if (error.defined()) {
      const torch::Tensor left_out = one.values - product;
      if (on_device) left_out.masked_fill_(finite.logical_not(), 0);
      part_of(error, bucket, one.place).copy_(left_out.view(gradient.sizes()));
    }
    if (options.warm_start) {
      qs[name] = on_device ? one.q.masked_fill(finite.logical_not(), 0) : one.q.clone();  // zeros lead to a new basis
    } else {
      qs.erase(name);
    }
  }
  at = plain_at;
  for (const std::size_t i : plain) {
    const std::int64_t count = bucket.gradients()[i].numel();
    bucket.gradients()[i].copy_(first.narrow(0, at, count).view(bucket.gradients()[i].sizes()));
    at += count;
  }
}

PowerSGDState::PowerSGDState(PowerSGDOptions options) : impl_(std::make_unique<Impl>()) {
  MANIPLE_REQUIRE(options.matrix_approximation_rank >= 1,
                  "PowerSGDState: matrix_approximation_rank is {}; it must be at least 1",
                  options.matrix_approximation_rank);
  MANIPLE_REQUIRE(options.start_powerSGD_iter >= 0, "PowerSGDState: start_powerSGD_iter is {}; it must not be negative",
                  options.start_powerSGD_iter);
  MANIPLE_REQUIRE(options.min_compression_rate > 0, "PowerSGDState: min_compression_rate is {}; it must be positive",
                  options.min_compression_rate);
  MANIPLE_REQUIRE(options.orthogonalization_epsilon >= 0 && std::isfinite(options.orthogonalization_epsilon),
                  "PowerSGDState: orthogonalization_epsilon is {}; it must not be negative",
                  options.orthogonalization_epsilon);
  impl_->options = options;
}
PowerSGDState::~PowerSGDState() = default;

const PowerSGDOptions& PowerSGDState::options() const noexcept { return impl_->options; }
std::int64_t PowerSGDState::iteration() const noexcept { return impl_->iteration; }
HookTraffic PowerSGDState::traffic() const noexcept { return impl_->traffic; }
void PowerSGDState::average_errors(ProcessGroup& group) { impl_->errors.average(group); }

std::map<std::string, torch::Tensor> PowerSGDState::state_dict() const {
  std::map<std::string, torch::Tensor> state;
  for (auto& [name, tensor] : impl_->errors.copies()) state[std::string(ErrorFeedback::kPrefix) + name] = tensor;
  for (const auto& [name, tensor] : impl_->qs) state[kQ + name] = tensor.clone();
  state[kIteration] = torch::tensor({impl_->iteration}, torch::TensorOptions(torch::kInt64));
  return state;
}

void PowerSGDState::load_state_dict(const std::map<std::string, torch::Tensor>& state) {
  ErrorFeedback::Named errors;
  std::map<std::string, torch::Tensor> qs;
  std::int64_t iteration = -1;
  for (const auto& [name, tensor] : state) {
    MANIPLE_REQUIRE(tensor.defined(), "PowerSGDState: entry {} is undefined", name);
    if (name == kIteration) {
      MANIPLE_REQUIRE(tensor.numel() == 1 && tensor.item<std::int64_t>() >= 0,
                      "PowerSGDState: entry iteration is not a number of steps");
      iteration = tensor.item<std::int64_t>();
    } else if (name.starts_with(ErrorFeedback::kPrefix)) {
      errors[name.substr(ErrorFeedback::kPrefix.size())] = tensor.clone();
    } else if (name.starts_with(kQ)) {
      qs[name.substr(std::string(kQ).size())] = tensor.clone();
    } else {
      throw InvalidArgument(format_text(
          "PowerSGDState: entry {} is not one of iteration, error/..., q/...; this is another state", name));
    }
  }
  MANIPLE_REQUIRE(iteration >= 0, "PowerSGDState: entry iteration is missing; this is another state");
  impl_->errors.load(std::move(errors));
  impl_->qs = std::move(qs);
  impl_->iteration = iteration;
}

void PowerSGDState::save(const std::string& path) const { write_state(path, snapshot_of({state_dict(), {}})); }
void PowerSGDState::load(const std::string& path) { load_state_dict(read_state(path).tensors); }

CommHook powerSGD_hook(std::shared_ptr<PowerSGDState> state) {
  MANIPLE_REQUIRE(state != nullptr, "powerSGD_hook: the state is null");
  return
      [state = std::move(state)](GradBucket& bucket, CommContext& comm) { return state->impl_->average(bucket, comm); };
}

}  // namespace maniple
