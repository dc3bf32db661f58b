package linuxpeer

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// LineLen is the length of what the pingpong programs write about a queue pair: LID, QPN, PSN
// and GID in hexadecimal, with colons between, and a NUL.
const LineLen = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1

// EncodeLine returns the line of an end; the peer reads it with a single read, so it must be
// written with a single write.
func EncodeLine(e End) []byte {
	gid := e.GID.As16()
	return fmt.Appendf(nil, "%04x:%06x:%06x:%x\x00", 0, uint32(e.QPN), uint32(e.PSN), gid[:])
}

// DecodeLine reads a line.
func DecodeLine(b []byte) (e End, err error) {
	f := strings.Split(strings.TrimSuffix(string(b), "\x00"), ":")
	if len(b) != LineLen || len(f) != 4 {
		return e, fmt.Errorf("the peer's address is %q", b)
	}
	qpn, err1 := strconv.ParseUint(f[1], 16, 24)
	psn, err2 := strconv.ParseUint(f[2], 16, 24)
	gid, err3 := hex.DecodeString(f[3])
	if err := errors.Join(err1, err2, err3); err != nil || len(gid) != 16 {
		return e, fmt.Errorf("the peer's address is %q: %w", b, err)
	}
	return End{QPN: verbs.QPN(qpn), PSN: verbs.PSN(psn), GID: netip.AddrFrom16([16]byte(gid)).Unmap(), Reads: 1}, nil
}

// done is what a client writes once it knows the server. Nobody looks at what it says.
const done = "done\x00"

// introduce is the exchange of the pingpong programs, by which both learn of each other's
// queue pairs: lines of them, whether they exist or not. connect is called with the peer's
// ends in time: a client sends as soon as it knows the server.
func introduce(c net.Conn, client bool, lines int, own []End, connect func(peers []End) error) error {
	write := func() error {
		var b []byte
		for i := range lines {
			e := End{GID: netip.IPv6Unspecified()}
			if i < len(own) {
				e = own[i]
			}
			b = append(b, EncodeLine(e)...)
		}
		_, err := c.Write(b)
		return err
	}
	read := func() ([]End, error) {
		b := make([]byte, lines*LineLen)
		if _, err := io.ReadFull(c, b); err != nil {
			return nil, fmt.Errorf("the peer's address: %w", err)
		}
		peers := make([]End, len(own))
		for i := range peers {
			var err error
			if peers[i], err = DecodeLine(b[i*LineLen:][:LineLen]); err != nil {
				return nil, err
			}
		}
		return peers, nil
	}
	if client {
		if err := write(); err != nil {
			return err
		}
		peers, err := read()
		if err != nil {
			return err
		}
		if _, err := c.Write([]byte(done)); err != nil {
			return err
		}
		return connect(peers)
	}
	peers, err := read()
	if err != nil {
		return err
	}
	if err := connect(peers); err != nil {
		return err
	}
	if err := write(); err != nil {
		return err
	}
	var b [len(done)]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return fmt.Errorf("done: %w", err)
	}
	return nil
}

// Bound makes calls on c fail when ctx ends, until the returned function is called.
func Bound(ctx context.Context, c net.Conn) (release func() bool) {
	return context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
}

// Accept accepts one connection. ln is closed when ctx ends meanwhile.
func Accept(ctx context.Context, ln net.Listener) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	c, err := ln.Accept()
	if err != nil && ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return c, err
}
