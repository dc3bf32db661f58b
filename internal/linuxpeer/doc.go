// Package linuxpeer speaks the protocols of Linux's own RDMA programs, from either end: rping
// and the ibv_*_pingpong family as a whole, and for others of their kind the parts that they
// share, a queue pair driven by hand and what is told about it over TCP.
//
// It prints nothing and parses no flags: cmd/perf does for people, package interop for the
// suite that holds it against the programs themselves.
package linuxpeer
