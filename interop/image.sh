#!/bin/sh
# image.sh DIR: build DIR/vmlinuz and DIR/base.cpio, the kernel and user space of the guest
# that the tests in this folder talk to: Debian's stock kernel with rdma_rxe, and the RDMA
# tools of rdma-core and perftest. Does nothing when DIR holds what this very script made.
#
# Needs root and, on Debian, apt: what is missing of its own tools gets installed. It changes
# nothing else on the machine: packages of the guest are unpacked, never configured or run.
# A minute or two, 120 MB to download.
set -eu

SUITE=bookworm
PACKAGES=linux-image-amd64,rdma-core,ibverbs-utils,ibverbs-providers,rdmacm-utils,perftest,iproute2,kmod,bash,coreutils,procps
MODULES="virtio_pci virtio_net virtio_rng rdma_rxe rdma_ucm ib_uverbs crc32_generic crc32-pclmul"

say() { echo "image.sh: $*" >&2; }
[ $# = 1 ] || { say "usage: image.sh DIR"; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
stamp=$(sha256sum "$0" | cut -c 1-64)

exec 9>"$dir/lock"
flock 9
[ "$(cat "$dir/stamp" 2>/dev/null)" = "$stamp" ] && exit 0
[ "$(id -u)" = 0 ] || { say "needs root to build the guest image"; exit 1; }

# command:package pairs of what this script, and later the tests, run on this machine.
missing=
for pair in qemu-system-x86_64:qemu-system-x86 mmdebstrap:mmdebstrap depmod:kmod cpio:cpio ip:iproute2 \
	nft:nftables tcpdump:tcpdump gcc:gcc; do
	PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
done
for pair in infiniband/verbs.h:libibverbs-dev rdma/rdma_cma.h:librdmacm-dev; do
	[ -e "/usr/include/${pair%%:*}" ] || missing="$missing ${pair#*:}"
done
if [ -n "$missing" ]; then
	command -v apt-get >/dev/null || { say "install these first:$missing"; exit 1; }
	say "installing$missing"
	export DEBIAN_FRONTEND=noninteractive
	# shellcheck disable=SC2086 # a list of words
	apt-get install -q -y --no-install-recommends $missing >"$dir/apt.log" 2>&1 ||
		{ apt-get update -q >"$dir/apt.log" 2>&1 && apt-get install -q -y --no-install-recommends $missing >>"$dir/apt.log" 2>&1; } ||
		{ say "apt-get failed:"; tail -n 5 "$dir/apt.log" >&2; exit 1; }
fi
PATH=$PATH:/usr/sbin:/sbin

work=$(mktemp -d "$dir/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt's own user must get in
root=$work/root
say "unpacking $SUITE: $PACKAGES"
mmdebstrap --quiet --variant=extract --include="$PACKAGES" "$SUITE" "$root" >"$dir/mmdebstrap.log" 2>&1 ||
	{ say "mmdebstrap failed:"; tail -n 5 "$dir/mmdebstrap.log" >&2; exit 1; }

# Of some 400 MB keep what the guest uses: it lives in memory.
mv "$root"/boot/vmlinuz-* "$work/vmlinuz"
version=$(basename "$root"/lib/modules/*)
mv "$root/lib/modules/$version" "$work/modules"
mkdir -p "$work/tree/lib/modules" "$root/lib/modules/$version"
mv "$work/modules" "$work/tree/lib/modules/$version"
depmod -b "$work/tree" "$version"
for m in $MODULES; do
	modprobe -d "$work/tree" -S "$version" --show-depends "$m" 2>/dev/null || true # some are built in
done | awk '$1 == "insmod" { print $2 }' | sort -u | while read -r file; do
	to=$root/lib/modules/$version/${file#*/modules/"$version"/}
	mkdir -p "$(dirname "$to")"
	cp "$file" "$to"
done
cp "$work/tree/lib/modules/$version"/modules.order "$work/tree/lib/modules/$version"/modules.builtin* "$root/lib/modules/$version/"
depmod -b "$root" "$version"
rm -rf "$root"/boot "$root"/usr/share "$root"/var "$root"/usr/include "$root"/usr/lib/python3* "$root"/usr/lib/x86_64-linux-gnu/perl* \
	"$root"/usr/bin/perl* "$root"/usr/lib/x86_64-linux-gnu/libperl* "$root"/usr/lib/x86_64-linux-gnu/gconv "$root"/usr/lib/udev "$root"/lib/udev "$root"/lib/systemd "$root"/usr/lib/systemd "$root"/usr/lib/apt
find "$root"/usr/lib/x86_64-linux-gnu/libibverbs "$root"/etc/libibverbs.d -type f ! -name '*rxe*' -delete
mkdir -p "$root"/proc "$root"/sys "$root"/dev "$root"/tmp "$root"/run "$root"/root "$root"/var
echo 'root:x:0:0:root:/root:/bin/bash' >"$root/etc/passwd"
echo 'root:x:0:' >"$root/etc/group"
echo 'hosts: files' >"$root/etc/nsswitch.conf"
# librdmacm's helpers find the wildcard address by name.
printf '127.0.0.1 localhost\n10.77.0.1 host\n10.77.0.2 guest\n' >"$root/etc/hosts"

(cd "$root" && find . | cpio --quiet -o -H newc -R 0:0) >"$work/base.cpio"
mv "$work/vmlinuz" "$work/base.cpio" "$dir/"
echo "$version" >"$dir/kernel"
echo "$stamp" >"$dir/stamp"
say "built $(du -h "$dir/base.cpio" | cut -f 1) of user space, kernel $version"
