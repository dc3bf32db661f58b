package transport_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

const qkey = 0x11111111

// datagrams makes a UD queue pair in RTS.
func datagrams(t testing.TB, dev *transport.Device) *transport.QP {
	t.Helper()
	cq, err := dev.CreateCQ(256)
	if err != nil {
		t.Fatal(err)
	}
	q, err := dev.PD().CreateQP(transport.QPConfig{Type: verbs.UD, SendCQ: cq, RecvCQ: cq})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []verbs.QPAttr{
		{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrQKey, State: verbs.QPInit, Port: 1, QKey: qkey},
		{Mask: verbs.AttrState, State: verbs.QPRTR},
		{Mask: verbs.AttrState | verbs.AttrSQPSN, State: verbs.QPRTS, SQPSN: 9},
	} {
		if err := q.Modify(a); err != nil {
			t.Fatal(err)
		}
	}
	return q
}

// TestDatagramAndAnswer: a message reaches whom the handle names; the receiver answers with
// nothing but what the message brought, with devices bound to one address and to all.
func TestDatagramAndAnswer(t *testing.T) {
	for _, tc := range []struct{ name, a, b, to string }{
		{"IPv4", "127.1.30.1", "127.1.30.2", "127.1.30.2"},
		{"IPv6", "[::1]:4871", "[::1]:4872", "::1"},
		{"wildcard to IPv4", "[::]:4873", "127.1.30.3:4874", "127.1.30.3"},
		{"IPv4 to wildcard", "127.1.30.4:4873", "[::]:4874", "127.1.30.5"},
		{"wildcards, IPv6", "[::]:4875", "[::]:4876", "::1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := open(t, tc.a, transport.Config{}), open(t, tc.b, transport.Config{})
			ctx := deadline(t)
			qa, qb := datagrams(t, a), datagrams(t, b)
			amr, bmr := register(t, a, 4096, verbs.LocalWrite), register(t, b, 4096, verbs.LocalWrite)
			for _, q := range []struct {
				q *transport.QP
				m *transport.MR
			}{{qa, amr}, {qb, bmr}} {
				if err := q.q.PostRecv(verbs.RecvWR{WRID: 1, SGList: q.m.SGL(0, 1024)}); err != nil {
					t.Fatal(err)
				}
			}
			to, err := a.PD().CreateAH(verbs.AV{Remote: netip.AddrPortFrom(netip.MustParseAddr(tc.to), b.LocalAddr().Port())})
			if err != nil {
				t.Fatal(err)
			}
			copy(amr.Bytes()[2048:], "where am I?")
			err = qa.PostSend(verbs.SendWR{
				WRID: 2, Opcode: verbs.SendWithImm, ImmData: 77, Flags: verbs.Signaled, SGList: amr.SGL(2048, 11),
				AH: to.Handle(), RemoteQPN: qb.Num(), RemoteQKey: qkey,
			})
			if err != nil {
				t.Fatal(err)
			}
			if wc, err := qa.CQ().Next(ctx); err != nil || wc.WRID != 2 {
				t.Fatal(wc, err)
			}
			wc, err := qb.CQ().Next(ctx)
			if err != nil || wc.WRID != 1 || wc.ByteLen != transport.GRHLen+11 || wc.SrcQPN != qa.Num() || wc.ImmData != 77 ||
				string(bmr.Bytes()[transport.GRHLen:wc.ByteLen]) != "where am I?" {
				t.Fatalf("received %+v, %q, %v", wc, bmr.Bytes()[transport.GRHLen:60], err)
			}
			av, err := transport.AVFromWC(&wc, bmr.Bytes())
			if err != nil {
				t.Fatal(err)
			}
			if av.Local != netip.MustParseAddr(tc.to) {
				t.Errorf("the message came to %v", av.Local)
			}
			av.Remote = netip.AddrPortFrom(av.Remote.Addr(), a.LocalAddr().Port())
			back, err := b.PD().CreateAH(av)
			if err != nil {
				t.Fatal(err)
			}
			copy(bmr.Bytes()[2048:], av.Remote.Addr().String())
			n := len(av.Remote.Addr().String())
			err = qb.PostSend(verbs.SendWR{
				Opcode: verbs.Send, SGList: bmr.SGL(2048, n), AH: back.Handle(), RemoteQPN: wc.SrcQPN, RemoteQKey: 1 << 31, // our own Q_Key
			})
			if err != nil {
				t.Fatal(err)
			}
			wc, err = qa.CQ().Next(ctx)
			if err != nil || wc.WRID != 1 || wc.SrcQPN != qb.Num() {
				t.Fatalf("answer %+v, %v", wc, err)
			}
			if got := string(amr.Bytes()[transport.GRHLen:wc.ByteLen]); got != av.Remote.Addr().String() {
				t.Errorf("answer %q", got)
			}
			if err := errors.Join(to.Close(), back.Close(), qa.Close(), qb.Close()); err != nil {
				t.Error(err)
			}
			if err := to.Close(); !errors.Is(err, transport.ErrClosed) {
				t.Errorf("closed twice: %v", err)
			}
		})
	}
}

