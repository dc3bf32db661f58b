package qp

import (
	"bytes"
	"errors"
	"testing"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// What a request can be refused for, in the order in which it is looked at.
func TestSendCheck(t *testing.T) {
	sge := func(n uint32) verbs.SGE { return verbs.SGE{Addr: sendBase, Length: n, LKey: sendKey} }
	one := func(s ...verbs.SGE) []verbs.SGE { return s }
	const giant = 1 << 31
	tests := []struct {
		name string
		typ  verbs.QPType
		wr   verbs.SendWR
		want error
	}{
		{"empty message", verbs.RC, verbs.SendWR{Opcode: verbs.Send}, nil},
		{"every SGE", verbs.RC, verbs.SendWR{Opcode: verbs.Send, SGList: one(sge(1), sge(2))}, nil},
		{"a key that does not exist is the wire's to find", verbs.RC, verbs.SendWR{Opcode: verbs.Send, SGList: one(verbs.SGE{Length: 1})}, nil},
		{"2^31 bytes", verbs.RC, verbs.SendWR{Opcode: verbs.RDMAWrite, SGList: one(sge(giant))}, nil},
		{"2^31 bytes and one", verbs.RC, verbs.SendWR{Opcode: verbs.RDMAWrite, SGList: one(sge(giant), sge(1))}, verbs.ErrTooLong},
		{"two times 2^32-1", verbs.RC, verbs.SendWR{Opcode: verbs.Send, SGList: one(sge(1<<32-1), sge(1<<32-1))}, verbs.ErrTooLong},
		{"three SGEs", verbs.RC, verbs.SendWR{Opcode: verbs.Send, SGList: one(sge(1), sge(1), sge(1))}, verbs.ErrTooManySGE},
		{"opcode before SGEs", verbs.RC, verbs.SendWR{Opcode: 10, SGList: one(sge(1), sge(1), sge(1))}, verbs.ErrBadOpcode},
		{"opcode of a higher bit", verbs.RC, verbs.SendWR{Opcode: 16 + verbs.Send}, verbs.ErrBadOpcode},
		{"opcode 255", verbs.RC, verbs.SendWR{Opcode: 255}, verbs.ErrBadOpcode},
		{"UC: READ", verbs.UC, verbs.SendWR{Opcode: verbs.RDMARead}, verbs.ErrBadOpcode},
		{"UC: WRITE", verbs.UC, verbs.SendWR{Opcode: verbs.RDMAWrite}, nil},
		{"UD: WRITE", verbs.UD, verbs.SendWR{Opcode: verbs.RDMAWrite}, verbs.ErrBadOpcode},
		{"UD: SEND with immediate", verbs.UD, verbs.SendWR{Opcode: verbs.SendWithImm, AH: 1}, nil},
		{"UD: no address", verbs.UD, verbs.SendWR{Opcode: verbs.Send}, verbs.ErrBadWR},
		{"UD: QPN of 25 bits", verbs.UD, verbs.SendWR{Opcode: verbs.Send, AH: 1, RemoteQPN: 1 << 24}, verbs.ErrBadWR},

		{"atomic", verbs.RC, verbs.SendWR{Opcode: verbs.AtomicFetchAdd, SGList: one(sge(8))}, nil},
		{"atomic of 4 bytes", verbs.RC, verbs.SendWR{Opcode: verbs.AtomicFetchAdd, SGList: one(sge(4))}, verbs.ErrBadWR},
		{"atomic in two SGEs", verbs.RC, verbs.SendWR{Opcode: verbs.AtomicCmpAndSwp, SGList: one(sge(4), sge(4))}, verbs.ErrBadWR},
		{"atomic inline", verbs.RC, verbs.SendWR{Opcode: verbs.AtomicFetchAdd, Flags: verbs.Inline, SGList: one(sge(8))}, verbs.ErrBadWR},
		{"local invalidate", verbs.RC, verbs.SendWR{Opcode: verbs.LocalInv}, nil},
		{"local invalidate of bytes", verbs.RC, verbs.SendWR{Opcode: verbs.LocalInv, SGList: one(sge(1))}, verbs.ErrBadWR},

		{"inline data", verbs.RC, verbs.SendWR{Opcode: verbs.Send, InlineData: make([]byte, 32)}, nil},
		{"inline data, none", verbs.RC, verbs.SendWR{Opcode: verbs.Send, InlineData: []byte{}}, nil},
		{"inline data too long", verbs.RC, verbs.SendWR{Opcode: verbs.Send, InlineData: make([]byte, 33)}, verbs.ErrInlineTooBig},
		{"inline SGEs", verbs.RC, verbs.SendWR{Opcode: verbs.RDMAWrite, Flags: verbs.Inline, SGList: one(sge(16), sge(16))}, nil},
		{"inline SGEs too long", verbs.RC, verbs.SendWR{Opcode: verbs.RDMAWrite, Flags: verbs.Inline, SGList: one(sge(16), sge(17))}, verbs.ErrInlineTooBig},
		{"inline data and SGEs", verbs.RC, verbs.SendWR{Opcode: verbs.Send, InlineData: []byte{1}, SGList: one(sge(1))}, verbs.ErrBadWR},
		{"inline READ", verbs.RC, verbs.SendWR{Opcode: verbs.RDMARead, Flags: verbs.Inline, SGList: one(sge(1))}, verbs.ErrBadWR},
		{"inline from an unknown key", verbs.RC, verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Inline, SGList: one(verbs.SGE{Addr: sendBase, Length: 1})}, verbs.ErrBadKey},
		{"inline beyond the region", verbs.RC, verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Inline, SGList: one(verbs.SGE{Addr: sendBase + 4095, Length: 2, LKey: sendKey})}, verbs.ErrBadKey},
		{"inline of nothing from nowhere", verbs.RC, verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Inline, SGList: one(verbs.SGE{Addr: 1, LKey: 2})}, nil},
	}
	for _, tt := range tests {
		mem := &testMem{}
		mem.add(testPD, sendKey, sendBase, 4096, 0)
		q := newSendQueue(tt.typ, smallCap(4), false, mem, testPD, 0)
		q.move(verbs.QPInit)
		q.move(verbs.QPRTR)
		n, _, err := q.Post([]verbs.SendWR{tt.wr})
		if err != tt.want || (n == 1) != (tt.want == nil) {
			t.Errorf("%s: n %d, err %v, want %v", tt.name, n, err, tt.want)
		}
		if used := q.InUse(); used != n {
			t.Errorf("%s: %d slots in use after %d were taken", tt.name, used, n)
		}
		if tt.want == nil {
			continue
		}
		// The state is said first: in RESET that is what is wrong.
		q.move(verbs.QPReset)
		if _, _, err := q.Post([]verbs.SendWR{tt.wr}); err != verbs.ErrBadState {
			t.Errorf("%s: in RESET: %v", tt.name, err)
		}
	}
}

