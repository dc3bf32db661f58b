package cm

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

var udp = roce.ServiceID(roce.PSUDP, 7174)

// nextMAD takes one message out and reads its header.
func nextMAD(t *testing.T, c *CM) (out Out, h roce.MAD, ok bool) {
	t.Helper()
	if !c.NextMAD(&out) {
		return out, h, false
	}
	if err := h.Decode(out.MAD[:]); err != nil {
		t.Fatal(err)
	}
	return out, h, true
}

// A service is found, with everything that goes along in both directions; one that nobody
// serves is refused; a repeated question gets the same answer and costs nothing.
func TestSIDR(t *testing.T) {
	a, b := newLab(t, Config{UDPPort: 5000}), newLab(t, Config{})
	if err := b.ServeSIDR(udp, SIDRService{QPN: 0x123456, QKey: 0x01234567, PrivateData: []byte("welcome")}); err != nil {
		t.Fatal(err)
	}
	for _, service := range []roce.SID{udp, udp + 1} {
		id, err := a.ResolveSIDR(a.now, SIDRParams{
			Path: Path{Local: addrA, Remote: netip.AddrPortFrom(addrB, 0)}, ServiceID: service, SrcPort: 40000, PrivateData: []byte("hello"),
		})
		if err != nil {
			t.Fatal(err)
		}
		out, h, ok := nextMAD(t, a.CM)
		var req roce.SIDRReq
		var ip roce.IPCMHeader
		if !ok || h.AttrID != roce.AttrSIDRReq || req.Decode(h.Data) != nil || ip.Decode(req.PrivateData) != nil ||
			out.Remote != netip.AddrPortFrom(addrB, roce.Port) || out.Local != addrA || req.PKey != 0xFFFF || req.ServiceID != service ||
			ip.Src != addrA || ip.Dst != addrB || ip.SrcPort != 40000 || !bytes.HasPrefix(req.PrivateData[roce.IPCMHeaderLen:], []byte("hello\x00")) {
			t.Fatalf("asked %+v, %+v, %+v", out.Path, req, ip)
		}
		var answer Out
		for range 3 {
			b.HandleMAD(b.now, netip.AddrPortFrom(addrA, 5000), addrB, out.MAD[:])
			var ok bool
			if answer, h, ok = nextMAD(t, b.CM); !ok || h.AttrID != roce.AttrSIDRRep || answer.Remote != netip.AddrPortFrom(addrA, 5000) {
				t.Fatalf("answered %v to %v", h.AttrID, answer.Remote)
			}
		}
		if b.Len() != 0 || b.Deadline() != verbs.Never {
			t.Error("a question costs the answerer something")
		}
		// Answers that are somebody else's.
		a.HandleMAD(a.now, netip.AddrPortFrom(netip.MustParseAddr("10.77.0.9"), 4791), addrA, answer.MAD[:])
		wrong := answer
		wrong.MAD[15] ^= 1 // transaction ID
		a.HandleMAD(a.now, netip.AddrPortFrom(addrB, 4791), addrA, wrong.MAD[:])
		if _, ok := a.NextEvent(); ok {
			t.Fatal("a forged answer was believed")
		}
		for range 2 {
			a.HandleMAD(a.now, netip.AddrPortFrom(addrB, 4791), addrA, answer.MAD[:])
		}
		a.check()
		ev, ok := a.NextEvent()
		if !ok || ev.Type != SIDRResolved || ev.SIDR.ID != id || ev.Service != service || len(ev.PrivateData) != roce.SIDRRepPrivateLen {
			t.Fatalf("event %+v", ev)
		}
		if service == udp {
			if ev.SIDR != (SIDRInfo{ID: id, QPN: 0x123456, QKey: 0x01234567}) || !bytes.HasPrefix(ev.PrivateData, []byte("welcome\x00")) {
				t.Errorf("found %+v", ev.SIDR)
			}
		} else if ev.SIDR.Status != roce.SIDRUnsupported {
			t.Errorf("found what nobody serves: %+v", ev.SIDR)
		}
		if _, ok := a.NextEvent(); ok {
			t.Error("a repeated answer is news")
		}
		a.HandleTimeout(a.now.Add(time.Hour))
		if _, ok := a.NextEvent(); ok || a.Deadline() != verbs.Never {
			t.Error("a query that has ended ends again")
		}
	}
	b.UnserveSIDR(udp)
	b.forge(SIDRReq, &roce.SIDRReq{RequestID: 5, ServiceID: udp})
	var rep roce.SIDRRep
	if _, h, ok := nextMAD(t, b.CM); !ok || rep.Decode(h.Data) != nil || rep.Status != roce.SIDRUnsupported || rep.RequestID != 5 || rep.QPN != 0 {
		t.Errorf("after UnserveSIDR: %+v", rep)
	}
}

