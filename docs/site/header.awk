# Shows Doxygen the prose at the top of a header, which says what the header is for: it becomes the description of the
# file. Its code, indented by three spaces or more, becomes a block of code.
FNR == 1 { top = 1 }
top && /^\/\// {
  text = substr($0, 3)
  if (FNR == 1) print "/// @file"
  is_code = text ~ /^   /
  if (is_code != was_code) print "///"
  print "///" (is_code ? "   " : "") text
  was_code = is_code
  next
}
{ top = 0; print }
