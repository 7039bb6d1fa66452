#include "bench/plot.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "bench/log_axis.h"
#include "bench/series.h"
#include "bench/sizes.h"
#include "bench/svg.h"

namespace maniple::bench {
namespace {

constexpr double kWidth = 1120, kMargin = 70, kTop = 84, kPanelHeight = 360, kGap = 84, kLegendLine = 22;
constexpr std::uint64_t kSmall = 64 * 1024;

struct Box {
  double left, top, width, height;
  double right() const { return left + width; }
  double bottom() const { return top + height; }
};

/// One panel: which rows it shows and what it draws of each.
struct Panel {
  std::string title;
  Box box;
  double (*value)(const Row&);
  bool (*shows)(const Row&);
};

struct Range {
  double low = 1e300, high = 0;
  void include(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

/// Room above and below, so that no line runs along the frame.
LogAxis padded(Range range, double from, double to) {
  if (range.high <= range.low) return LogAxis(range.low / 2, range.low * 2, from, to);
  const double room = std::pow(range.high / range.low, 0.06);
  return LogAxis(range.low / room, range.high * room, from, to);
}

std::string plain_number(double value) {
  return value >= 1 ? fmt::format("{:.0f}", value) : fmt::format("{:g}", value);
}

void draw_frame(Svg& svg, const Panel& panel, const LogAxis& x, const LogAxis& y) {
  const Box& box = panel.box;
  svg.rectangle({box.left, box.top}, box.width, box.height, "#fafbfc");
  for (const double tick : y.decimal_ticks()) {
    svg.line({box.left, y.at(tick)}, {box.right(), y.at(tick)}, {"#e3e7ec", 1, ""});
    svg.text({box.left - 8, y.at(tick) + 4}, plain_number(tick), {11.5, "#5b6570", "end"});
  }
  for (const double tick : x.binary_ticks(static_cast<int>(box.width / 62))) {
    svg.line({x.at(tick), box.top}, {x.at(tick), box.bottom()}, {"#eef1f4", 1, ""});
    svg.text({x.at(tick), box.bottom() + 18}, format_bytes(static_cast<std::uint64_t>(tick)),
             {11.5, "#5b6570", "middle"});
  }
  svg.line({box.left, box.bottom()}, {box.right(), box.bottom()}, {"#9aa4ae", 1, ""});
  svg.line({box.left, box.top}, {box.left, box.bottom()}, {"#9aa4ae", 1, ""});
  svg.text({box.left, box.top - 12}, panel.title, {13.5, "#1f2933", "start", true});
}

void draw_series(Svg& svg, const Panel& panel, const LogAxis& x, const LogAxis& y, const Series& series) {
  std::vector<Point> points;
  for (const Row& row : series.rows) {
    if (panel.shows(row)) points.push_back({x.at(static_cast<double>(row.bytes)), y.at(panel.value(row))});
  }
  svg.path(points, series.stroke);
  for (const Point& point : points) svg.mark(series.mark, point, 3.6, series.stroke.color);
}

/// A single size makes no line: bars with their values instead.
void draw_bars(Svg& svg, const Panel& panel, const std::vector<Series>& all, double most) {
  const Box& box = panel.box;
  svg.rectangle({box.left, box.top}, box.width, box.height, "#fafbfc");
  svg.line({box.left, box.top}, {box.left, box.bottom()}, {"#9aa4ae", 1, ""});
  const double step = std::min(box.height / static_cast<double>(all.size()), 56.0);
  const double room = box.width - 90;  // for the value after the longest bar
  double top = box.top + 8;
  std::uint64_t bytes = 0;
  for (const Series& series : all) {
    for (const Row& row : series.rows) {
      if (!panel.shows(row)) continue;
      bytes = row.bytes;
      const double length = std::max(2.0, panel.value(row) / most * room);
      svg.rectangle({box.left, top + step * 0.14}, length, step * 0.6, series.stroke.color);
      svg.text({box.left + length + 8, top + step * 0.44 + 4}, three_digits(panel.value(row)), {12.5, "#1f2933"});
      top += step;
    }
  }
  svg.text({box.left, box.top - 12}, fmt::format("{}, at {}", panel.title, format_bytes(bytes)),
           {13.5, "#1f2933", "start", true});
}

void draw_panel(Svg& svg, const Panel& panel, const std::vector<Series>& all) {
  Range bytes, values;
  for (const Series& series : all) {
    for (const Row& row : series.rows) {
      if (!panel.shows(row)) continue;
      bytes.include(static_cast<double>(row.bytes));
      values.include(panel.value(row));
    }
  }
  if (values.high == 0) return;
  if (bytes.low == bytes.high) return draw_bars(svg, panel, all, values.high);
  const LogAxis x = padded(bytes, panel.box.left, panel.box.right());
  const LogAxis y = padded(values, panel.box.bottom(), panel.box.top);
  draw_frame(svg, panel, x, y);
  for (const Series& series : all) draw_series(svg, panel, x, y, series);
}

/// Entries in columns below the panels; returns the height used.
double draw_legend(Svg* svg, const std::vector<Series>& all, double top) {
  constexpr double kColumn = (kWidth - kMargin - 40) / 3;
  for (std::size_t i = 0; svg != nullptr && i < all.size(); ++i) {
    const Point at{kMargin + static_cast<double>(i % 3) * kColumn, top + static_cast<double>(i / 3) * kLegendLine};
    svg->line({at.x, at.y - 4}, {at.x + 30, at.y - 4}, all[i].stroke);
    svg->mark(all[i].mark, {at.x + 15, at.y - 4}, 3.6, all[i].stroke.color);
    svg->text({at.x + 40, at.y}, all[i].label, {12.5, "#1f2933"});
  }
  return std::ceil(static_cast<double>(all.size()) / 3) * kLegendLine;
}

bool is_large(const Row& row) { return row.bytes >= kSmall && row.algbw_gbps > 0; }
bool is_small(const Row& row) { return row.bytes > 0 && row.bytes <= kSmall && row.median_us > 0; }

struct Chart {
  std::string title;
  std::vector<Series> series;
  bool has_small = false, has_large = false;
};

std::vector<Chart> charts_of(const std::vector<Row>& rows) {
  std::vector<std::string> titles;
  std::map<std::string, std::vector<Row>> by_title;
  for (const Row& row : rows) {
    const bool drawn = row.op != "limit" && row.backend != "bare" && row.error.empty() && row.bytes > 0;
    if (!drawn) continue;
    const std::string title = chart_title(row);
    if (by_title.find(title) == by_title.end()) titles.push_back(title);
    by_title[title].push_back(row);
  }
  std::vector<Chart> charts;
  for (const std::string& title : titles) {
    Chart chart{title, series_of(by_title[title])};
    for (const Row& row : by_title[title]) {
      chart.has_small |= is_small(row);
      chart.has_large |= row.bytes > kSmall;
    }
    charts.push_back(std::move(chart));
  }
  return charts;
}

void draw_chart(Svg& svg, const Chart& chart, double top) {
  const bool both = chart.has_small && chart.has_large;
  const double full = kWidth - kMargin - 30;
  const double left = both ? (full - kGap) * 0.58 : full;
  const Box first{kMargin, top + kTop, left, kPanelHeight};
  const Box second{kMargin + left + kGap, top + kTop, full - kGap - left, kPanelHeight};
  svg.text({kMargin - 40, top + 34}, chart.title, {18, "#111827", "start", true});
  const Panel bandwidth{"bandwidth, GB/s (bytes of the buffer / median time)", first,
                        [](const Row& row) { return row.algbw_gbps; }, is_large};
  const Panel time{"median time, microseconds", both ? second : first, [](const Row& row) { return row.median_us; },
                   is_small};
  if (chart.has_large) draw_panel(svg, bandwidth, chart.series);
  if (chart.has_small) draw_panel(svg, time, chart.series);
  draw_legend(&svg, chart.series, top + kTop + kPanelHeight + 52);
}

double height_of(const Chart& chart) { return kTop + kPanelHeight + 56 + draw_legend(nullptr, chart.series, 0); }

}  // namespace

std::string plot_svg(const Machine& machine, const std::vector<Row>& rows) {
  const std::vector<Chart> charts = charts_of(rows);
  double height = charts.empty() ? 120 : 4;
  for (const Chart& chart : charts) height += height_of(chart);
  Svg svg(kWidth, height);
  const std::string where =
      fmt::format("{}, {} cores, Linux {} {}", machine.cpu, machine.cores, machine.kernel, machine.arch);
  svg.text({kWidth - 30, 34}, where, {12, "#5b6570", "end"});
  if (charts.empty()) svg.text({kMargin, 70}, "no row has a size to draw", {14});
  double top = 0;
  for (const Chart& chart : charts) {
    draw_chart(svg, chart, top);
    top += height_of(chart);
  }
  return svg.finish();
}

}  // namespace maniple::bench
