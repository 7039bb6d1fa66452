// `maniple checkpoint`: lists, verifies, merges and splits checkpoints. Only moves bytes, so it does not need LibTorch.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>  // join
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdlib>
#include <limits>
#include <memory>

#include "comm/base/check.h"
#include "comm/base/files.h"
#include "tools/cli/command.h"
#include "tools/cli/option_checks.h"
#include "train/checkpoint/pending_checkpoint.h"
#include "train/checkpoint/safetensors.h"
#include "train/checkpoint/saved_checkpoint.h"
#include "train/state_key.h"
#include <maniple/comm/error.h>

namespace maniple::cli {
namespace {

struct CheckpointArguments {
  std::string folder, out;
  std::int64_t step = -1;  // -1: the newest, or all
  std::size_t ranks = 0;
  bool json = false;
};

constexpr std::int64_t kCopyBytes = std::int64_t{8} << 20;

std::string step_path(const std::string& folder, std::int64_t step) { return folder + "/" + checkpoint_name(step); }

/// The requested steps, newest first; at least one.
std::vector<std::int64_t> chosen_steps(const CheckpointArguments& arguments) {
  const auto steps = list_checkpoints(arguments.folder);
  MANIPLE_REQUIRE(!steps.empty(), "there is no checkpoint in {}; expected folders like {}", arguments.folder,
                  checkpoint_name(100));
  if (arguments.step < 0) return steps;
  MANIPLE_REQUIRE(std::find(steps.begin(), steps.end(), arguments.step) != steps.end(),
                  "there is no checkpoint of step {} in {}; there are {}", arguments.step, arguments.folder,
                  fmt::format("{}", fmt::join(steps, ", ")));
  return {arguments.step};
}

std::string shown_bytes(std::uint64_t bytes) {
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  const char* const units[] = {"kB", "MB", "GB", "TB"};
  double value = static_cast<double>(bytes) / 1000;
  std::size_t unit = 0;
  for (; value >= 1000 && unit < 3; ++unit) value /= 1000;
  return fmt::format("{:.1f} {}", value, units[unit]);
}

// ---- ls -------------------------------------------------------------------------------------------------------------

using CheckpointRow = std::array<std::string, 5>;

/// The program chooses the names of parts, so a long list is truncated; --json has all names.
std::string shown_parts(const std::vector<std::string>& parts) {
  constexpr std::size_t kMaxShown = 60;
  std::string text = one_line(fmt::format("{}", fmt::join(parts, " ")));
  if (text.size() <= kMaxShown) return parts.empty() ? "-" : text;
  std::size_t end = kMaxShown;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // not inside a character
  return text.substr(0, end) + "...";
}

/// Columns as wide as their widest entry; the first three are numbers.
void print_rows(const std::vector<CheckpointRow>& rows) {
  std::array<std::size_t, 5> widths{};
  for (const CheckpointRow& row : rows) {
    for (std::size_t i = 0; i + 1 < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const CheckpointRow& row : rows) {
    fmt::print("{:>{}}  {:>{}}  {:>{}}  {:<{}}  {}\n", row[0], widths[0], row[1], widths[1], row[2], widths[2], row[3],
               widths[3], row[4]);
  }
}

/// Uses the manifest and the lengths of the files; only `verify` reads the files.
int list(const CheckpointArguments& arguments) {
  const auto steps = chosen_steps(arguments);
  auto json = nlohmann::json::array();
  std::vector<CheckpointRow> rows = {{"STEP", "SIZE", "RANKS", "PARTS", "STATE"}};
  for (const std::int64_t step : steps) {
    std::uint64_t bytes = 0;
    std::size_t ranks = 0;
    std::vector<std::string> parts;
    std::string error;
    try {
      const CheckpointManifest manifest = inspect_checkpoint(arguments.folder, step);
      for (const auto& [name, digest] : manifest.files) bytes += digest.bytes;
      const SavedCheckpoint saved(step_path(arguments.folder, step), manifest);
      ranks = saved.is_sharded() ? saved.index().files.size() : 1;
      for (const auto& [name, part] : saved.index().parts) parts.push_back(name);
    } catch (const Error& failure) {
      error = failure.what();
    }
    if (arguments.json) {
      nlohmann::json entry = {
          {"step", step}, {"bytes", bytes}, {"ranks", ranks}, {"parts", parts}, {"whole", error.empty()}};
      if (!error.empty()) entry["trouble"] = error;
      json.push_back(std::move(entry));
    } else {
      const bool whole = error.empty();
      rows.push_back({std::to_string(step), whole ? shown_bytes(bytes) : "-", whole ? std::to_string(ranks) : "-",
                      shown_parts(parts), whole ? "whole" : one_line(error)});
    }
  }
  if (!arguments.json) print_rows(rows);
  if (arguments.json) fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
  return 0;
}

// ---- verify ---------------------------------------------------------------------------------------------------------

int verify(const CheckpointArguments& arguments) {
  int damaged = 0;
  for (const std::int64_t step : chosen_steps(arguments)) {
    try {
      const CheckpointManifest manifest = verify_checkpoint(arguments.folder, step);
      SavedCheckpoint(step_path(arguments.folder, step), manifest).check_files();
      fmt::print("{}: ok, {} files\n", checkpoint_name(step), manifest.files.size());
    } catch (const Error& error) {
      ++damaged;
      fmt::print("{}: DAMAGED: {}\n", checkpoint_name(step), one_line(error.what()));
    }
    std::fflush(stdout);
  }
  return damaged == 0 ? 0 : kFailed;
}

// ---- merge and split ------------------------------------------------------------------------------------------------

/// Writes a flat range of the tensor's elements, a few megabytes at a time.
void write_range(SavedCheckpoint& from, const IndexedTensor& tensor, std::int64_t begin, std::int64_t count,
                 DurableFile& file) {
  const auto element = static_cast<std::int64_t>(safetensors_element_bytes(tensor.dtype).value());
  const std::int64_t all = elements_of(tensor.shape), most = kCopyBytes / element;
  std::vector<char> bytes(static_cast<std::size_t>(std::min(count, most) * element));
  for (std::int64_t at = begin; at < begin + count;) {
    const std::int64_t piece = std::min(most, begin + count - at);
    from.read(tensor, TensorBox::flat(all, at, piece), bytes.data());
    file.write(bytes.data(), static_cast<std::size_t>(piece * element));
    at += piece;
  }
}

/// Writes one file per part, like a Checkpoint without `sharded`.
void write_merged(SavedCheckpoint& from, PendingCheckpoint& to) {
  for (const auto& [name, part] : from.index().parts) {
    SafetensorsHeader header;
    header.metadata = part.texts;
    for (const auto& [key, tensor] : part.tensors) header.entries.push_back({key, tensor.dtype, tensor.shape});
    place_safetensors(header);
    const std::string file_name = name + ".safetensors";
    DurableFile file(to.path_of(file_name));
    file.write(encode_safetensors(header));
    for (const auto& [key, tensor] : part.tensors) write_range(from, tensor, 0, elements_of(tensor.shape), file);
    to.add(file_name, file.finish());
  }
}

/// Writes one file per rank, of about equal size: the tensors are laid end to end and cut into consecutive pieces.
void write_split(SavedCheckpoint& from, PendingCheckpoint& to, std::size_t ranks) {
  struct Range {
    const IndexedTensor* tensor;
    std::int64_t begin, count;
    std::string key;
  };
  CheckpointIndex index;
  std::int64_t all = 0;
  const auto element_of = [](const IndexedTensor& tensor) {
    return static_cast<std::int64_t>(safetensors_element_bytes(tensor.dtype).value());
  };
  for (const auto& [name, part] : from.index().parts) {
    index.parts[name].texts = part.texts;
    for (const auto& [key, tensor] : part.tensors) all += elements_of(tensor.shape) * element_of(tensor);
  }
  std::vector<std::vector<Range>> ranges(ranks);
  std::int64_t at = 0;
  std::size_t rank = 0;
  const auto end_of = [&](std::size_t r) {  // where rank r's bytes end
    const auto n = static_cast<std::int64_t>(ranks), before = static_cast<std::int64_t>(r + 1);
    return all / n * before + std::min(before, all % n);
  };
  for (const auto& [name, part] : from.index().parts) {
    for (const auto& [key, tensor] : part.tensors) {
      const std::int64_t elements = elements_of(tensor.shape), element = element_of(tensor);
      IndexedTensor& entry = index.parts[name].tensors[key] = {tensor.dtype, tensor.shape, {elements}, {}};
      for (std::int64_t begin = 0; begin < elements;) {
        while (rank + 1 < ranks && at >= end_of(rank)) ++rank;
        const std::int64_t room = rank + 1 < ranks ? (end_of(rank) - at + element - 1) / element : elements;
        const std::int64_t count = std::min(room, elements - begin);
        const std::string place = name_in_part(name, key);
        ranges[rank].push_back({&tensor, begin, count, place});
        entry.pieces.push_back({TensorBox::flat(elements, begin, count), rank, place});
        begin += count;
        at += count * element;
      }
    }
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    index.files.push_back(rank_file_name(r, ranks));
    SafetensorsHeader header;
    for (const Range& range : ranges[r]) header.entries.push_back({range.key, range.tensor->dtype, {range.count}});
    place_safetensors(header);
    DurableFile file(to.path_of(index.files.back()));
    file.write(encode_safetensors(header));
    for (const Range& range : ranges[r]) write_range(from, *range.tensor, range.begin, range.count, file);
    to.add(index.files.back(), file.finish());
  }
  DurableFile file(to.path_of(std::string(kIndexFile)));
  file.write(encode_index(index));
  to.add(std::string(kIndexFile), file.finish());
}

/// Merges or splits; `ranks` 0: merge.
int rewrite(const CheckpointArguments& arguments) {
  MANIPLE_REQUIRE(list_checkpoints(arguments.out).empty(),
                  "{} holds checkpoints; expected a new folder, so that none is replaced", arguments.out);
  for (const std::int64_t step : chosen_steps(arguments)) {
    std::unique_ptr<SavedCheckpoint> from;
    try {
      const CheckpointManifest manifest = verify_checkpoint(arguments.folder, step);
      from = std::make_unique<SavedCheckpoint>(step_path(arguments.folder, step), manifest);
      from->check_files();
    } catch (const Error& error) {
      fmt::print(stderr, "maniple: {}{}\n", error.what(), arguments.step < 0 ? "; trying the one before it" : "");
      continue;
    }
    PendingCheckpoint to(arguments.out, step);
    arguments.ranks == 0 ? write_merged(*from, to) : write_split(*from, to, arguments.ranks);
    to.commit();
    fmt::print("{}\n", step_path(arguments.out, step));
    return 0;
  }
  fmt::print(stderr, "maniple: no checkpoint in {} can be used\n", arguments.folder);
  return kFailed;
}

}  // namespace

std::function<int()> declare_checkpoint(CLI::App& app) {
  auto arguments = std::make_shared<CheckpointArguments>();
  auto action = std::make_shared<int (*)(const CheckpointArguments&)>(nullptr);
  const auto declare = [&](const char* name, const char* summary, int (*run)(const CheckpointArguments&)) {
    CLI::App* command = app.add_subcommand(name, summary);
    command->add_option("FOLDER", arguments->folder, "the checkpoint folder")->required();
    takes_whole_number(
        command->add_option("--step", arguments->step,
                            "the checkpoint of this step [ls, verify: all; merge, split: the newest complete one]"),
        0, std::numeric_limits<std::int64_t>::max());
    command->parse_complete_callback([action, run] { *action = run; });
    return command;
  };
  declare("ls", "list the checkpoints in a folder: steps, sizes, ranks, parts", list)
      ->add_flag("--json", arguments->json, "print JSON instead of a table");
  declare("verify", "read every file and compare it with its checksum; exit status 1 if a file is damaged", verify);
  declare("merge", "write one safetensors file for each part into a new folder", rewrite)
      ->add_option("OUT", arguments->out, "the new folder")
      ->required();
  CLI::App* split = declare("split", "write one file for each of RANKS ranks into a new folder", rewrite);
  split->add_option("OUT", arguments->out, "the new folder")->required();
  takes_whole_number(split->add_option("RANKS", arguments->ranks, "the number of ranks")->required(), 1,
                     static_cast<std::int64_t>(kMaxFilesOfCheckpoint) - 1);
  app.require_subcommand(1);
  return [arguments, action] {
    for (std::string* path : {&arguments->folder, &arguments->out}) {
      while (path->size() > 1 && path->back() == '/') path->pop_back();
    }
    return (*action)(*arguments);
  };
}

}  // namespace maniple::cli
