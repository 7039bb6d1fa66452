# Turns of phrase that readers stumble over: the table of prose.txt. Usage: perl prose.pl TABLE FILE...
# Reads what people read: pages outside fenced code; comments and string literals of sources and scripts. A phrase may
# continue on the next line. Prints each violation as file:line: "phrase"; write: what to write instead.
use strict;
use warnings;

my @rules;
my $table = shift @ARGV;
open(my $lines, '<', $table) or die "$table: $!";
while (<$lines>) {
  next if /^\s*(#|$)/;
  chomp;
  my ($pattern, $instead) = split /\s+=>\s+/, $_, 2;
  die "$table:$.: expected PATTERN => INSTEAD\n" unless defined $instead;
  push @rules, [qr/(?<![A-Za-z_-])(?:$pattern)(?![a-z])/, $instead];
}

# A passage is a list of [line number, text]; reports the line on which a phrase begins.
sub check {
  my ($file, @passage) = @_;
  my ($text, @starts) = ('');
  for my $part (@passage) {
    push @starts, [length $text, $part->[0]];
    (my $words = "$part->[1] ") =~ s/^\s+|\s+(?=\s)//g;
    $text .= $words;
  }
  for my $rule (@rules) {
    while ($text =~ /$rule->[0]/g) {
      my $line = (grep { $_->[0] <= $-[0] } @starts)[-1][1];
      print "$file:$line: \"$&\"; write: $rule->[1]\n";
    }
  }
}

sub check_page {
  my ($file, @lines) = @_;
  my ($fenced, @passage) = (0);
  for my $number (1 .. @lines) {
    my $line = $lines[$number - 1];
    my $alone = $line =~ /^\s*(\||#|$)/;  # a row of a table, a heading or nothing ends a paragraph
    $fenced = !$fenced if $line =~ /^\s*```/;
    if ($fenced || $alone) {
      check($file, @passage) if @passage;
      @passage = ();
    }
    if ($alone && !$fenced) { check($file, [$number, $line]) }
    elsif (!$fenced) { push @passage, [$number, $line] }
  }
  check($file, @passage) if @passage;
}

# Comments of consecutive lines are one passage, and so are literals of consecutive lines that are one message.
sub check_source {
  my ($file, $comment, @lines) = @_;
  my (@comments, @texts, $docstring);
  for my $number (1 .. @lines) {
    my $line = $lines[$number - 1];
    my ($text, $remark) = ('', undef);
    if ($file =~ /\.py$/ && $line =~ /"""/) {
      $remark = $line;
      $docstring = !$docstring if (() = $line =~ /"""/g) == 1;
      $line = '';
    } elsif ($docstring) {
      ($remark, $line) = ($line, '');
    }
    my $continued = $line =~ /^\s*[fR]?"/;
    $texts[-1][1] =~ s{ \| $}{} if $continued && @texts;
    while ($line =~ /\G(?:"((?:[^"\\]|\\.)*)"|'(?:[^'\\]|\\.)'|$comment(.*)|\w+|.)/g) {
      $text .= "$1 | " if defined $1;
      $remark = $2 if defined $2;
    }
    if (!defined $remark || $remark =~ /^\s*$/ || $lines[$number - 1] =~ /\S.*\/\/\/</) {
      check($file, @comments) if @comments;
      @comments = ();
    }
    push @comments, [$number, $remark] if defined $remark;
    if (!$continued) {
      check($file, @texts) if @texts;
      @texts = ();
    }
    $text =~ s/\\[nt]/ /g;
    push @texts, [$number, $text] if $text ne '';
  }
  check($file, @comments) if @comments;
  check($file, @texts) if @texts;
}

for my $file (@ARGV) {
  open(my $input, '<', $file) or die "$file: $!";
  chomp(my @lines = <$input>);
  if ($file =~ /\.md$/) { check_page($file, @lines) }
  elsif ($file =~ /\.(h|cpp|inl|cu)$/) { check_source($file, qr{//[/!<]*}, @lines) }
  else { check_source($file, qr/(?<![^\s])#+/, @lines) }
}
