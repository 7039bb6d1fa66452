#include "train/checkpoint/tensor_box.h"

#include <algorithm>
#include <set>

#include "comm/base/format.h"

namespace maniple {

std::int64_t elements_of(const Extents& extents) {
  std::int64_t product = 1;
  for (const std::int64_t extent : extents) {
    if (extent == 0) return 0;
  }
  for (const std::int64_t extent : extents) product *= extent;
  return product;
}

bool lies_inside(const TensorBox& box) {
  if (box.offset.size() != box.view.size() || box.size.size() != box.view.size()) return false;
  for (std::size_t d = 0; d < box.view.size(); ++d) {
    if (box.offset[d] < 0 || box.size[d] < 0 || box.offset[d] > box.view[d] ||
        box.size[d] > box.view[d] - box.offset[d]) {
      return false;
    }
  }
  return true;
}

bool overlap(const TensorBox& a, const TensorBox& b) {
  for (std::size_t d = 0; d < a.size.size(); ++d) {
    if (a.offset[d] + a.size[d] <= b.offset[d] || b.offset[d] + b.size[d] <= a.offset[d]) return false;
  }
  return a.count() > 0 && b.count() > 0;
}

std::string cover_error(const std::vector<const TensorBox*>& boxes, const Extents& view) {
  std::vector<const TensorBox*> sorted;
  const std::int64_t all = elements_of(view);
  std::int64_t held = 0;
  for (const TensorBox* box : boxes) {
    if (box->view != view || !lies_inside(*box)) {
      return format_text("the piece of [{}] at [{}] lies outside [{}]", joined(box->size), joined(box->offset),
                         joined(view));
    }
    const std::int64_t count = box->count();
    if (count == 0) continue;
    if (count > all - held) return "its pieces overlap";
    held += count;
    sorted.push_back(box);
  }
  // Sorting by the dimension with the most distinct offsets leaves few pairs to compare.
  std::size_t by = 0, most = 0;
  for (std::size_t d = 0; d < view.size(); ++d) {
    std::set<std::int64_t> places;
    for (const TensorBox* box : sorted) places.insert(box->offset[d]);
    if (places.size() > most) by = d, most = places.size();
  }
  if (!view.empty()) {
    std::sort(sorted.begin(), sorted.end(),
              [by](const TensorBox* a, const TensorBox* b) { return a->offset[by] < b->offset[by]; });
  }
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    for (std::size_t k = i + 1; k < sorted.size(); ++k) {
      if (!view.empty() && sorted[k]->offset[by] >= sorted[i]->offset[by] + sorted[i]->size[by]) break;
      if (overlap(*sorted[i], *sorted[k])) {
        return format_text("the pieces of [{}] at [{}] and of [{}] at [{}] overlap", joined(sorted[i]->size),
                           joined(sorted[i]->offset), joined(sorted[k]->size), joined(sorted[k]->offset));
      }
    }
  }
  if (held != all) return format_text("{} of its {} elements are in no piece", all - held, all);
  return {};
}

std::vector<TensorBox> cut_box(const TensorBox& box, std::int64_t parts) {
  const auto found = std::find_if(box.size.begin(), box.size.end(), [](std::int64_t extent) { return extent > 1; });
  if (parts <= 1 || found == box.size.end() || box.count() == 0) return {box};
  const std::size_t d = found - box.size.begin();
  parts = std::min(parts, *found);
  std::vector<TensorBox> cut;
  const std::int64_t least = *found / parts, more = *found % parts;
  for (std::int64_t i = 0, at = box.offset[d]; i < parts; ++i) {
    TensorBox part = box;
    part.offset[d] = at;
    part.size[d] = least + (i < more ? 1 : 0);
    at += part.size[d];
    cut.push_back(std::move(part));
  }
  return cut;
}

BoxRuns::BoxRuns(const TensorBox& box)
    : box_(box),
      view_strides_(box.view.size(), 1),
      box_strides_(box.view.size(), 1),
      empty_(box.count() == 0),
      place_(box.view.size(), 0) {
  const std::size_t n = box.view.size();
  if (empty_) return;
  for (std::size_t d = n; d-- > 1;) {
    view_strides_[d - 1] = view_strides_[d] * box.view[d];
    box_strides_[d - 1] = box_strides_[d] * box.size[d];
  }
  for (inner_ = n; inner_ > 1 && box.size[inner_ - 1] == box.view[inner_ - 1];) --inner_;
  if (inner_ > 0) --inner_;
}

std::optional<BoxRuns::Run> BoxRuns::from(std::int64_t position) const {
  const std::size_t n = box_.view.size();
  if (empty_) return std::nullopt;
  if (n == 0) return position > 0 ? std::nullopt : std::optional(Run{0, 1, 0});
  std::int64_t rest = position;
  for (std::size_t d = 0; d < n; ++d) {
    place_[d] = rest / view_strides_[d];
    rest %= view_strides_[d];
  }
  // The first position in the box that is not before `position`.
  for (std::size_t d = 0; d < n; ++d) {
    if (place_[d] < box_.offset[d]) {
      std::copy(box_.offset.begin() + static_cast<std::ptrdiff_t>(d), box_.offset.end(),
                place_.begin() + static_cast<std::ptrdiff_t>(d));
      break;
    }
    if (place_[d] < box_.offset[d] + box_.size[d]) continue;
    for (;; --d) {  // past the box in this dimension: advance in an outer one
      if (d == 0) return std::nullopt;
      if (++place_[d - 1] < box_.offset[d - 1] + box_.size[d - 1]) break;
    }
    std::copy(box_.offset.begin() + static_cast<std::ptrdiff_t>(d), box_.offset.end(),
              place_.begin() + static_cast<std::ptrdiff_t>(d));
    break;
  }
  Run run{0, 0, 0};
  std::int64_t in_run = 0;  // elements of this run before the position
  for (std::size_t d = 0; d < n; ++d) {
    run.begin += place_[d] * view_strides_[d];
    run.at += (place_[d] - box_.offset[d]) * box_strides_[d];
    if (d >= inner_) in_run += (place_[d] - box_.offset[d]) * view_strides_[d];
  }
  run.length = box_.size[inner_] * view_strides_[inner_] - in_run;
  return run;
}

}  // namespace maniple
