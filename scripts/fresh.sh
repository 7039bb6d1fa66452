#!/usr/bin/env bash
# Runs a command in a clean clone of this repository (its last commit) inside a pristine Debian, a minimal system with
# only git. Packages of your own machine are absent, so a package missing from scripts/setup.sh shows up.
#
#   scripts/fresh.sh ./scripts/test.sh                    the steps of a new user
#   scripts/fresh.sh --release trixie ./scripts/demo.sh   on a different Debian release than this machine's
#   scripts/fresh.sh --user ./scripts/test.sh             as an ordinary user without sudo, after root has run
#                                                         scripts/setup.sh
#   scripts/fresh.sh --prepare                            creates only the base system; fails with the reason if this
#                                                         machine cannot
#
# --keep keeps the system and prints its path. --cold compiles everything without the ccache of earlier runs.
#
# Needs root, Linux namespaces and Debian packages. debootstrap creates the base system once (a minute, 300 MB in
# /var/tmp/maniple-fresh). Each run writes into its own overlay, which is removed afterwards. Files and processes are
# isolated; the network and the kernel are shared with this machine.
set -euo pipefail

fail() { echo "fresh: $*" >&2; exit 2; }
usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit "$1"; }

own=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
release=$own as_user='' keep='' cold='' prepare=''
while (($# > 0)); do
  case $1 in
    --release) (($# > 1)) || usage 2 >&2; release=$2; shift 2 ;;
    --user) as_user=1; shift ;;
    --keep) keep=1; shift ;;
    --cold) cold=1; shift ;;
    --prepare) prepare=1; shift ;;
    --help) usage 0 ;;
    -*) usage 2 >&2 ;;
    *) break ;;
  esac
done
[[ -n $prepare ]] || (($# > 0)) || usage 2 >&2

((EUID == 0)) || fail "needs root"
command -v apt-get >/dev/null || fail "this is not a Debian system"
[[ $release =~ ^[a-z]+$ ]] || fail "\"$release\" is not the name of a Debian release; bookworm is one"
unshare --mount --pid --fork true 2>/dev/null || fail "the kernel refuses new namespaces (unshare --mount --pid)"
repository=$(git -C "$(dirname "$0")/.." rev-parse --show-toplevel)
place=/var/tmp/maniple-fresh
base=$place/$release cache=$place/$release-ccache
mkdir -p "$place" "$cache"

# The lock makes concurrent runs create the base system only once.
exec {lock}>"$place/$release.lock"
flock "$lock"
if [[ ! -e $base/.ready ]]; then
  if ! command -v debootstrap >/dev/null; then
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends debootstrap; } >"$place/apt.log" 2>&1 ||
      { tail -n 3 "$place/apt.log" >&2; fail "debootstrap cannot be installed"; }
  fi
  mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null || true; } |
    sed -n 's/^URIs: *//p; s/^deb \(\[[^]]*\] \)\?\([^ ]*\) .*/\2/p' | sed -n 1p)
  echo "fresh: making a pristine Debian $release" >&2
  rm -rf --one-file-system "$base" && mkdir -p "$base"
  script=/usr/share/debootstrap/scripts/$release
  [[ -e $script ]] || script=/usr/share/debootstrap/scripts/sid  # the release is newer than debootstrap
  debootstrap --variant=minbase --include=ca-certificates,git "$release" "$base" "$mirror" "$script" >"$place/$release.log" 2>&1 ||
    { tail -n 20 "$place/$release.log" >&2; fail "debootstrap could not make Debian $release"; }
  # Use this machine's package sources.
  rm -rf "$base/etc/apt" && cp -a /etc/apt "$base/etc/apt"
  { grep -rl "$own" "$base/etc/apt" || true; } | xargs -r sed -i "s/$own/$release/g"
  touch "$base/.ready"
fi
flock -u "$lock"
[[ -z $prepare ]] || exit 0

run=$(mktemp -d "$place/run-XXXXXX")
cleanup() { if [[ -n $keep ]]; then echo "fresh: kept in $run" >&2; else rm -rf --one-file-system "$run"; fi; }
trap cleanup EXIT
mkdir "$run"/{upper,work,root}
export base run repository cache cold as_user
status=0
# A separate mount and process namespace: all mounts and processes disappear when the command ends.
unshare --mount --pid --fork --kill-child bash -c '
  set -euo pipefail
  mount -t overlay overlay -o "lowerdir=$base,upperdir=$run/upper,workdir=$run/work" "$run/root"
  cd "$run/root"
  mount -t proc proc proc; mount --rbind /sys sys; mount --rbind /dev dev; mount -t tmpfs tmpfs run; mount -t tmpfs tmpfs tmp
  for file in /etc/resolv.conf /etc/hosts /etc/npmrc; do [[ ! -e $file ]] || cp -L "$file" ".$file"; done
  echo force-unsafe-io >etc/dpkg/dpkg.cfg.d/throwaway  # the system need not survive a crash
  home=root/project
  if [[ -n $as_user ]]; then
    chroot . useradd --create-home --shell /bin/bash newcomer
    home=home/newcomer
  fi
  mkdir -p "$home"
  git -c advice.detachedHead=false -c safe.directory="*" clone -q "file://$repository" "$home/maniple"
  if [[ -z $cold ]]; then mkdir -p ccache && mount --bind "$cache" ccache; fi
  in_it() { # in_it [CHROOT OPTIONS...] HOME COMMAND...
    local options=()
    while [[ $1 == --* ]]; do options+=("$1"); shift; done
    local home=$1
    shift
    chroot "${options[@]}" . /usr/bin/env -i HOME="/$home" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
      TERM="${TERM:-dumb}" CI="${CI:-}" ${cold:+CCACHE_DISABLE=1} CCACHE_DIR=/ccache CCACHE_MAXSIZE=10G CCACHE_UMASK=000 \
      bash -c "cd \"\$HOME/maniple\" && exec \"\$@\"" fresh "$@"
  }
  if [[ -n $as_user ]]; then
    chown -R --reference="$home" "$home/maniple"
    [[ -n $cold ]] || chmod -R a+rwX ccache
    in_it "$home" ./scripts/setup.sh
    in_it --userspec=newcomer:newcomer "$home" "$@"
  else
    in_it "$home" "$@"
  fi
' fresh "$@" || status=$?
exit "$status"
