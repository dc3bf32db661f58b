package rsocket

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
)

// end is a Conn with memory: what the transport around it does, without a network.
type end struct {
	*Conn
	sendRing, recvRing, target []byte
	base                       uint64 // the ring's address; the target list is at base+1<<32
}

func newEnd(t testing.TB, base uint64, cfg Config) *end {
	t.Helper()
	e := &end{base: base}
	if cfg.SendBuffer == 0 {
		cfg.SendBuffer = 8192
	}
	if cfg.Ring.Length == 0 {
		cfg.Ring.Length = 8192
	}
	if cfg.SendDepth == 0 {
		cfg.SendDepth = 64
	}
	if cfg.Credits == 0 {
		cfg.Credits = 64
	}
	e.sendRing, e.recvRing, e.target = make([]byte, cfg.SendBuffer), make([]byte, cfg.Ring.Length), make([]byte, TargetLen)
	cfg.Ring.Addr, cfg.Ring.RKey = base, 1
	cfg.Target, cfg.TargetMem = Buffer{Addr: base + 1<<32, RKey: 2}, e.target
	var err error
	if e.Conn, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	return e
}

// connectEnds lets two ends hear of each other, through their encoded connection data.
func connectEnds(t testing.TB, a, b *end) {
	t.Helper()
	for _, p := range [][2]*end{{a, b}, {b, a}} {
		h := p[0].Hello()
		d, err := ParseConnData(h.Append(nil))
		if err != nil {
			t.Fatal(err)
		}
		p[1].Start(d)
	}
}

// write does the RDMA WRITE of a message into memory of to.
func (e *end) write(to *end, m *Message) error {
	payload := m.Inline
	if m.Op == OpData {
		payload = append(bytes.Clone(e.sendRing[m.Offset:min(m.Offset+m.Length, len(e.sendRing))]),
			e.sendRing[:max(0, m.Offset+m.Length-len(e.sendRing))]...)
	}
	if len(payload) == 0 {
		return nil // neither address nor key mean anything
	}
	mem, at, key := to.recvRing, m.Addr-to.base, uint32(1)
	if at >= 1<<32 {
		mem, at, key = to.target, at-1<<32, 2
	}
	if m.RKey != key || at+uint64(len(payload)) > uint64(len(mem)) {
		return fmt.Errorf("%v writes %d bytes at %#x with key %d", m.Op, len(payload), m.Addr, m.RKey)
	}
	copy(mem[at:], payload)
	return nil
}

// controls takes all control messages that are due and describes them.
func (e *end) controls() (list []string) {
	var m Message
	for e.NextControl(&m) {
		list = append(list, fmt.Sprintf("imm %08x addr %x key %x inline %s", m.Imm, m.Addr, m.RKey, hex.EncodeToString(m.Inline)))
	}
	return list
}

func wantControls(t *testing.T, e *end, want ...string) {
	t.Helper()
	if got := e.controls(); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("controls:\n got %q\nwant %q", got, want)
	}
}

