#!/usr/bin/env bash
# fuzz.sh 10s runs every fuzz target of the module for 10 seconds, one after the other. It
# goes on after a failure, so that one run shows all of them, and fails at the end. The
# failing input is then in the package's testdata/fuzz; commit it with the fix.
set -euo pipefail

each=${1:?usage: fuzz.sh 10s}
[[ $each =~ ^[0-9]+s$ ]] || { echo "fuzz.sh: a time in seconds like 10s, not $each" >&2; exit 2; }
go=${GO:-go}
limit=$((${each%s} + 300)) # for building, for the seeds, and for a target that hangs
log=$(mktemp)
trap 'rm -f "$log"' EXIT
count=0
failed=()

# "go test -list" prints the targets of a package, then a line that names the package.
targets=$("$go" test -list '^Fuzz' ./... | awk '/^FAIL/ {print > "/dev/stderr"}
	/^Fuzz/ {f[n++] = $1} /^ok/ {for (i = 0; i < n; i++) print $2, f[i]; n = 0}')
if [ -z "$targets" ]; then echo "fuzz: there are no fuzz targets yet" && exit 0; fi

# ended_late says whether a run failed only because its time was up: the fuzzing coordinator
# of Go before 1.27 sometimes reports its own deadline as a failure (go.dev/issue/75804). A
# true failure names the input that it has written, or says what happened to the process.
ended_late() {
	grep -qx '    context deadline exceeded' "$log" &&
		[ "$(grep -cE '^ {4}[^ ]' "$log")" = 1 ] && ! grep -q 'Failing input' "$log"
}

while read -r package target; do
	echo "fuzz: $package $target"
	count=$((count + 1))
	if ! timeout -k 10 "$limit" "$go" test -run '^$' -fuzz "^$target\$" -fuzztime "$each" "$package" </dev/null >"$log" 2>&1; then
		if ended_late; then
			echo "fuzz: its time ran out; no input failed"
		else
			failed+=("$package.$target")
			cat "$log"
		fi
	fi
	grep -E '^fuzz: elapsed' "$log" | tail -n 1 || true
done <<<"$targets"

echo "fuzz: $count targets for $each, ${#failed[@]} failed ${failed[*]}"
[ ${#failed[@]} -eq 0 ]
