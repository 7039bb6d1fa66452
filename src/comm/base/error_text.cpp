// Formats error text from an error's fields. Plugins compile this file themselves, because they must not need symbols
// of Maniple's libraries.
#include <maniple/comm/error.h>

namespace maniple {

const char* to_string(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::invalid_argument: return "InvalidArgument";
    case ErrorKind::timeout: return "Timeout";
    case ErrorKind::peer_lost: return "PeerLost";
    case ErrorKind::aborted: return "Aborted";
    case ErrorKind::mismatch: return "Mismatch";
    case ErrorKind::protocol: return "ProtocolError";
    case ErrorKind::system: return "SystemError";
    case ErrorKind::unsupported: return "Unsupported";
  }
  return "Error";
}

std::string describe(const ErrorInfo& info) {
  if (info.operation.empty()) return info.reason;
  std::string text = "[" + info.operation;
  if (info.sequence != 0) text += " #" + std::to_string(info.sequence);
  if (!info.arguments.empty()) text += " " + info.arguments;
  return text + " " + info.group + " rank " + std::to_string(info.rank) + "/" + std::to_string(info.size) + "] " +
         info.reason;
}

}  // namespace maniple
