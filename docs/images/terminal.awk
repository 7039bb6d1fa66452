# Draws a terminal's screen, text with the escape sequences of colours, as SVG. Usage: awk -v columns=100 -f
# terminal.awk <screen >picture.svg
BEGIN {
  split("#3b4252 #d0605e #6fb36f #d9b45b #6a9fd8 #b48ead #5fb7c4 #d8dee9", colour, " ")
  advance = 8.4; height = 19; margin = 16
}
function escaped(text) {
  gsub(/&/, "\\&amp;", text)
  gsub(/</, "\\&lt;", text)
  gsub(/>/, "\\&gt;", text)
  return text
}
function flush_text() {
  if (text != "") {
    body = body sprintf("<text x=\"%.1f\" y=\"%d\"%s%s xml:space=\"preserve\" textLength=\"%.1f\">%s</text>\n", margin + start * advance,
                        margin + NR * height - 5, ink == "" ? "" : " fill=\"" ink "\"", bold ? " font-weight=\"bold\"" : "", length(text) * advance,
                        escaped(text))
  }
  start += length(text)
  text = ""
}
{
  start = 0; text = ""
  line = $0
  while (match(line, /\033\[[0-9;]*m/)) {
    text = text substr(line, 1, RSTART - 1)
    codes = substr(line, RSTART + 2, RLENGTH - 3)
    line = substr(line, RSTART + RLENGTH)
    flush_text()
    n = split(codes, code, ";")
    if (n == 0) { ink = ""; bold = 0 }
    for (i = 1; i <= n; ++i) {
      if (code[i] + 0 == 0 || code[i] == 39) ink = ""
      if (code[i] + 0 == 0 || code[i] == 22) bold = 0
      if (code[i] == 1) bold = 1
      if (code[i] >= 30 && code[i] <= 37) ink = colour[code[i] - 29]
      if (code[i] >= 90 && code[i] <= 97) ink = colour[code[i] - 89]
    }
  }
  text = line
  flush_text()
}
END {
  wide = columns * advance + 2 * margin
  high = NR * height + 2 * margin
  printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\"", wide, high, wide, high
  printf " font-family=\"ui-monospace, SFMono-Regular, Menlo, DejaVu Sans Mono, monospace\" font-size=\"14\" fill=\"#d8dee9\">\n"
  printf "<rect width=\"100%%\" height=\"100%%\" rx=\"8\" fill=\"#1e232b\"/>\n%s</svg>\n", body
}
