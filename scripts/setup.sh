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
libopenblas-dev         # without it LibTorch multiplies matrices 20 times slower
libgtest-dev            # the tests
libgmock-dev            # the tests
clang                   # second compiler, and libFuzzer
libclang-rt-dev         # sanitizer and fuzzer runtimes of Clang
doxygen                 # the site: scripts/docs.sh, and the test that builds it
clang-format-19         # scripts/format.sh: one version, as others break lines elsewhere
clang-tidy-19           # scripts/tidy.sh
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

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "setup: this is not a Debian system. Please install what these Debian packages hold, then build with" >&2
  echo "       cmake --preset release && cmake --build --preset release" >&2
  printf '         %s\n' $packages >&2
  exit 1
fi

missing=()
for package in $packages; do
  status=$(dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null || true)
  grep -qx installed <<<"$status" || missing+=("$package")
done
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
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
echo "setup: done"