// A malformed request in the middle of a chain: those before it go, none after; and when the
// queue runs full before it, that is what is said.
func TestSendBadInChain(t *testing.T) {
	for _, depth := range []int{8, 2} {
		for _, bad := range []func(*verbs.SendWR) error{
			func(wr *verbs.SendWR) error { wr.Opcode = 12; return verbs.ErrBadOpcode },
			func(wr *verbs.SendWR) error {
				wr.InlineData = make([]byte, 33)
				wr.SGList = nil
				return verbs.ErrInlineTooBig
			},
		} {
			q, _ := newSQ(depth, 0)
			q.move(verbs.QPRTS)
			wrs := sends(1, 2, 3, 4, 5)
			want, took := bad(&wrs[2]), 2
			if depth == 2 {
				mustPost(t, q, true, 0)
				want, took = verbs.ErrQueueFull, 1
			}
			n, ring, err := q.Post(wrs)
			if n != took || !ring || !errors.Is(err, want) {
				t.Errorf("depth %d: n %d, ring %v, err %v; want %d, a ring and %v", depth, n, ring, err, took, want)
			}
			if depth == 2 {
				wantGone(t, serve(q), FateSend, 0, 1)
			} else {
				wantGone(t, serve(q), FateSend, 1, 2)
			}
		}
	}
}

