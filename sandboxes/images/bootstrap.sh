#!/bin/sh
# A Debian base image without any registry: debootstrap into a folder, `docker import` of that folder.
# Usage, as root: bootstrap.sh [NAME [SUITE [MIRROR]]]. Does nothing where the image is there already; about a minute.
set -eu
name=${1:-agentrl-base}
suite=${2:-bookworm}
mirror=${3:-} # debootstrap's own, where none is given
packages=python3,python3-numpy,python3-pytest

if docker image inspect "$name" >/dev/null 2>&1; then
  echo "$name is there already"
  exit 0
fi
if ! command -v debootstrap >/dev/null; then
  echo "bootstrap.sh: debootstrap is missing: apt-get install -y debootstrap" >&2
  exit 2
fi
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include="$packages" "$suite" "$root" ${mirror:+"$mirror"} >"$root.log" 2>&1 || {
  tail -n 5 "$root.log" >&2
  exit 1
}
rm -f "$root.log"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/doc/* "$root"/usr/share/man/*
tar -C "$root" -c . | docker import - "$name" >/dev/null
echo "$name is made"