// A query that nobody answers is repeated, less and less often, and ends once.
func TestSIDRUnreachable(t *testing.T) {
	a := newLab(t, Config{})
	p := SIDRParams{Path: Path{Local: addrA, Remote: netip.AddrPortFrom(addrB, 4791)}, ServiceID: udp}
	id, err := a.ResolveSIDR(a.now, p)
	if err != nil {
		t.Fatal(err)
	}
	gone, err := a.ResolveSIDR(a.now, p)
	if err != nil || gone == id {
		t.Fatal(gone, err)
	}
	a.CancelSIDR(gone)
	began := a.now
	var at []time.Duration
	for range 100 {
		for {
			out, h, ok := nextMAD(t, a.CM)
			if !ok {
				break
			}
			var req roce.SIDRReq
			if _ = req.Decode(h.Data); SIDRID(req.RequestID) == id {
				at = append(at, a.now.Sub(began))
			} else if a.now != began {
				t.Error("a cancelled query was repeated")
			}
			_ = out
		}
		if a.Deadline() == verbs.Never {
			break
		}
		a.now = max(a.now, a.Deadline())
		a.HandleTimeout(a.now)
		a.check()
	}
	if len(at) < 8 || at[0] != 0 || at[1] != DefaultRetryInitial || at[2] != 3*DefaultRetryInitial || at[len(at)-1]-at[len(at)-2] != DefaultRetryMax {
		t.Errorf("asked at %v", at)
	}
	ev, ok := a.NextEvent()
	if !ok || ev.Type != SIDRUnreachable || ev.SIDR.ID != id || a.now.Sub(began) != DefaultConnectTimeout {
		t.Errorf("after %v: %+v", a.now.Sub(began), ev)
	}
	if _, ok := a.NextEvent(); ok {
		t.Error("more than one event")
	}
}

func TestSIDRRefuses(t *testing.T) {
	a := newLab(t, Config{})
	good := SIDRParams{Path: Path{Local: addrA, Remote: netip.AddrPortFrom(addrB, 4791)}, ServiceID: udp}
	for name, f := range map[string]func(p *SIDRParams) error{
		"no remote":      func(p *SIDRParams) error { p.Remote = netip.AddrPort{}; return ErrAddress },
		"two families":   func(p *SIDRParams) error { p.Local = netip.IPv6Loopback(); return ErrAddress },
		"private data":   func(p *SIDRParams) error { p.PrivateData = make([]byte, 181); return ErrPrivateData },
		"as much as may": func(p *SIDRParams) error { p.PrivateData = make([]byte, 180); return nil },
		"not rdma_cm":    func(p *SIDRParams) error { p.ServiceID, p.PrivateData = 1<<40, make([]byte, 216); return nil },
	} {
		p := good
		want := f(&p)
		if _, err := a.ResolveSIDR(a.now, p); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	for range maxQueries {
		if _, err := a.ResolveSIDR(a.now, good); err != nil && !errors.Is(err, ErrNoIDs) {
			t.Fatal(err)
		}
	}
	if _, err := a.ResolveSIDR(a.now, good); !errors.Is(err, ErrNoIDs) {
		t.Errorf("one too many: %v", err)
	}
	a.check()
	for _, tc := range []struct {
		s    SIDRService
		want error
	}{
		{SIDRService{QPN: 1 << 24}, ErrParam},
		{SIDRService{QPN: 5, PrivateData: make([]byte, 137)}, ErrPrivateData},
		{SIDRService{QPN: 5, PrivateData: make([]byte, 136)}, nil},
		{SIDRService{QPN: 5}, ErrServiceInUse},
	} {
		if err := a.ServeSIDR(udp, tc.s); !errors.Is(err, tc.want) {
			t.Errorf("%+v: %v, want %v", tc.s, err, tc.want)
		}
	}
}

// Connections and queries share the deadline, and neither hides the other.
func TestSIDRDeadline(t *testing.T) {
	a := newLab(t, Config{})
	a.forge(REQ, a.req())
	later := a.Deadline()
	p := SIDRParams{Path: Path{Local: addrA, Remote: netip.AddrPortFrom(addrB, 4791)}, ServiceID: udp}
	id, err := a.ResolveSIDR(a.now, p)
	if err != nil {
		t.Fatal(err)
	}
	if d := a.Deadline(); d != a.now.Add(DefaultRetryInitial) || d >= later {
		t.Errorf("the next deadline is in %v", d.Sub(a.now))
	}
	a.CancelSIDR(id)
	a.HandleTimeout(a.Deadline())
	if d := a.Deadline(); d != later {
		t.Errorf("without the query the next deadline is in %v, want %v", d.Sub(a.now), later.Sub(a.now))
	}
}