// TestAddressHandleErrors: what makes no handle says why, and what is no UD message gives no address.
func TestAddressHandleErrors(t *testing.T) {
	dev, all := open(t, "127.1.31.1", transport.Config{}), open(t, "[::]:4877", transport.Config{})
	for _, tc := range []struct {
		dev *transport.Device
		av  verbs.AV
	}{
		{dev, verbs.AV{}},
		{dev, verbs.AV{Remote: netip.MustParseAddrPort("0.0.0.0:1")}},
		{dev, verbs.AV{Remote: netip.MustParseAddrPort("[::1]:1")}},
		{dev, verbs.AV{Remote: netip.MustParseAddrPort("[::1]:1"), Local: netip.MustParseAddr("127.1.31.1")}},
		{all, verbs.AV{Remote: netip.MustParseAddrPort("224.0.0.9:1")}},
	} {
		if _, err := tc.dev.PD().CreateAH(tc.av); !errors.Is(err, verbs.ErrBadAttr) {
			t.Errorf("%+v: %v", tc.av, err)
		}
	}
	grh := make([]byte, 40)
	for _, wc := range []verbs.WC{{}, {Flags: verbs.WithGRH}, {Flags: verbs.WithGRH, Status: verbs.WRFlushErr}} {
		if _, err := transport.AVFromWC(&wc, grh); !errors.Is(err, verbs.ErrBadAttr) {
			t.Errorf("%+v: %v", wc, err)
		}
	}
	if err := dev.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := dev.PD().CreateAH(verbs.AV{Remote: netip.MustParseAddrPort("127.1.31.2:0")}); !errors.Is(err, transport.ErrClosed) {
		t.Errorf("on a closed device: %v", err)
	}
}

// TestUDRefusesLongMessages: at once, and what a closed handle or a narrow path makes of the rest.
func TestUDRefusesLongMessages(t *testing.T) {
	dev := open(t, "127.1.32.1", transport.Config{MaxMTU: verbs.MTU1024})
	q := datagrams(t, dev)
	mr := register(t, dev, 2048, 0)
	ah, err := dev.PD().CreateAH(verbs.AV{Remote: netip.MustParseAddrPort("127.1.32.2:0")})
	if err != nil {
		t.Fatal(err)
	}
	wr := verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Signaled, SGList: mr.SGL(0, 1025), AH: ah.Handle(), RemoteQPN: 30}
	if err := q.PostSend(wr); !errors.Is(err, verbs.ErrTooLong) {
		t.Errorf("1025 bytes: %v", err)
	}
	wr.SGList = mr.SGL(0, 1024)
	want(t, "1024 bytes", post(t, q, wr), verbs.WCSuccess)
	if err := ah.Close(); err != nil {
		t.Fatal(err)
	}
	want(t, "closed handle", post(t, q, wr), verbs.LocQPOpErr)
	if q.State() != verbs.QPSQE {
		t.Errorf("state %v", q.State())
	}
}

