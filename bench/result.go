package bench

import "time"

// Result is what one size gave. Both ends of a session hold equal results.
type Result struct {
	Test Test
	// Size is the message size in bytes.
	Size int
	// Iters is the number of messages, over all queue pairs, that the client sent; for a
	// latency test of those that were done or answered.
	Iters uint64
	// Lost is how many messages did not arrive, in both directions; for a latency test how many
	// were not answered, and are not in Iters. It is 0 on RC.
	Lost uint64
	// Elapsed is the time from the client's first post to its last completion.
	Elapsed time.Duration
	// Peak and Average are bytes per second, Rate is messages per second; a bidirectional
	// test adds up both directions. Average and rate are of what arrived, the peak is the best
	// stretch of what was sent, of at least a millisecond and twice the messages that may be
	// under way. All are 0 in latency tests.
	Peak, Average, Rate float64
	// Latency is zero in bandwidth tests.
	Latency Latency
	// Interrupted says that the run ended before its time.
	Interrupted bool
}

// combine makes the result out of both ends' reports.
func combine(p *Params, client, server *message) Result {
	r := Result{
		Test: p.Test, Size: int(client.size), Iters: client.count, Elapsed: client.duration,
		Latency: client.lat, Interrupted: client.interrupted,
	}
	if p.Test.Latency() {
		r.Lost = client.lost
		return r
	}
	add := func(m, other *message) {
		lost := min(other.lost, m.count)
		r.Lost += lost
		rate := float64(m.count-lost) / max(m.duration, 1).Seconds()
		r.Rate += rate
		r.Average += rate * float64(m.size)
		r.Peak += max(m.peak, rate*float64(m.size))
	}
	add(client, server)
	if p.Bidirectional {
		add(server, client)
	}
	return r
}
