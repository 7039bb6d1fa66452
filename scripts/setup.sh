#!/usr/bin/env bash
# Installs Maniple's build and test dependencies on Debian 12 or later, and on derived systems. If all are installed,
# running it again changes nothing and needs neither root nor a network.
set -euo pipefail

# package               purpose
packages=$(sed 's/#.*//' <<'TABLE'
build-essential         # GCC and the C++ library
cmake                   # 3.25 or later
ninja-build             # build tool of the CMake presets
ccache                  # fast rebuilds
git                     # the clone itself
curl                    # fetches MNIST for the demo
libfmt-dev              # message formatting
libcli11-dev            # the command line of `maniple`
nlohmann-json3-dev      # `maniple bench` results
libssl-dev              # HMAC-SHA256 in the handshake
zlib1g-dev              # compressed data files
libtorch-dev            # LibTorch, for maniple::train
python3-torch           # PyTorch, for the backend of torch.distributed
python3-dev             # compiles the backend
pybind11-dev            # compiles the backend
python3-numpy           # tests of the backend: PyTorch hooks use it
python3-pytest          # tests of the backend
python3-pip             # tests of the backend: installs it
libopenblas-dev         # without it LibTorch multiplies matrices 20 times slower
libgtest-dev            # the tests
libgmock-dev            # the tests
clang                   # second compiler; libFuzzer
libclang-rt-dev         # Clang's sanitizer and fuzzer runtimes
doxygen                 # documentation site (scripts/docs.sh) and its test
iproute2                # tests with several hosts (network namespaces)
openmpi-bin             # a peer in `maniple bench`
libopenmpi-dev          # compiles the peer and the MPI backend
libgloo-dev             # another peer, and the Gloo backend
mpich                   # another peer, and scheduler tests
libmpich-dev            # compiles the peer and the MPI backend
slurmctld               # scheduler tests: Slurm's controller
slurmd                  # scheduler tests: Slurm's node daemon
slurm-client            # scheduler tests: srun
munge                   # scheduler tests: Slurm's authentication
TABLE
)
# For scripts/format.sh and scripts/tidy.sh. The versions are fixed because other versions give other results. If a
# later Debian release lacks one, the tool and its test are left out.
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

# Removes tools that this Debian release lacks from `missing`.
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