// TestWorkedExample replays what rstream's server was seen to send and to be sent: grants at
// once after connecting, and when the first half of its buffer was read after 18 messages.
func TestWorkedExample(t *testing.T) {
	server, err := New(Config{
		SendBuffer: 1 << 20, SendDepth: 384, Credits: 384, TargetMem: make([]byte, TargetLen),
		Ring: Buffer{0x7fcc790e3000, 0xa7e, 0x100000}, Target: Buffer{0x7fcc74003000, 0x9ea, 0},
	})
	if err != nil {
		t.Fatal(err)
	}
	e := &end{Conn: server, target: server.cfg.TargetMem}
	hello := server.Hello()
	if got := hex.EncodeToString(hello.Append(nil)); got != rstreamServer {
		t.Errorf("hello\n got %s\nwant %s", got, rstreamServer)
	}
	client, err := ParseConnData(unhex(t, rstreamClient))
	if err != nil {
		t.Fatal(err)
	}
	server.Start(client)
	// {7fcc79163000, a7e, 80000} in the client's byte order.
	wantControls(t, e, "imm 80000180 addr 55fe3c966010 key 905 inline 00301679cc7f00007e0a000000000800")
	wantControls(t, e)
	// The client grants its second half: entry 1.
	copy(e.target[16:], unhex(t, "00a002cb407f0000660a000000000800"))
	if err := server.Received(0x80000180, 16); err != nil {
		t.Fatal(err)
	}
	if got, want := server.send.targets[1], (Buffer{0x7f40cb02a000, 0xa66, 0x80000}); got != want {
		t.Errorf("entry 1 is %+v, want %+v", got, want)
	}
	// Sync, 300000 bytes in growing pieces; the half's end is at 524288.
	messages, total := 0, 0
	for _, n := range []int{16, 2048, 4096, 8192, 16384, 32768, 65536, 65536, 65536, 39904, 2048, 4096, 8192, 16384, 32768, 65536, 65536, 29712 - 68} {
		if err := server.Received(uint32(n), uint32(n)); err != nil {
			t.Fatal(err)
		}
		messages++
		total += n
	}
	rest := 0x80000 - total
	if err := server.Received(uint32(rest), uint32(rest)); err != nil {
		t.Fatal(err)
	}
	off, n, more := server.Readable()
	if off != 0 || n != 0x80000 || more != 0 {
		t.Errorf("readable %d, %d, %d", off, n, more)
	}
	server.Consume(n - 1)
	wantControls(t, e)
	server.Consume(1)
	wantControls(t, e, fmt.Sprintf("imm %08x addr 55fe3c966000 key 905 inline 00300e79cc7f00007e0a000000000800", 0x80000000+uint32(messages+1+384)))
	// Our first message goes to the client's first buffer.
	var m Message
	if n, why := server.Room(16); n != 16 || why != BlockedNot {
		t.Fatalf("room %d, %v", n, why)
	}
	server.Send(16, &m)
	if m.Addr != 0x7f40cafaa000 || m.RKey != 0xa66 || m.Imm != 16 || m.Length != 16 {
		t.Errorf("message %+v", m)
	}
}

// TestCreditGrant: 192 small messages, read, bring credits without a buffer.
func TestCreditGrant(t *testing.T) {
	a, b := newEnd(t, 1<<40, Config{Credits: 384, Ring: Buffer{Length: 1 << 20}}), newEnd(t, 1<<41, Config{})
	connectEnds(t, a, b)
	a.controls()
	for i := range 192 {
		wantControls(t, a)
		if err := a.Received(64, 64); err != nil {
			t.Fatal(i, err)
		}
		a.Consume(64)
	}
	wantControls(t, a, "imm 80000240 addr 0 key 0 inline ")
}

// TestGrantsWait: so many grants may be under way, and an ending nevertheless goes out; a
// grant that has to wait says so, for a reader that sleeps would not hear of the completion.
func TestGrantsWait(t *testing.T) {
	a, b := newEnd(t, 1<<40, Config{}), newEnd(t, 1<<41, Config{})
	connectEnds(t, a, b)
	var sent []uint64
	grants := func() {
		var m Message
		for a.NextControl(&m) {
			sent = append(sent, m.ID)
		}
	}
	grants()
	for len(sent) < maxGrants || !a.GrantWaits() {
		if len(sent) > maxGrants || a.GrantWaits() {
			t.Fatalf("%d grants, waiting %v", len(sent), a.GrantWaits())
		}
		if err := a.Received(4096, 4096); err != nil {
			t.Fatal(err)
		}
		a.Consume(4096)
		grants()
	}
	a.CloseWrite()
	if grants(); len(sent) != maxGrants+1 {
		t.Errorf("%d messages with the ending", len(sent))
	}
	a.Sent(sent[0])
	if a.GrantWaits() {
		t.Error("the grant waits after a completion")
	}
	if grants(); len(sent) != maxGrants+2 {
		t.Errorf("%d messages after a completion", len(sent))
	}
}

// TestEntryOrder: entries have the byte order of whom they are written for, and take turns in
// a list of any length.
func TestEntryOrder(t *testing.T) {
	a := newEnd(t, 0x1000, Config{})
	a.Start(ConnData{BigEndian: true, Credits: 64, Target: Buffer{0x100, 7, 3}, Data: Buffer{1, 1, 1 << 20}})
	for i, slot := range []string{"110", "120", "100", "110"} {
		addr := 0x1000 + 4096*uint64((i+1)%2)
		if i > 0 {
			if err := a.Received(4096, 4096); err != nil {
				t.Fatal(err)
			}
			a.Consume(4096)
		}
		wantControls(t, a, fmt.Sprintf("imm %08x addr %s key 7 inline %016x%08x%08x", 0x80000040+uint32(i), slot, addr, 1, 4096))
	}
}

