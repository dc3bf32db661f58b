/* Must fail: a mutant that no MUTANT line lists would never run. */

byte n;

active proctype p() {
#ifndef MUT_forgotten
	n = 1;
#endif
	assert(n == 1)
}
