#!/usr/bin/env bash
# spin.sh MODEL.pml... checks SPIN models exhaustively and proves that the checks can fail.
#
# What a model says about itself, in one-line comments anywhere in the file:
#
#   /* PANFLAGS: -DVECTORSZ=4096 -DCOLLAPSE */     flags for compiling the checker (pan)
#   /* CONFIG name: -DPOSTERS=3 depth=5000000 */   one exhaustive check; as many as wanted
#   /* MUTANT norecheck: drop the re-check */      a fault, compiled in by #ifdef MUT_norecheck
#   /* MUTANT nocut @reuse: forget the cut */      the same, hunted in the configuration "reuse"
#
# Without a CONFIG line there is one configuration, "default", without flags. A mutant is
# built on top of the configuration behind its @, otherwise of the first one.
# The words a CONFIG may hold:
#
#   -DX=1, -UX   for the model's preprocessor
#   depth=N      pan's search depth; the default is 2000000, at about 50 bytes each
#   progress     hunt non-progress cycles (livelocks) instead of checking safety
#   ltl=NAME     check the claim NAME (ltl or never) with acceptance cycles; a claim that
#                no configuration names is not checked, and safety checks run without claims
#   fair         with progress or ltl: weak fairness
#   big          so many states that the checker is worth optimising: some hundred thousand;
#                not for the mutants of the configuration, which end early
#   slow         run only with SPIN_SLOW=1, otherwise say that it was skipped
#
# Failed assertions and invalid end states (deadlocks) are errors. The run fails when
#   - a configuration has an error, or its search was not complete (depth, memory, time),
#   - SPIN finds no error in a mutant, or something other than an error ends the search,
#   - MUT_x is used in the model and has no MUTANT line, or the other way round.
#
# Environment: SPIN_TIMEOUT seconds for each check (600), SPIN_MEM megabytes (4096),
# SPIN_SLOW=1, SPIN_OPT for compiling the checker (-O0, for that is most of a check, and -O2
# for what is big), SPIN_SHARE=I/N to do every Nth check only, from the Ith on, and SPIN_ONLY=NAME
# to run one configuration or mutant while working on a model.
set -euo pipefail

limit=${SPIN_TIMEOUT:-600}
mem=${SPIN_MEM:-4096}
only=${SPIN_ONLY:-}
share=${SPIN_SHARE:-1/1}
count=0
failed=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# ours NAME says whether the check is among those to do.
ours() {
	count=$((count + 1))
	[ "${only:-$1}" = "$1" ] && [ $((count % ${share#*/})) = $((${share%/*} % ${share#*/})) ]
}

# report VERDICT CHECK TEXT prints the one line of a check.
report() {
	printf '%-4s %-16s %-22s %s\n' "$1" "$(basename "$model")" "$2" "$3"
	if [ "$1" = FAIL ]; then failed=1; fi
}

# directives KEYWORD prints what follows /* KEYWORD, up to the end of the comment.
directives() { sed -nE "s,^[[:space:]]*/\*[[:space:]]*$1:?[[:space:]]+(.*[^[:space:]])[[:space:]]*\*/.*,\1,p" "$model"; }

# search WORDS... builds and runs the checker; the answer is in $work/out, build errors too.
search() {
	local opt=-O0 word depth=2000000 mode=(-DSAFETY -DNOCLAIM) run=() cpp=()
	for word; do
		case $word in
		"") ;;
		-[DU]*) cpp+=("$word") ;;
		depth=*) depth=${word#*=} ;;
		progress) mode=(-DNP -DNOCLAIM) run+=(-l) ;;
		ltl=*) mode=() run+=(-a -N "${word#*=}") ;;
		fair) run+=(-f) ;;
		big) opt=-O2 ;;
		slow) ;;
		*) echo "unknown word in CONFIG: $word" >"$work/out" && return 1 ;;
		esac
	done
	rm -f "$work"/pan* "$work"/*.trail
	cp "$model" "$work/model.pml"
	sim=(spin "${cpp[@]}" -t -p -g model.pml)
	opt=${SPIN_OPT:-$opt}
	(
		cd "$work"
		{ spin "${cpp[@]}" -a model.pml && cc "$opt" -w -DMEMLIM="$mem" "${mode[@]}" "${panflags[@]}" -o pan pan.c; } >out 2>&1 || exit 1
		timeout -k 5 "$limit" ./pan "-m$depth" "${run[@]}" >out 2>&1 || echo "pan: exit status $?" >>out
	)
}

errors() { sed -nE 's/^State-vector .* errors: ([0-9]+).*/\1/p' "$work/out"; }
reason() { grep -m1 -E '^(pan:[0-9]|pan: (reached|out|exit)|error:|spin:)|max search depth|out of memory|exit status|rror: ' "$work/out" || echo "no error found"; }

