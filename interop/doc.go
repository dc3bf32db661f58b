// Package interop holds Doorbell's side of conversations with unmodified Linux programs, and
// the tests that have these conversations.
//
// Each file is what one program of rdma-core or perftest speaks, written on package transport
// alone: rdma_client and rdma_server, ucmatose, udaddy, ib_send_bw and its kin. What cmd/perf
// offers to its users too, rping, ibv_rc_pingpong and its kin, is in package internal/linuxpeer.
// A function is one end of it, for one connection; the other end may be the Linux
// program over a kernel's RDMA stack, or the same file's counterpart over Doorbell:
//
//	err := interop.RDMAClient(ctx, dev, server, 0)
//
// Ordinary tests let both ends of each be Doorbell, on loopback. With the build tag "interop",
// on Linux and as root, tests boot Debian's kernel under QEMU and talk to its rdma_rxe:
//
//	go test -tags interop ./interop
//
// The rig is in rig_test.go, the guest's kernel and programs come from image.sh, and the
// guest's first process is the program in guest. Nothing leaves the network namespace that
// the tests make for themselves.
package interop
