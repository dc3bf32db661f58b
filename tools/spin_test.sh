#!/usr/bin/env bash
# spin_test.sh proves on the models of testdata that spin.sh passes what it should and
# fails for the reason it should. It takes half a minute, most of it compiling.
set -euo pipefail
cd "$(dirname "$0")"
bad=0

# run MODEL STATUS: spin.sh must exit with STATUS; what it prints is kept for want.
run() {
	local status=0
	out=$(SPIN_OPT=-O0 SPIN_MEM=400 SPIN_TIMEOUT=${seconds:-60} SPIN_ONLY='' SPIN_SLOW='' ./spin.sh "testdata/$1.pml" 2>&1) || status=$?
	want "$1 exit $2" <<<"$1 exit $status"
}

# want REGEXP: a line of standard input must match.
want() {
	if ! grep -qE "$1"; then
		printf 'spin_test: want "%s" in:\n%s\n' "$1" "$out"
		bad=1
	fi
}

run good 0
for check in two four live claim; do want "^ok .* $check .* states" <<<"$out"; done
want '^skip .* huge' <<<"$out"
want '^ok .*MUT_nolock .*caught.*assertion violated' <<<"$out"
want '^ok .*MUT_keep .*caught.*invalid end state' <<<"$out"
want '^ok .*MUT_spin .*caught.*non-progress cycle' <<<"$out"
run idle_mutant 1
want '^ok .* default' <<<"$out"
want '^FAIL .*MUT_idle .*not caught' <<<"$out"
run unlisted_mutant 1
want '^FAIL .*MUT_forgotten.*listed: none' <<<"$out"
run shallow 1
want '^FAIL .*max search depth' <<<"$out"
run wrong 1
want '^FAIL .*assertion violated' <<<"$out"
run vast 1
want '^FAIL .*(out of memory|MEMLIM)' <<<"$out"
seconds=0.2 run vast 1
want '^FAIL .*exit status 124' <<<"$out"
run broken 1
want '^FAIL .*Error: ' <<<"$out"

if [ $bad -eq 0 ]; then echo "spin_test: spin.sh passes and fails as it should"; fi
exit $bad