// TestUCConnection: Dial and Accept with UC. Messages of every size and WRITEs pass; a failed
// send leaves the connection up, and the program goes on after SQE.
func TestUCConnection(t *testing.T) {
	a, b := open(t, "127.1.33.1", transport.Config{}), open(t, "127.1.33.2", transport.Config{})
	ctx := deadline(t)
	amr, bmr := register(t, a, 1<<16, verbs.LocalWrite), register(t, b, 1<<17, verbs.LocalWrite|verbs.RemoteWrite)
	for i := range amr.Bytes() {
		amr.Bytes()[i] = byte(i * 7)
	}
	var recv []verbs.RecvWR
	for i := range 4 {
		// A place for each: what a posted receive may be written to is not to be looked at.
		recv = append(recv, verbs.RecvWR{WRID: uint64(i), SGList: bmr.SGL(i<<15, 1<<15)})
	}
	qa, qb := pair(t, a, b, transport.ConnParam{Type: verbs.UC}, transport.ConnParam{Recv: recv})
	attr, err := qb.Attr()
	if err != nil || attr.State != verbs.QPRTS || attr.Mask&verbs.AttrRetryCnt != 0 {
		t.Fatalf("the passive side is %+v, %v", attr, err)
	}
	for i, size := range []int{0, 9, 20_000} {
		want(t, fmt.Sprint(size), post(t, qa, verbs.SendWR{Opcode: verbs.Send, SGList: amr.SGL(0, size)}), verbs.WCSuccess)
		wc, err := qb.CQ().Next(ctx)
		if err != nil || wc.WRID != uint64(i) || int(wc.ByteLen) != size || !bytes.Equal(bmr.Bytes()[i<<15:][:size], amr.Bytes()[:size]) {
			t.Errorf("%d bytes: %+v, %v", size, wc, err)
		}
	}
	write := verbs.SendWR{Opcode: verbs.RDMAWriteWithImm, SGList: amr.SGL(0, 9000), RKey: bmr.RKey(), RemoteAddr: bmr.Addr() + 3<<15, ImmData: 4}
	want(t, "WRITE", post(t, qa, write), verbs.WCSuccess)
	if wc, err := qb.CQ().Next(ctx); err != nil || wc.ImmData != 4 || !bytes.Equal(bmr.Bytes()[3<<15:][:9000], amr.Bytes()[:9000]) {
		t.Errorf("WRITE: %+v, %v", wc, err)
	}
	read := verbs.SendWR{Opcode: verbs.RDMARead, SGList: amr.SGL(0, 10), RKey: bmr.RKey(), RemoteAddr: bmr.Addr()}
	if err := qa.PostSend(read); !errors.Is(err, verbs.ErrBadOpcode) {
		t.Errorf("READ: %v", err)
	}
	bad := verbs.SendWR{Opcode: verbs.Send, SGList: []verbs.SGE{{Addr: 1, Length: 9, LKey: 1}}}
	want(t, "bad key", post(t, qa, bad), verbs.LocProtErr)
	want(t, "in SQE", post(t, qa, verbs.SendWR{Opcode: verbs.Send}), verbs.WRFlushErr)
	if err := qa.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPReset}); !errors.Is(err, transport.ErrManaged) {
		t.Errorf("to RESET: %v", err)
	}
	if err := qa.Modify(verbs.QPAttr{Mask: verbs.AttrState, State: verbs.QPRTS}); err != nil {
		t.Fatal(err)
	}
	if err := qb.PostRecv(verbs.RecvWR{WRID: 9, SGList: bmr.SGL(0, 10)}); err != nil {
		t.Fatal(err)
	}
	want(t, "after SQE", post(t, qa, verbs.SendWR{Opcode: verbs.Send, SGList: amr.SGL(0, 10)}), verbs.WCSuccess)
	if wc, err := qb.CQ().Next(ctx); err != nil || wc.WRID != 9 {
		t.Errorf("after SQE: %+v, %v", wc, err)
	}
	if err := qa.Close(); err != nil {
		t.Fatal(err)
	}
	if err := qb.Wait(ctx); err != nil {
		t.Errorf("the connection ended with %v", err)
	}
}

