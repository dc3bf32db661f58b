package rsocket

import (
	"encoding/binary"
	"testing"
)

func FuzzConnData(f *testing.F) {
	f.Add(unhex(f, rstreamClient))
	f.Add(unhex(f, rstreamServer))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := ParseConnData(b)
		if err != nil {
			return
		}
		again, err := ParseConnData(d.Append(nil))
		if err != nil || again != d {
			t.Fatalf("%+v became %+v, %v", d, again, err)
		}
	})
}

// FuzzConn lets a peer say anything in any order while a program reads, writes and closes.
// Whatever it is, nothing goes beyond what both sides were granted.
func FuzzConn(f *testing.F) {
	f.Add([]byte{0, 10, 0, 0, 0, 10, 0, 0, 0})
	f.Add([]byte{0, 0x40, 0, 0, 0x80, 16, 0, 0, 0, 2, 255, 1, 5, 3, 6})
	f.Add([]byte{0, 2, 0, 0, 0xE0, 0, 0, 0, 0, 7})
	f.Fuzz(func(t *testing.T, in []byte) {
		e := newEnd(t, 1<<40, Config{SendBuffer: MinBuffer, SendDepth: MinDepth, Credits: MinDepth, Ring: Buffer{Length: MinBuffer}})
		e.Start(ConnData{Credits: 20, Target: Buffer{1, 1, 2}, Data: Buffer{1000, 1, 3000}})
		var posted []uint64
		var m Message
		for len(in) > 0 {
			op := in[0]
			in = in[1:]
			switch op % 8 {
			case 0, 1: // the peer
				if len(in) < 8 {
					return
				}
				imm, n := binary.LittleEndian.Uint32(in), binary.LittleEndian.Uint32(in[4:])
				in = in[8:]
				if op%16 == 1 { // help it to say what makes sense
					n = imm & 0xFFF
					imm = n
				}
				putEntry(e.target[16*int(op>>7):], Buffer{Addr: uint64(n) << op, RKey: 1, Length: imm & 0xFFFF}, false)
				_ = e.Received(imm, n)
			case 2: // write
				if n, _ := e.Room(1 + int(op)*16); n > 0 {
					e.Send(n, &m)
					if m.Signaled {
						posted = append(posted, m.ID)
					}
				}
			case 3: // read
				if _, n, more := e.Readable(); n > 0 {
					e.Consume((n + more + 1) / 2)
				}
			case 4: // completion
				if len(posted) > 0 {
					e.Sent(posted[0])
					posted = posted[1:]
				}
			case 5:
				e.CloseWrite()
			case 6:
				e.CloseRead()
				e.Discard()
			case 7:
				e.Close()
			}
			for e.NextControl(&m) {
				posted = append(posted, m.ID)
			}
			s, r := &e.send, &e.recv
			switch {
			case s.inUse() > e.cfg.SendDepth:
				t.Fatalf("%d WQEs in a queue of %d", s.inUse(), e.cfg.SendDepth)
			case s.used() > e.cfg.SendBuffer:
				t.Fatalf("%d bytes in a ring of %d", s.used(), e.cfg.SendBuffer)
			case r.granted-r.arrived > 2*r.half || r.avail > 2*r.half || r.avail+(r.granted-r.arrived)+r.free != 2*r.half:
				t.Fatalf("arrived %d, granted %d, readable %d, free %d of %d", r.arrived, r.granted, r.avail, r.free, 2*r.half)
			case r.count > r.credits:
				t.Fatalf("%d messages for %d credits", r.count, r.credits)
			case e.ctrl.grants > maxGrants || e.ctrl.ends > maxEnds || e.ctrl.grants < 0 || e.ctrl.ends < 0:
				t.Fatalf("%d grants and %d endings under way", e.ctrl.grants, e.ctrl.ends)
			}
		}
	})
}
