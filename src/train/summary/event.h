// TensorBoard events as bytes: the few protocol buffer messages that we write, encoded by hand.
//
//   Event      1 wall_time double   2 step int64   3 file_version string   5 summary Summary   7 session_log SessionLog
//   Summary    1 repeated Value     { 1 tag string   2 simple_value float   8 tensor Tensor   9 metadata }
//
// Events are stored in a file as TFRecords:
//
//   length 8 bytes | masked CRC-32C of these 8 | the event | masked CRC-32C of the event        (little-endian)
//
// Text in protocol buffers must be UTF-8, and readers refuse an event that is not. Invalid bytes become "?".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace maniple {

struct EventTime {
  double wall_time = 0;  ///< seconds since 1970
  std::int64_t step = 0;
};

std::string version_event(double wall_time);  ///< the first event of a file
std::string restart_event(EventTime time);    ///< voids earlier events from this step on
std::string scalar_event(EventTime time, std::string_view tag, float value);
std::string text_event(EventTime time, std::string_view tag, std::string_view text);

/// The event framed as a TFRecord.
std::string record_of(std::string_view event);

}  // namespace maniple