// TestConnectionTypes: what cannot be connected is refused, on either side.
func TestConnectionTypes(t *testing.T) {
	a, b := open(t, "127.1.34.1", transport.Config{}), open(t, "127.1.34.2", transport.Config{})
	ctx := deadline(t)
	ln := listen(t, b, 7471)
	to := netip.AddrPortFrom(b.LocalAddr().Addr(), 7471)
	if _, err := a.Dial(ctx, to, transport.ConnParam{Type: verbs.UD}); err == nil || !strings.Contains(err.Error(), "UD") {
		t.Errorf("Dial with UD: %v", err)
	}
	done := make(chan error, 1)
	go func() {
		q, err := a.Dial(ctx, to, transport.ConnParam{Type: verbs.UC})
		if err == nil {
			err = q.Close()
		}
		done <- err
	}()
	req, err := ln.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if req.Type() != verbs.UC {
		t.Errorf("the request is for %v", req.Type())
	}
	if _, err := req.Accept(ctx, transport.ConnParam{Type: verbs.RC}); err == nil {
		t.Error("a UC request was accepted with RC")
	}
	if _, err := req.Accept(ctx, transport.ConnParam{}); err != nil {
		t.Errorf("accepted with its own type: %v", err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestDatagramPosters: many goroutines post to one UD queue pair, to two destinations, while
// handles come and go. Every send completes with success, and what arrives is whole.
func TestDatagramPosters(t *testing.T) {
	const posters, each = 4, 200
	a, b, c := open(t, "127.1.38.1", transport.Config{}), open(t, "127.1.38.2", transport.Config{}), open(t, "127.1.38.3", transport.Config{})
	ctx := deadline(t)
	cq, err := a.CreateCQ(posters * each)
	if err != nil {
		t.Fatal(err)
	}
	out, err := a.PD().CreateQP(transport.QPConfig{Type: verbs.UD, SendCQ: cq, RecvCQ: cq, SQSigAll: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, attr := range []verbs.QPAttr{
		{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrQKey, State: verbs.QPInit, Port: 1},
		{Mask: verbs.AttrState, State: verbs.QPRTR},
		{Mask: verbs.AttrState | verbs.AttrSQPSN, State: verbs.QPRTS},
	} {
		if err := out.Modify(attr); err != nil {
			t.Fatal(err)
		}
	}
	var ahs []*transport.AH
	var in []*transport.QP
	var mrs []*transport.MR
	for _, dev := range []*transport.Device{b, c} {
		ah, err := a.PD().CreateAH(verbs.AV{Remote: dev.LocalAddr()})
		if err != nil {
			t.Fatal(err)
		}
		ahs, in, mrs = append(ahs, ah), append(in, datagrams(t, dev)), append(mrs, register(t, dev, 128*128, verbs.LocalWrite))
	}
	for i := range in {
		for k := range 128 {
			if err := in[i].PostRecv(verbs.RecvWR{WRID: uint64(k), SGList: mrs[i].SGL(k*128, 128)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	var wg sync.WaitGroup
	for p := range posters {
		wg.Go(func() {
			text := bytes.Repeat([]byte{byte('a' + p)}, 40+p)
			for i := range each {
				k := (p + i) % 2
				wr := verbs.SendWR{Opcode: verbs.Send, InlineData: text, AH: ahs[k].Handle(), RemoteQPN: in[k].Num(), RemoteQKey: qkey}
				for err := out.PostSend(wr); err != nil; err = out.PostSend(wr) {
					if !errors.Is(err, transport.ErrQueueFull) {
						t.Error(err)
						return
					}
					runtime.Gosched()
				}
				if i%50 == 0 {
					ah, err := a.PD().CreateAH(verbs.AV{Remote: b.LocalAddr()})
					if err == nil {
						err = ah.Close()
					}
					if err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	for range posters * each {
		if wc, err := cq.Next(ctx); err != nil {
			t.Fatal(wc, err)
		}
	}
	wg.Wait()
	for i := range in {
		wc, err := in[i].CQ().Next(ctx) // the socket holds more than the receives posted
		for n := 1; err == nil; n++ {
			text := mrs[i].Bytes()[wc.WRID*128+40:][:wc.ByteLen-40]
			if p := int(text[0] - 'a'); p < 0 || p >= posters || !bytes.Equal(text, bytes.Repeat(text[:1], 40+p)) {
				t.Fatalf("arrived %q", text)
			}
			if n == 128 {
				break
			}
			wc, err = in[i].CQ().Next(ctx)
		}
		if err != nil {
			t.Error(err)
		}
	}
}
