#include "train/weights/pickle_machine.h"

#include <array>

namespace maniple {

const char* described(PickleKind kind) {
  constexpr std::array kNames = {"None",         "a truth value", "a whole number", "a whole number", "a number",
                                 "a text",       "bytes",         "a tuple",        "a list",         "a set",
                                 "a dictionary", "a function",    "a type",         "a dtype",        "a storage",
                                 "a tensor",     "something else"};
  return kNames.at(static_cast<std::size_t>(kind));
}

bool PickleMachine::step() {
  const auto opcode = static_cast<unsigned char>(take(1).front());
  switch (opcode) {
    case 0x80:  // PROTO
      if (const std::uint64_t version = take_number(1); version < 2 || version > 5)
        throw InvalidArgument(format_text("its pickle has protocol {}; expected 2 to 5", version));
      break;
    case 0x95: take(8); break;  // FRAME
    case '.': return false;     // STOP
    case '(': marks_.push_back(stack_.size()); break;
    case '0':  // POP
      if (stack_.size() == floor() && !marks_.empty())
        marks_.pop_back();
      else
        pop();
      break;
    case '1': pop_to_mark(); break;
    case '2': push(top()); break;  // DUP
    case 'N': make(PickleKind::none); break;
    case 0x88: make(PickleKind::boolean, 1); break;
    case 0x89: make(PickleKind::boolean, 0); break;
    case 'J': make(PickleKind::integer, static_cast<std::int32_t>(take_number(4))); break;
    case 'K': make(PickleKind::integer, static_cast<std::int64_t>(take_number(1))); break;
    case 'M': make(PickleKind::integer, static_cast<std::int64_t>(take_number(2))); break;
    case 0x8a: make_long(take_number(1)); break;
    case 0x8b: make_long(take_number(4)); break;
    case 'G': take(8), make(PickleKind::real); break;
    case 'X':
    case 'T': make(PickleKind::text, 0, take(take_number(4))); break;  // BINUNICODE, BINSTRING
    case 0x8c:
    case 'U': make(PickleKind::text, 0, take(take_number(1))); break;  // SHORT_BINUNICODE, SHORT_BINSTRING
    case 0x8d: make(PickleKind::text, 0, take(take_number(8))); break;
    case 'B': make(PickleKind::bytes, 0, take(take_number(4))); break;
    case 'C': make(PickleKind::bytes, 0, take(take_number(1))); break;
    case 0x8e:
    case 0x96: make(PickleKind::bytes, 0, take(take_number(8))); break;  // BINBYTES8, BYTEARRAY8
    case ')': make(PickleKind::tuple); break;
    case 0x85: make_tuple(1); break;
    case 0x86: make_tuple(2); break;
    case 0x87: make_tuple(3); break;
    case 't': make_of(PickleKind::tuple, pop_to_mark()); break;
    case ']': make(PickleKind::list); break;
    case 'l': make_of(PickleKind::list, pop_to_mark()); break;
    case 'a': add_to_below(PickleKind::list, 1); break;
    case 'e': add_to(PickleKind::list, pop_to_mark()); break;
    case '}': make(PickleKind::dict); break;
    case 'd': make_dict(pop_to_mark()); break;
    case 's': add_to_below(PickleKind::dict, 2); break;
    case 'u': add_to(PickleKind::dict, pop_to_mark()); break;
    case 0x8f: make(PickleKind::set); break;
    case 0x90: add_to(PickleKind::set, pop_to_mark()); break;
    case 0x91: make_of(PickleKind::set, pop_to_mark()); break;
    case 'c': {
      const std::string_view module = take_line();
      name_global(module, take_line());
      break;
    }
    case 0x93: {  // STACK_GLOBAL
      const PickleValue &name = values_[pop()], &module = values_[pop()];
      if (name.kind != PickleKind::text || module.kind != PickleKind::text) fail("the name of a function is not text");
      const std::string_view module_text = module.text, name_text = name.text;
      name_global(module_text, name_text);
      break;
    }
    case 'R':
    case 0x81: call(); break;  // REDUCE, NEWOBJ
    case 'b':                  // BUILD: attributes, such as the versions in a state dict
      pop();
      if (values_[top()].kind != PickleKind::dict)
        fail(format_text("it gives attributes to {}", described(values_[top()].kind)));
      break;
    case 'Q': make_storage(); break;
    case 'q': remember(take_number(1)); break;
    case 'r': remember(take_number(4)); break;
    case 0x94: remember(memo_.size()); break;
    case 'h': recall(take_number(1)); break;
    case 'j': recall(take_number(4)); break;
    default:
      --at_;
      fail(format_text("instruction 0x{:02x} is not one that torch.save writes", static_cast<unsigned>(opcode)));
  }
  return true;
}

PickleRef PickleMachine::run() {
  while (step()) {
  }
  if (!marks_.empty() || stack_.size() != 1) fail("it ends with another number of values than one");
  return stack_.front();
}

}  // namespace maniple
