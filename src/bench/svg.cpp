#include "bench/svg.h"

#include <fmt/format.h>

namespace maniple::bench {
namespace {

std::string escaped(std::string_view words) {
  std::string result;
  for (const char c : words) {
    if (c == '&')
      result += "&amp;";
    else if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '"')
      result += "&quot;";
    else
      result += c;
  }
  return result;
}

std::string attributes(const Stroke& stroke) {
  std::string text = fmt::format(R"( stroke="{}" stroke-width="{:.2f}")", stroke.color, stroke.width);
  return stroke.dashes.empty() ? text : text + fmt::format(R"( stroke-dasharray="{}")", stroke.dashes);
}

}  // namespace

Svg::Svg(double width, double height)
    : body_(fmt::format(
          R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0:.0f}" height="{1:.0f}" viewBox="0 0 {0:.0f} {1:.0f}" )"
          R"(font-family="Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif">)"
          "\n",
          width, height)) {
  rectangle({0, 0}, width, height, "#ffffff");
}

void Svg::rectangle(Point corner, double width, double height, std::string_view fill, std::string_view border) {
  body_ += fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}" stroke="{}"/>)"
                       "\n",
                       corner.x, corner.y, width, height, fill, border);
}

void Svg::line(Point from, Point to, const Stroke& stroke) {
  body_ += fmt::format(R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"{}/>)"
                       "\n",
                       from.x, from.y, to.x, to.y, attributes(stroke));
}

void Svg::path(const std::vector<Point>& points, const Stroke& stroke) {
  std::string list;
  for (const Point& point : points) list += fmt::format("{:.1f},{:.1f} ", point.x, point.y);
  body_ += fmt::format(R"(<polyline points="{}" fill="none" stroke-linejoin="round" stroke-linecap="round"{}/>)"
                       "\n",
                       list, attributes(stroke));
}

void Svg::mark(Mark mark, Point at, double radius, std::string_view color) {
  if (mark == Mark::circle) {
    body_ += fmt::format(R"(<circle cx="{:.1f}" cy="{:.1f}" r="{:.1f}" fill="{}" stroke="#fff"/>)"
                         "\n",
                         at.x, at.y, radius, color);
  } else {
    rectangle({at.x - radius * 0.9, at.y - radius * 0.9}, radius * 1.8, radius * 1.8, color, "#fff");
  }
}

void Svg::text(Point at, std::string_view words, const TextStyle& style) {
  body_ += fmt::format(R"(<text x="{:.1f}" y="{:.1f}" font-size="{:.1f}" fill="{}" text-anchor="{}"{}>{}</text>)"
                       "\n",
                       at.x, at.y, style.size, style.color, style.anchor, style.bold ? R"( font-weight="600")" : "",
                       escaped(words));
}

}  // namespace maniple::bench