// TestPeerViolates: everything a peer must not say, with an end that has 64 credits and two
// halves of 4096 bytes, and has sent one message.
func TestPeerViolates(t *testing.T) {
	type step struct{ imm, length uint32 }
	data := func(n uint32) step { return step{n, n} }
	many := func(n int, s step) (list []step) {
		for range n {
			list = append(list, s)
		}
		return list
	}
	const sgl, ctrl = 0x80000000, 0xE0000000
	for _, tc := range []struct {
		name  string
		entry Buffer // put into both target entries
		steps []step // all but the last are right
	}{
		{"DATA longer than it says", Buffer{}, []step{{5, 6}}},
		{"DATA shorter than it says", Buffer{}, []step{{5, 4}}},
		{"DATA of nothing", Buffer{}, []step{data(0)}},
		{"beyond its credits", Buffer{}, append(many(64, data(1)), data(1))},
		{"beyond its buffer", Buffer{}, []step{data(4096), data(4096), data(1)}},
		{"across buffers", Buffer{}, []step{data(4000), data(97)}},
		{"longer than a buffer", Buffer{}, []step{data(4097)}},
		{"DATA after SHUTDOWN", Buffer{}, []step{data(1), {ctrl + 2, 0}, data(1)}},
		{"anything after DISCONNECT", Buffer{}, []step{data(1), {ctrl, 0}, {sgl + 64, 0}}},
		{"reserved operation 1", Buffer{}, []step{{0x20000001, 1}}},
		{"local operation 2", Buffer{}, []step{{0x40000001, 1}}},
		{"reserved operation 3", Buffer{}, []step{{0x60000001, 1}}},
		{"reserved operation 5", Buffer{}, []step{{0xA0000001, 1}}},
		{"I/O map", Buffer{}, []step{{0xC0000000, 24}}},
		{"unknown CTRL", Buffer{}, []step{{ctrl + 1, 0}, {ctrl + 3, 0}}},
		{"CTRL with data", Buffer{}, []step{{ctrl + 2, 1}}},
		{"more credits than messages", Buffer{}, []step{{sgl + 65, 0}, {sgl + 66, 0}}},
		{"credits taken back", Buffer{}, []step{{sgl + 65, 0}, {sgl + 64, 0}}},
		{"absurd credits", Buffer{}, []step{{sgl + 0x20000, 0}}},
		{"SGL of odd length", Buffer{1, 1, 1}, []step{{sgl + 64, 16}, {sgl + 64, 8}}},
		{"empty buffer", Buffer{1, 1, 0}, []step{{sgl + 64, 16}}},
		{"wrapping buffer", Buffer{^uint64(0), 1, 16}, []step{{sgl + 64, 16}}},
		{"replaces a buffer", Buffer{1, 1, 1}, []step{{sgl + 64, 16}, {sgl + 64, 16}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := newEnd(t, 1<<40, Config{}), newEnd(t, 1<<41, Config{})
			connectEnds(t, a, b)
			a.controls()
			var m Message
			a.Send(10, &m)
			putEntry(a.target, tc.entry, false)
			putEntry(a.target[16:], tc.entry, false)
			for i, s := range tc.steps {
				err := a.Received(s.imm, s.length)
				if last := i == len(tc.steps)-1; last != errors.Is(err, ErrProtocol) || !last && err != nil {
					t.Fatalf("step %d, %#x with %d bytes: %v", i, s.imm, s.length, err)
				}
			}
			if err := a.Received(1, 1); !errors.Is(err, ErrProtocol) || a.Err() == nil {
				t.Errorf("after that: %v", err)
			}
			a.Close()
			if len(a.controls()) != 0 || !a.Ended() {
				t.Error("something is said to a peer that does not listen")
			}
		})
	}
}