# complete says whether the search was exhaustive and without approximation.
complete() {
	grep -q '^Full statespace search' "$work/out" &&
		! grep -qE 'Search not completed|max search depth too small|out of memory|hash-compact|exit status' "$work/out"
}

# figures prints states, depth, seconds and how many of the model's statements were never reached.
figures() {
	awk -v secs="$1" '/states, stored/ {s = $1} /depth reached/ {d = $6} /of [0-9]+ states\)/ {gsub(/[(]/, ""); u += $1}
		END {sub(/,/, "", d); printf "%.0f states, depth %d, %d s, unreached %d", s, d, secs, u}' "$work/out"
}

check_config() { # NAME WORDS...
	local name=$1 start=$SECONDS
	shift
	if [[ " $* " == *" slow "* && ${SPIN_SLOW:-} != 1 ]]; then
		report skip "$name" "slow; run with SPIN_SLOW=1"
	elif search "$@" && complete && [ "$(errors)" = 0 ]; then
		report ok "$name" "$(figures $((SECONDS - start)))"
	else
		report FAIL "$name" "$(reason), after $((SECONDS - start)) s"
		grep -E 'errors:|Warning' "$work/out" || tail -n 5 "$work/out"
		if [ -f "$work/model.pml.trail" ]; then (cd "$work" && "${sim[@]}" | tail -n 60) || true; fi
	fi
}

check_mutant() { # NAME WORDS...
	local name=$1 start=$SECONDS found
	shift
	if search "-DMUT_$name" "${@/#big/}" && found=$(errors) && [ "${found:-0}" -gt 0 ]; then
		report ok "MUT_$name" "caught: $(reason | cut -c1-90), $((SECONDS - start)) s"
	else
		report FAIL "MUT_$name" "not caught: $(reason)"
	fi
}

check_model() {
	local line name where first="" used listed
	declare -A configs=() mutants=()
	local order=() hunts=()
	read -ra panflags <<<"$(directives PANFLAGS | tr '\n' ' ')"
	if [[ " ${panflags[*]} " =~ \ -D(BITSTATE|HC) ]]; then report FAIL - "BITSTATE and HC searches are not exhaustive"; fi

	while read -r line; do
		if [ -z "$line" ]; then continue; fi
		name=${line%%:*}
		order+=("$name") configs[$name]=${line#*:}
		first=${first:-$name}
	done <<<"$(directives CONFIG)"
	if [ -z "$first" ]; then first=default order=(default) configs[default]=""; fi

	while read -r line; do
		if [ -z "$line" ]; then continue; fi
		read -r name where <<<"${line%%:*}"
		where=${where#@}
		hunts+=("$name") mutants[$name]=${where:-$first}
	done <<<"$(directives MUTANT)"
	used=$(grep -oE '\bMUT_\w+' "$model" | sort -u | tr '\n' ' ' || true)
	listed=$(printf 'MUT_%s\n' "${hunts[@]}" | sort -u | grep -v '^MUT_$' | tr '\n' ' ' || true)
	if [ "$used" != "$listed" ]; then report FAIL - "mutants used: ${used:-none}, mutants listed: ${listed:-none}"; fi

	for name in "${order[@]}"; do
		if ! ours "$name"; then continue; fi
		read -ra words <<<"${configs[$name]}"
		check_config "$name" "${words[@]}"
	done
	for name in "${hunts[@]}"; do
		if ! ours "$name"; then continue; fi
		where=${mutants[$name]}
		if [ -z "${configs[$where]+set}" ]; then report FAIL "MUT_$name" "no such CONFIG: $where" && continue; fi
		read -ra words <<<"${configs[$where]}"
		check_mutant "$name" "${words[@]}"
	done
}

if [ $# -eq 0 ]; then echo "usage: spin.sh MODEL.pml..." >&2 && exit 2; fi
for model; do check_model; done
exit $failed
