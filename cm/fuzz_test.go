package cm

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// script is a fuzzer's input, read as a schedule.
type script []byte

func (s *script) byte() byte {
	if len(*s) == 0 {
		return 0
	}
	b := (*s)[0]
	*s = (*s)[1:]
	return b
}

func (s *script) bytes(n int) []byte {
	b := (*s)[:min(n, len(*s))]
	*s = (*s)[len(b):]
	return b
}

// FuzzCM lets bytes be a schedule of calls, of deliveries with loss, repetition, reordering and forgery, and of
// time. Nothing panics, the books balance, events keep their order, queues stay bounded, and in the end
// nothing remains.
func FuzzCM(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 10, 0, 10, 3, 11, 0, 10, 5, 10, 7, 10, 10})                      // a connection, closed
	f.Add([]byte{0, 10, 0, 12, 0, 3, 11, 0, 12, 0, 4, 1, 13, 200, 15, 255, 9, 0})    // with repetitions and time
	f.Add([]byte{0, 10, 0, 14, 0, 58, 7, 10, 15, 100, 15, 100, 15, 100, 8, 0, 5, 1}) // with forgery
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 4096 {
			return
		}
		s := script(data)
		rnd := rand.New(rand.NewPCG(1, 1))
		cfg := Config{Rand: rnd.Uint32, Backlog: 4, ServiceMax: 5 * time.Second, RequestTimeout: 3 * time.Second}
		now := verbs.Instant(0)
		type side struct {
			*CM
			addr netip.Addr
			ids  []ConnID
			last map[ConnID]EventType
		}
		var sides [2]*side
		for i, addr := range []netip.Addr{addrA, addrB} {
			cfg.GUID = uint64(i + 1)
			sides[i] = &side{CM: New(cfg), addr: addr, last: make(map[ConnID]EventType)}
			sides[i].idMask = 15
			if err := sides[i].Listen(tcp); err != nil {
				t.Fatal(err)
			}
		}
		type flight struct {
			src netip.AddrPort
			dst *side
			mad [roce.MADLen]byte
		}
		var flying []*flight
		settle := func() {
			for k, sd := range sides {
				sd.check()
				for {
					ev, ok := sd.NextEvent()
					if !ok {
						break
					}
					before := sd.last[ev.Conn]
					if ev.Type <= before || before == 0 && (ev.Type == Established || ev.Type == RTULate || ev.Type == Disconnected) {
						t.Fatalf("%v after %v", ev.Type, before)
					}
					if before == 0 && ev.Type == ReqReceived {
						sd.ids = append(sd.ids, ev.Conn)
					}
					if sd.last[ev.Conn] = ev.Type; ev.Type == TimewaitExit {
						delete(sd.last, ev.Conn)
					}
				}
				var out Out
				for n := 0; sd.NextMAD(&out); n++ {
					if n > 200 {
						t.Fatal("it does not stop talking")
					}
					for _, to := range sides {
						if to.addr == out.Remote.Addr() && len(flying) < 64 {
							flying = append(flying, &flight{netip.AddrPortFrom(sides[k].addr, 4791), to, out.MAD})
						}
					}
				}
				if sd.Len() > 15 || sd.CM.events.len() != 0 || sd.replies.len() != 0 {
					t.Fatal("bounds")
				}
			}
		}
		deliver := func(fl *flight, keep bool) {
			mad := fl.mad
			fl.dst.HandleMAD(now, fl.src, fl.dst.addr, mad[:])
			if keep {
				return
			}
			for i := range flying {
				if flying[i] == fl {
					flying = append(flying[:i], flying[i+1:]...)
					return
				}
			}
		}
		for len(s) > 0 {
			op := s.byte()
			sd, peer := sides[op>>7], sides[1-op>>7]
			var id ConnID
			pick := func() {
				if len(sd.ids) > 0 {
					id = sd.ids[len(sd.ids)-1-int(s.byte())%len(sd.ids)]
				}
			}
			private := make([]byte, 8)
			switch op & 15 {
			case 0, 1:
				n, err := sd.Connect(now, ReqParams{
					Path: Path{sd.addr, netip.AddrPortFrom(peer.addr, 0)}, ServiceID: tcp, Type: verbs.RC, QPN: 2 + verbs.QPN(op>>4&7), MTU: 3,
					PrivateData: private,
				})
				if err == nil {
					sd.ids = append(sd.ids, n)
				}
			case 2:
				pick()
				sd.Reject(now, id, verbs.RejectReason(s.byte()), private)
			case 3:
				pick()
				sd.Accept(now, id, RepParams{QPN: 2 + verbs.QPN(op>>4&7)})
			case 4:
				pick()
				sd.Established(now, id)
			case 5:
				pick()
				sd.Ready(now, id, private)
			case 6, 7:
				pick()
				sd.Disconnect(now, id, private)
			case 8:
				pick()
				sd.Destroy(now, id)
			case 9:
				if op&16 != 0 {
					sd.Unlisten(tcp)
				} else {
					sd.Listen(tcp)
				}
			case 10, 11, 12, 13, 14:
				if len(flying) == 0 {
					break
				}
				fl := flying[0]
				switch op & 15 {
				case 11: // reordered
					fl = flying[int(s.byte())%len(flying)]
				case 13: // lost
					flying = flying[1:]
					continue
				case 14: // forged: a byte changes, or the source does
					off := int(s.byte()) % (24 + 48)
					if off == 0 {
						fl.src = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 77, 0, s.byte()}), uint16(s.byte()))
					} else {
						fl.mad[off] ^= s.byte()
					}
				}
				deliver(fl, op&15 == 12)
			case 15:
				if op&16 != 0 { // anything at all
					var mad [roce.MADLen]byte
					h := roce.NewCMMAD(roce.AttrREQ+roce.AttrID(s.byte()%12), binary.LittleEndian.Uint64(append(s.bytes(8), make([]byte, 8)...)))
					h.PutHeader(mad[:])
					copy(mad[24:], s.bytes(int(s.byte())))
					sd.HandleMAD(now, netip.AddrPortFrom(peer.addr, 4791), sd.addr, mad[:])
					break
				}
				now = now.Add(time.Duration(s.byte()) * 7 * ms)
				sides[0].HandleTimeout(now)
				sides[1].HandleTimeout(now)
			}
			settle()
		}
		// Let everything that can end by itself end.
		for range 10_000 {
			at := min(sides[0].Deadline(), sides[1].Deadline())
			if at == verbs.Never {
				break
			}
			now = max(now, at)
			sides[0].HandleTimeout(now)
			sides[1].HandleTimeout(now)
			settle()
		}
		for _, sd := range sides {
			for id, cn := range sd.conns {
				if cn.state != Connected {
					t.Fatalf("%v remains in %v", id, cn.state)
				}
				sd.Destroy(now, id)
			}
		}
		now = now.Add(time.Minute)
		for _, sd := range sides {
			sd.HandleTimeout(now)
		}
		settle()
		for _, sd := range sides {
			if sd.Len()+len(sd.byPeer)+len(sd.byQPN)+len(sd.timers)+sd.lingering+len(sd.last) != 0 {
				t.Fatalf("%d connections remain, %d without TimewaitExit", sd.Len(), len(sd.last))
			}
		}
	})
}
