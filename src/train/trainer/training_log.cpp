#include "train/trainer/training_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include "comm/base/log.h"
#include "comm/base/system_error.h"
#include "comm/group/elastic.h"

namespace maniple {

TrainingLog::TrainingLog(const TrainerOptions& options, int rank, bool default_group, const TrainerState& state,
                         const std::string& resumed)
    : logs_(!options.log_dir.empty()),
      writes_(rank == 0 && logs_),
      shows_(rank == 0 && options.progress),
      default_group_(default_group) {
  if (shows_ && !resumed.empty())
    std::fprintf(stderr, "going on after step %lld: %s\n", static_cast<long long>(state.step), resumed.c_str());
  if (!writes_) return;
  SummaryWriterOptions writer{.only_rank_0 = false};
  if (!resumed.empty()) writer.purge_step = state.step + 1;  // events after the checkpoint will be written again
  curves_.emplace(options.log_dir, writer);                  // creates the folder
  path_ = options.log_dir + "/log.jsonl";
  lines_ = open_file(path_, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (!lines_) throw_system_error("cannot make " + path_);
  if (!resumed.empty()) write_line(nlohmann::ordered_json{{"kind", "resumed"}, {"step", state.step}}.dump());
}

void TrainingLog::begin_epoch(const TrainerState& state, std::size_t epochs, std::size_t total) {
  if (!shows_) return;
  progress_ =
      std::make_unique<Progress>(total, ProgressOptions{.label = format_text("epoch {} of {}", state.epoch + 1, epochs),
                                                        .unit = "samples",
                                                        .start = total > 0 ? std::min(state.batch, total) : 0,
                                                        .only_rank_0 = default_group_});
}

void TrainingLog::batch(double samples) {
  if (progress_) progress_->step(static_cast<std::size_t>(samples), note_);
}

void TrainingLog::end_epoch() {
  if (progress_) progress_->finish();
  progress_.reset();
}

std::string TrainingLog::row(std::string_view kind, const TrainerState& state, const MetricRow& metrics, double lr) {
  if (kind == "train") {
    note_ = metrics.text();
  } else if (progress_) {
    note_ += format_text("  {}: {}", kind, metrics.text());
  } else if (shows_) {
    std::fprintf(stderr, "epoch %zu: %s\n", state.epoch + 1, metrics.text().c_str());  // between two progress lines
  }
  if (!logs_) return {};
  nlohmann::ordered_json line = {
      {"kind", kind},
      {"epoch", state.epoch},
      {"step", state.step},
      {"samples", state.samples},
      {"seconds", std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count()},
      {"lr", lr}};
  for (const Metric& metric : metrics) {
    line[metric.name] = metric.value;
    if (writes_) curves_->add_scalar(format_text("{}/{}", kind, metric.name), metric.value, state.step);
  }
  if (writes_ && kind == "train") curves_->add_scalar("train/lr", lr, state.step);
  const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  if (is_elastic()) {
    write_again(text);
  } else if (writes_) {
    write_line(text);
  }
  return text;
}

void TrainingLog::write_again(const std::string& line) {
  if (writes_ && !has(line)) write_line(line);
}

/// Whether this run has written the row: everything before "seconds" is the same in no other row.
bool TrainingLog::has(const std::string& line) const {
  const std::string row = line.substr(0, line.find("\"seconds\""));
  std::string end(1 << 16, ' ');
  const off_t size = lseek(lines_.get(), 0, SEEK_END), length = static_cast<off_t>(end.size());
  const ssize_t got = pread(lines_.get(), end.data(), end.size(), std::max<off_t>(0, size - length));
  end.resize(static_cast<std::size_t>(std::max<ssize_t>(0, got)));
  const std::size_t resumed = end.rfind("\"kind\":\"resumed\"");
  return end.find(row, resumed == std::string::npos ? 0 : resumed) != std::string::npos;
}

/// A single write(2), so that a killed process leaves only whole lines.
void TrainingLog::write_line(const std::string& line) {
  const std::string whole = line + "\n";
  if (::write(lines_.get(), whole.data(), whole.size()) != static_cast<ssize_t>(whole.size()))
    warn_once(format_text("{} lacks lines: {}; training goes on", path_, std::strerror(errno)));
}

}  // namespace maniple
