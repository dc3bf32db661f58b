/* Must fail: its mutant changes nothing that an assertion sees. */
/* MUTANT idle: count by two, which nobody checks */

byte n;

active proctype p() {
#ifdef MUT_idle
	n = n + 2;
#else
	n = n + 1;
#endif
	assert(n > 0)
}
