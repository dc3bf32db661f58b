/* A lock taken by test-and-set: everything about it can be checked, and every fault is seen.
   With MUT_ untouched it must pass in all its configurations. */
/* PANFLAGS: -DCOLLAPSE */
/* CONFIG two: -DN=2 */
/* CONFIG four: -DN=4 depth=100000 */
/* CONFIG live: -DN=1 progress */
/* CONFIG claim: -DN=2 ltl=safe */
/* CONFIG huge: -DN=200 slow */
/* MUTANT nolock: enter without looking */
/* MUTANT keep: never release, so that the others wait for ever */
/* MUTANT spin @live: go round without progress */

byte taken, inside;

active [N] proctype user() {
	do
#ifndef MUT_nolock
	:: atomic { taken == 0 -> taken = 1 }
#else
	:: true ->
#endif
		inside++;
		assert(inside == 1);
		inside--;
#ifndef MUT_spin
progress:
#endif
		skip;
#ifndef MUT_keep
		taken = 0
#endif
	od
}

ltl safe { [] (inside <= 1) }