func TestSendNothing(t *testing.T) {
	q, _ := newSQ(4, 0)
	q.move(verbs.QPRTS)
	if n, ring, err := q.Post(nil); n != 0 || ring || err != nil {
		t.Errorf("post of nothing: n %d, ring %v, err %v", n, ring, err)
	}
}

// Every field arrives, and nothing of what was in the slot before is left.
func TestSendFields(t *testing.T) {
	q, _ := newSQ(1, 0)
	q.move(verbs.QPRTS)
	full := verbs.SendWR{
		WRID: 1, Opcode: verbs.RDMAWriteWithImm, Flags: verbs.Fence | verbs.Signaled | verbs.Solicited,
		SGList:  []verbs.SGE{{Addr: sendBase, Length: 5, LKey: sendKey}, {Addr: sendBase + 9, Length: 6, LKey: sendKey}},
		ImmData: 2, InvalidateRKey: 3, RemoteAddr: 4, RKey: 5, CompareAdd: 6, Swap: 7, AH: 8, RemoteQPN: 9, RemoteQKey: 10,
	}
	inv := full
	inv.Opcode = verbs.SendWithInv
	tests := []struct {
		wr   verbs.SendWR
		want SendWQE
	}{
		{full, SendWQE{
			WRID: 1, Opcode: verbs.RDMAWriteWithImm, Flags: full.Flags, NumSGE: 2, Length: 11,
			ImmData: 2, RemoteAddr: 4, RKey: 5, CompareAdd: 6, Swap: 7, AH: 8, RemoteQPN: 9, RemoteQKey: 10,
		}},
		{verbs.SendWR{WRID: 2, Opcode: verbs.Send, InlineData: []byte("x")}, SendWQE{
			WRID: 2, Opcode: verbs.Send, Flags: verbs.Inline, Length: 1,
		}},
		{inv, SendWQE{
			WRID: 1, Opcode: verbs.SendWithInv, Flags: full.Flags, NumSGE: 2, Length: 11,
			ImmData: 2, RemoteAddr: 4, RKey: 3, CompareAdd: 6, Swap: 7, AH: 8, RemoteQPN: 9, RemoteQKey: 10,
		}},
		{verbs.SendWR{WRID: 3, Opcode: verbs.LocalInv, RKey: 1, InvalidateRKey: 2}, SendWQE{WRID: 3, Opcode: verbs.LocalInv, RKey: 2}},
		{verbs.SendWR{}, SendWQE{}}, // RDMA_WRITE of nothing
	}
	for _, tt := range tests {
		if n, _, err := q.Post([]verbs.SendWR{tt.wr}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
		pos, fate := q.next()
		if got := *q.at(pos); fate != FateSend || got != tt.want {
			t.Errorf("%v\n got %+v\nwant %+v", fate, got, tt.want)
		}
		if got := len(q.sgList(pos)); got != int(tt.want.NumSGE) {
			t.Errorf("%d SGEs, want %d", got, tt.want.NumSGE)
		}
		q.take()
		q.retire(1)
	}
}

// Memory that is closed while a post copies from it leaves zeros, not what an earlier
// message had in the slot.
func TestSendInlineClosedMemory(t *testing.T) {
	q, mem := newSQ(1, 0)
	q.move(verbs.QPRTS)
	if n, _, err := q.Post([]verbs.SendWR{{Opcode: verbs.Send, InlineData: bytes.Repeat([]byte("secret "), 4)}}); n != 1 {
		t.Fatal(err)
	}
	serve(q)
	gone := mem.add(testPD, 9, 0x9000, 16, 0)
	copy(gone.buf, "not registered any more")
	calls := 0
	mem.before = func() {
		if calls++; calls == 3 { // two checks, then the first write
			gone.dead = true
		}
	}
	copy(mem.regions[0].buf, "alive")
	n, _, err := q.Post([]verbs.SendWR{inlineWR(1,
		verbs.SGE{Addr: 0x9000, Length: 8, LKey: 9}, verbs.SGE{Addr: sendBase, Length: 5, LKey: sendKey})})
	if n != 1 || err != nil {
		t.Fatal(n, err)
	}
	pos, _ := q.next()
	if got, want := q.inlineData(pos), append(make([]byte, 8), "alive"...); !bytes.Equal(got, want) {
		t.Errorf("inline data %q, want %q", got, want)
	}
}
