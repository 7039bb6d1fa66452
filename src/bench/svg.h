// Just enough SVG to draw a chart.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace maniple::bench {

struct Point {
  double x = 0, y = 0;
};

struct Stroke {
  std::string color = "#333";
  double width = 1;
  std::string dashes;  ///< "6 4"; empty: solid
};

struct TextStyle {
  double size = 12;
  std::string color = "#333";
  std::string anchor = "start";  ///< or "middle", "end"
  bool bold = false;
};

enum class Mark { circle, square };

class Svg {
 public:
  Svg(double width, double height);
  void rectangle(Point corner, double width, double height, std::string_view fill, std::string_view border = "none");
  void line(Point from, Point to, const Stroke& stroke);
  void path(const std::vector<Point>& points, const Stroke& stroke);
  void mark(Mark mark, Point at, double radius, std::string_view color);
  void text(Point at, std::string_view words, const TextStyle& style = {});
  std::string finish() const { return body_ + "</svg>\n"; }

 private:
  std::string body_;
};

}  // namespace maniple::bench
