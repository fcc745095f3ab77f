# shellcheck shell=bash
# Sourced by the other scripts here: where images are kept, and podman and buildah with a store of their own.
#
# Everything lies below $images, outside the tree; the store of the machine's own podman is not touched. No daemon, no registry, no network:
# packages come in as wheels that `images/build` fetches beforehand.
. "$(dirname -- "${BASH_SOURCE[0]}")/../scripts/lib.sh"

images=$cache/images
base_recipe=(--variant=essential --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr --include=python3 bookworm) # for mmdebstrap
base_image=${IMAGE_BASE:-localhost/driver-manager-base:$(printf '%s\n' "${base_recipe[@]}" | short_hash)}
store=(--root "$images/store" --runroot "$images/run" --storage-driver "${STORAGE_DRIVER:-overlay}")

own_podman() { # runc and cgroupfs: crun needs cgroups v2, systemd's manager needs systemd
    podman "${store[@]}" --runtime runc --cgroup-manager cgroupfs "$@"
}

own_buildah() { buildah "${store[@]}" "$@"; }
