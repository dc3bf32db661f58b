/* Must fail: the search ends at a depth of 50, before the wrong assertion. */
/* CONFIG default: depth=50 */

byte n;

active proctype p() {
	do
	:: n < 200 -> n++
	:: n == 200 -> break
	od;
	assert(n == 0)
}
