#!/usr/bin/env bash
# Installs what Maniple needs on Debian 12 or later (and its relatives). Run it as often as you like: when everything is
# there it changes nothing and needs neither root nor a network.
set -euo pipefail

# package               what for
packages=$(sed 's/#.*//' <<'TABLE'
build-essential         # GCC and the C++ library
cmake                   # 3.25 or later
ninja-build             # what CMake's presets generate
ccache                  # second builds in seconds
git                     # the clone itself
curl                    # fetches MNIST for the demo
libfmt-dev              # text of messages
libcli11-dev            # command line of `maniple`
nlohmann-json3-dev      # results of `maniple bench`
libssl-dev              # HMAC-SHA256 of the handshake
zlib1g-dev              # compressed data files
libtorch-dev            # LibTorch, for maniple::train
python3-torch           # PyTorch, for the backend of torch.distributed
python3-dev             # the same, to compile
pybind11-dev            # the same
python3-numpy           # the tests of it: hooks of PyTorch use it
python3-pytest          # the same
python3-pip             # the same: one installs the backend by it
libopenblas-dev         # without it LibTorch multiplies matrices 20 times slower
libgtest-dev            # the tests
libgmock-dev            # the tests
clang                   # second compiler, and libFuzzer
libclang-rt-dev         # sanitizer and fuzzer runtimes of Clang
doxygen                 # the site: scripts/docs.sh, and the test that builds it
iproute2                # tests with several hosts (network namespaces)
openmpi-bin             # a peer that `maniple bench` compares with
libopenmpi-dev          # the same, to compile
libgloo-dev             # another
mpich                   # another, and tests of what schedulers start
libmpich-dev            # the same, to compile
slurmctld               # tests of what schedulers start: Slurm's controller
slurmd                  # its node
slurm-client            # srun
munge                   # what they prove their identity with
TABLE
)
# One version of each, as others break lines elsewhere: for scripts/format.sh and scripts/tidy.sh. Later releases of
# Debian may not have them; then these two, and what tests them, are left out.
tools="clang-format-19 clang-tidy-19"

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "setup: this is not a Debian system. Please install what these Debian packages hold, then build with" >&2
  echo "       cmake --preset release && cmake --build --preset release" >&2
  printf '         %s\n' $packages $tools >&2
  exit 1
fi

missing=()
for package in $packages $tools; do
  status=$(dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null || true)
  grep -qx installed <<<"$status" || missing+=("$package")
done

# Takes tools that this release does not have from the list of those to install.
leave_out_tools() {
  local package wanted=()
  for package in "${missing[@]}"; do
    if [[ " $tools " == *" $package "* ]] && ! apt-cache show "$package" >/dev/null 2>&1; then
      echo "setup: this release has no $package; left out"
    else
      wanted+=("$package")
    fi
  done
  missing=("${wanted[@]}")
}
if [[ -n $(find /var/lib/apt/lists -name '*_Packages*' -print -quit 2>/dev/null) ]]; then leave_out_tools; fi
if ((${#missing[@]} == 0)); then
  echo "setup: all $(wc -w <<<"$packages") packages are there"
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "setup: sudo is not there; as root run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -q
leave_out_tools
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
echo "setup: done"
