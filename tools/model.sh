#!/usr/bin/env bash
# model.sh [MODEL.pml...] makes sure that SPIN is here, proves that the runner can fail, and
# checks the models. As root on Debian it installs SPIN; elsewhere a missing SPIN is an
# error, unless MODEL_SKIP=1 allows to skip.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v spin >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	export DEBIAN_FRONTEND=noninteractive
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends spin >/dev/null
fi
if ! command -v spin >/dev/null; then
	echo "model: spin is missing (Debian: apt-get install spin)"
	if [ "${MODEL_SKIP:-}" = 1 ]; then echo "model: skipped" && exit 0; fi
	exit 1
fi

tools/spin_test.sh
if [ $# -eq 0 ]; then echo "model: docs/model holds no model yet" && exit 0; fi
# Each half of a model in a process of its own, as many as there are processors; a line names its model.
for model; do printf '%s\0' 1/2 "$model" 2/2 "$model"; done |
	xargs -0 -n 2 -P "$(getconf _NPROCESSORS_ONLN)" sh -c 'SPIN_SHARE=$1 exec tools/spin.sh "$2"' sh
