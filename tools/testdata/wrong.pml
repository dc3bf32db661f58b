/* Must fail: two processes count without a lock, and an update is lost. */

byte n, done;

active [2] proctype p() {
	byte t;
	t = n;
	n = t + 1;
	done++;
	done == 2 -> assert(n == 2)
}
