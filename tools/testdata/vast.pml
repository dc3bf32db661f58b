/* Must fail: too many states for the memory or the time that the self-test allows. */

byte a, b, c, d;

active proctype p() {
	select(a : 0 .. 250);
	select(b : 0 .. 250);
	select(c : 0 .. 250);
	select(d : 0 .. 250)
}