// TestEndings walks through what each side says and sees for each order of closing.
func TestEndings(t *testing.T) {
	const shutdown, disconnect = "imm e0000002 addr 0 key 0 inline ", "imm e0000000 addr 0 key 0 inline "
	for _, tc := range []struct {
		name  string
		steps string // w, r, c: close; W, D: the peer says SHUTDOWN, DISCONNECT
		want  []string
		ended bool
		eof   bool
	}{
		{"write", "w", []string{shutdown}, false, false},
		{"read", "r", nil, true, false},
		{"both, read first", "rw", []string{disconnect}, false, false},
		{"both, write first", "wr", []string{shutdown, disconnect}, false, false},
		{"close", "c", []string{disconnect}, false, false},
		{"write, close", "wc", []string{shutdown, disconnect}, false, false},
		{"peer shuts, close", "Wc", []string{disconnect}, false, true},
		{"both shut, close", "wWc", []string{shutdown}, false, true},
		{"peer gone, close", "Dc", nil, true, true},
		{"write, peer gone", "wD", []string{shutdown}, true, true},
		{"peer shuts twice", "WW", nil, true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := newEnd(t, 1<<40, Config{}), newEnd(t, 1<<41, Config{})
			connectEnds(t, a, b)
			a.controls()
			var got []string
			for _, s := range tc.steps {
				var err error
				switch s {
				case 'w':
					a.CloseWrite()
				case 'r':
					a.CloseRead()
				case 'c':
					a.Close()
				case 'W':
					err = a.Received(0xE0000002, 0)
				case 'D':
					err = a.Received(0xE0000000, 0)
				}
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, a.controls()...)
			}
			if fmt.Sprint(got) != fmt.Sprint(tc.want) {
				t.Errorf("said\n%q, want\n%q", got, tc.want)
			}
			if a.Ended() != tc.ended || a.EOF() != tc.eof {
				t.Errorf("ended %v, EOF %v; want %v, %v", a.Ended(), a.EOF(), tc.ended, tc.eof)
			}
		})
	}
}

// TestKeepalive: it goes out only when nothing else would find the peer missing.
func TestKeepalive(t *testing.T) {
	a, b := newEnd(t, 1<<40, Config{}), newEnd(t, 1<<41, Config{})
	connectEnds(t, a, b)
	var m Message
	if !a.NextControl(&m) || a.Keepalive(&m) {
		t.Fatal("a keepalive beside a grant")
	}
	a.Sent(m.ID)
	a.Send(10, &m) // unsignaled: nobody would hear
	if m.Signaled || !a.Keepalive(&m) || m.Op != OpWrite || m.Imm != 0 || m.Length != 0 || m.Addr != 0 || m.RKey != 0 || !m.Signaled {
		t.Fatalf("keepalive %+v", m)
	}
	a.Sent(m.ID)
	if a.Unacked() != 0 {
		t.Errorf("%d unacknowledged", a.Unacked())
	}
}

// pump moves random data between two ends with random timing until both have all, and checks
// that nobody stalls and nobody complains.
func pump(t *testing.T, seed uint64, a, b *end, size int) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	type flight struct {
		m     Message
		acked bool
	}
	type dir struct {
		from, to  *end
		sent, got []byte
		src       []byte
		line      []flight // posted, not delivered
		acks      []uint64 // delivered, completion not seen
		closed    bool
	}
	dirs := [2]*dir{{from: a, to: b}, {from: b, to: a}}
	for _, d := range dirs {
		d.src = make([]byte, size)
		for i := range d.src {
			d.src[i] = byte(rnd.Uint32())
		}
	}
	post := func(d *dir, m Message) {
		m.Inline = bytes.Clone(m.Inline)
		d.line = append(d.line, flight{m: m})
	}
	control := func(d *dir) {
		var m Message
		for d.from.NextControl(&m) {
			post(d, m)
		}
	}
	idle := 0
	for !(dirs[0].to.EOF() && dirs[1].to.EOF() && dirs[0].from.Ended() && dirs[1].from.Ended()) {
		if idle++; idle > 10_000 {
			t.Fatalf("seed %d: stalled; %d and %d of %d bytes arrived", seed, len(dirs[0].got), len(dirs[1].got), size)
		}
		d := dirs[rnd.IntN(2)]
		switch rnd.IntN(5) {
		case 0, 1: // write
			left := len(d.src) - len(d.sent)
			if left == 0 {
				if !d.closed {
					d.closed, idle = true, 0
					d.from.CloseWrite()
					control(d)
				}
				continue
			}
			n, why := d.from.Room(min(left, 1+rnd.IntN(1<<(1+rnd.IntN(13)))))
			if n == 0 {
				if why == BlockedNot {
					t.Fatal("no room, no reason")
				}
				continue
			}
			idle = 0
			part := d.src[len(d.sent):][:n]
			k := copy(d.from.sendRing[d.from.Offset():], part)
			copy(d.from.sendRing, part[k:])
			d.sent = append(d.sent, part...)
			var m Message
			d.from.Send(n, &m)
			post(d, m)
		case 2: // deliver
			if len(d.line) == 0 {
				continue
			}
			idle = 0
			m := d.line[0].m
			d.line = d.line[1:]
			if err := d.from.write(d.to, &m); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if err := d.to.Received(m.Imm, uint32(m.Length)); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if m.Signaled {
				d.acks = append(d.acks, m.ID)
			}
		case 3: // read
			off, n, more := d.to.Readable()
			if n+more == 0 {
				continue
			}
			idle = 0
			all := append(bytes.Clone(d.to.recvRing[off:off+n]), d.to.recvRing[:more]...)
			k := 1 + rnd.IntN(len(all))
			d.got = append(d.got, all[:k]...)
			d.to.Consume(k)
			for _, o := range dirs {
				if o.from == d.to {
					control(o)
				}
			}
		case 4: // completions
			if len(d.acks) == 0 {
				continue
			}
			idle = 0
			d.from.Sent(d.acks[0])
			d.acks = d.acks[1:]
			control(d)
		}
	}
	for i, d := range dirs {
		if !bytes.Equal(d.got, d.src) {
			t.Fatalf("seed %d: direction %d: %d bytes arrived, or others than were sent", seed, i, len(d.got))
		}
	}
}

