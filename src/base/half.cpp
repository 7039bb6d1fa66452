#include "base/half.h"

#include <maniple/comm/types.h>

namespace maniple {

float16::float16(float value) noexcept : bits(half::float16_from_float(value)) {}
float16::operator float() const noexcept { return half::float_from_float16(bits); }

bfloat16::bfloat16(float value) noexcept : bits(half::bfloat16_from_float(value)) {}
bfloat16::operator float() const noexcept { return half::float_from_bfloat16(bits); }

}  // namespace maniple
