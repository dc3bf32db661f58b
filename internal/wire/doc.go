// Package wire is one wire without its socket: the queue pairs of one UDP port, the
// connection manager, the timers and the windows towards each peer, driven by step(now)
// over a link.Link.
//
// A wire has one owner at a time, and all methods are the owner's alone unless they say
// otherwise. Posters reach it through one lock-free list: they mark a queue pair ready, once
// per look that the owner takes.
//
//	Ring (anyone) --> ready list --+
//	link.Recv --> ICRC, address, P_Key --> queue pair / connection manager
//	deadlines ----> timers --------+
//	                               v
//	                     run queue, round robin --> packets --> ICRC --> trains --> link.Send
//
// A step ends in this order: events, then completions. A queue pair that a first request
// moved to RTS is in RTS, and whoever listens has been told, before the completion of that
// request can be seen.
//
// The glue between connection manager and queue pairs (conn.go) is here and not above, so
// that the simulator drives the very code that ships.
package wire