func TestPair(t *testing.T) {
	configs := []Config{
		{},
		{SendBuffer: MinBuffer, SendDepth: MinDepth, Credits: MinDepth, Ring: Buffer{Length: MinBuffer}},
		{SendBuffer: 5001, SendDepth: 21, Credits: 31, Ring: Buffer{Length: 9998}, MaxMessage: 777},
		{SendBuffer: 100_000, Credits: MaxCredits, Ring: Buffer{Length: MinBuffer + 2}},
	}
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		a := newEnd(t, 1<<40, configs[rnd.IntN(len(configs))])
		b := newEnd(t, 1<<41, configs[rnd.IntN(len(configs))])
		connectEnds(t, a, b)
		pump(t, seed, a, b, 200_000)
	}
}

// TestPairWraps begins near the wraps of the counters: of messages at 2^16, of WQEs at 2^24,
// of bytes at 2^32.
func TestPairWraps(t *testing.T) {
	a, b := newEnd(t, 1<<40, Config{}), newEnd(t, 1<<41, Config{})
	connectEnds(t, a, b)
	for _, e := range []*end{a, b} {
		s, r := &e.send, &e.recv
		s.seq, s.taken, s.limit = 0xFFF0, 0xFFF0, s.limit+0xFFF0
		s.posted, s.completed = wqeMask-10, wqeMask-10
		s.head, s.tail = 1<<32-100, 1<<32-100
		r.seq, r.told = 0xFFF0, 0xFFF0
		r.arrived, r.granted = 1<<32-4096, 0
	}
	pump(t, 99, a, b, 200_000)
}

func TestConfigBad(t *testing.T) {
	good := Config{SendBuffer: 8192, SendDepth: 32, Credits: 32, Ring: Buffer{Length: 8192}, TargetMem: make([]byte, TargetLen)}
	if _, err := New(good); err != nil {
		t.Fatal(err)
	}
	for i, change := range []func(*Config){
		func(c *Config) { c.SendBuffer = MinBuffer - 1 },
		func(c *Config) { c.SendBuffer = MaxBuffer + 1 },
		func(c *Config) { c.Ring.Length = 8191 },
		func(c *Config) { c.Ring.Length = 0 },
		func(c *Config) { c.SendDepth = MinDepth - 1 },
		func(c *Config) { c.Credits = MinDepth - 1 },
		func(c *Config) { c.Credits = MaxCredits + 1 },
		func(c *Config) { c.TargetMem = nil },
	} {
		c := good
		change(&c)
		if _, err := New(c); err == nil || errors.Is(err, ErrProtocol) {
			t.Errorf("change %d: %v", i, err)
		}
	}
}
