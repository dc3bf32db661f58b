package transport

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	mrand "math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/mr"
	"github.com/doorbell-rdma/doorbell/internal/park"
	"github.com/doorbell-rdma/doorbell/internal/udp"
	"github.com/doorbell-rdma/doorbell/internal/wire"
	"github.com/doorbell-rdma/doorbell/qp"
	"github.com/doorbell-rdma/doorbell/roce"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Device is one UDP port and everything behind it: memory, queue pairs, connections and the
// thread that drives them. All methods may be called by any goroutine.
type Device struct {
	cfg    Config
	epoch  time.Time
	spin   time.Duration
	maxMTU verbs.MTU
	guid   uint64
	ports  []*port // one for each wire; fixed once open
	pd     *PD
	tap    *tapQueue
	events eventQueue
	done   chan struct{} // closed when the device is
	waker  *park.Waker   // wakes sleeping goroutines on behalf of the wires' threads
	seats  *park.Seats   // bounds the waiters that sleep on a thread of their own
	next   atomic.Uint32
	// lastNum numbers completion queues and shared receive queues.
	lastNum atomic.Uint32

	ahMu sync.Mutex // keeps the wires' address handles the same

	groupMu sync.Mutex     // guards groups, and those of the queue pairs
	groups  map[joined]int // multicast groups that the sockets are in

	peers *peerIndex // what the wires' connection managers know together; nil with one wire

	mu        sync.RWMutex // guards what follows
	closed    bool
	mrs       *mr.Table // its writers; lookups take no lock
	lastPD    qp.PD
	listeners map[roce.SID]*Listener
	objects   map[shutter]struct{}
	most      int                      // objects at a time, since their map was last made
	mtus      map[netip.Addr]verbs.MTU // of our addresses' interfaces, when bound to all
}

// threadSleepers is how many waiters of a device may sleep on a futex, which wakes fastest
// but holds a thread each.
const threadSleepers = 8

// shutter is something that Device.Close ends.
type shutter interface{ shut() }

// Open opens a device. It fails when the address cannot be bound: an error that matches
// syscall.EADDRINUSE means that another program, or the kernel's own rdma_rxe, has the port.
func Open(cfg Config) (*Device, error) {
	if cfg.MaxMTU != 0 && !cfg.MaxMTU.Valid() {
		return nil, fmt.Errorf("transport: open: MaxMTU code %d, want 1 (256 bytes) to 5 (4096 bytes)", uint8(cfg.MaxMTU))
	}
	wires, err := cfg.wires()
	if err != nil {
		return nil, err
	}
	d := &Device{
		cfg: cfg, epoch: time.Now(), spin: cfg.spin(), done: make(chan struct{}),
		listeners: make(map[roce.SID]*Listener), objects: make(map[shutter]struct{}), lastPD: 1,
		mtus: make(map[netip.Addr]verbs.MTU), groups: make(map[joined]int),
	}
	d.events.wake = make(chan struct{}, 1)
	d.waker, d.seats = park.NewWaker(), park.NewSeats(threadSleepers)
	d.mrs = mr.New(random64)
	d.pd = &PD{dev: d, num: 1}
	d.guid = random64()
	if cfg.Tap != nil {
		d.tap = newTapQueue(d.epoch, cfg.Tap)
	}
	socks, err := udp.OpenShared(udp.Config{
		Bind: cfg.bind(), RecvBuffer: cfg.RecvBuffer, SendBuffer: cfg.SendBuffer, NoGSO: cfg.NoGSO, NoGRO: cfg.NoGRO,
	}, wires, steering(wires))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("transport: open: %w", err), d.closeTap())
	}
	d.maxMTU = maxMTU(cfg.MaxMTU, socks[0].Caps().MTU)
	if wires > 1 {
		d.peers = newPeerIndex()
	}
	for i, sock := range socks {
		p, err := newPort(d, i, sock)
		if err != nil {
			for i, s := range socks {
				if i < len(d.ports) {
					_ = d.ports[i].poll.Close() // the reason to report is err
				}
				_ = s.Close()
			}
			return nil, errors.Join(fmt.Errorf("transport: open: %w", err), d.closeTap())
		}
		d.ports = append(d.ports, p)
	}
	for _, p := range d.ports {
		p.start()
	}
	d.log("open", "addr", d.LocalAddr(), "wires", wires, "mtu", d.maxMTU)
	for _, w := range d.Warnings() {
		d.warn(w)
	}
	return d, nil
}

// maxMTU is the largest path MTU that both the configuration and the link allow.
func maxMTU(want verbs.MTU, linkMTU int) verbs.MTU {
	m := verbs.MTU4096
	if want != 0 {
		m = want
	}
	if linkMTU > 0 {
		m = min(m, max(verbs.MTUForLink(linkMTU), verbs.MTU256))
	}
	return m
}

// random64 returns a number that peers cannot predict.
func random64() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program instead
	return binary.NativeEndian.Uint64(b[:])
}

// LocalAddr returns the bound address and UDP port.
func (d *Device) LocalAddr() netip.AddrPort { return d.ports[0].wire.LocalAddr() }

// Attr says what the device offers.
func (d *Device) Attr() DeviceAttr {
	return DeviceAttr{
		MaxMTU: d.maxMTU, MaxQP: wire.MaxQP * len(d.ports), MaxQPWR: 1 << 16, MaxSGE: 32, MaxInlineData: 1024,
		MaxSRQWR: 1 << 16, MaxSRQSGE: 32, MaxCQE: 1 << 22, MaxRdAtomic: 128, MaxMessage: verbs.MaxMessage, GUID: d.guid,
	}
}

// DeviceAttr are a device's limits (struct ibv_device_attr).
type DeviceAttr struct {
	MaxMTU        verbs.MTU
	MaxQP         int
	MaxQPWR       int // WQEs of a send or receive queue
	MaxSGE        int
	MaxInlineData int // bytes
	MaxSRQWR      int // receives of a shared receive queue, SRQConfig.MaxWR
	MaxSRQSGE     int // entries of each one's SGList, SRQConfig.MaxSGE
	MaxCQE        int
	MaxRdAtomic   int
	MaxMessage    uint64 // bytes
	GUID          uint64
}

// Warnings returns what the system did not grant when the device was opened, each with the
// remedy, for a program to show.
func (d *Device) Warnings() (all []string) {
	for _, p := range d.ports {
		for _, w := range p.sock.Warnings() {
			if !slices.Contains(all, w) { // each socket has the same to say
				all = append(all, w)
			}
		}
	}
	return all
}

// Close closes the device and everything on it: peers of open connections are told once,
// waiters return ErrClosed, nothing touches registered memory any more. Closing twice is
// ErrClosed.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return ErrClosed
	}
	d.closed = true
	objects, listeners := d.objects, d.listeners
	d.objects, d.listeners = nil, nil
	d.mu.Unlock()
	close(d.done)
	for _, l := range listeners {
		_ = l.Close()
	}
	for o := range objects {
		o.shut()
	}
	var errs []error
	// All have said goodbye before the first socket goes: without it the system would have the
	// others receive what it does not find.
	for _, p := range d.ports {
		errs = append(errs, p.shutdown())
	}
	for _, p := range d.ports {
		errs = append(errs, p.close())
	}
	d.waker.Close()
	errs = append(errs, d.closeTap())
	d.log("closed")
	return errors.Join(errs...)
}

func (d *Device) closeTap() error {
	if d.tap != nil {
		d.tap.close()
	}
	return nil
}

// track remembers what Close must end; false when the device is closed.
func (d *Device) track(o shutter) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	d.objects[o] = struct{}{}
	d.most = max(d.most, len(d.objects))
	return true
}

func (d *Device) untrack(o shutter) {
	d.mu.Lock()
	delete(d.objects, o)
	// A map keeps the room that it had, and grows with what comes and goes: after a crowd of
	// connections those that are left move into a new one.
	if n := len(d.objects); d.most >= 1024 && n <= d.most/16 && !d.closed {
		left := make(map[shutter]struct{}, n)
		maps.Copy(left, d.objects)
		d.objects, d.most = left, n
	}
	d.mu.Unlock()
}

// now returns the device's time.
func (d *Device) now() verbs.Instant { return verbs.Instant(time.Since(d.epoch)) }

// wires returns how many there are, also while they are being made.
func (d *Device) wires() int { return max(d.cfg.Wires, 1) }

// allWires is the set of all wires, a bit each.
func (d *Device) allWires() uint32 { return 1<<d.wires() - 1 }

// pickPort chooses the wire of a new queue pair, in turn.
func (d *Device) pickPort() *port {
	return d.ports[int(d.next.Add(1)-1)%len(d.ports)]
}

// ephemeralPort chooses the source port that a REQ shows.
func (d *Device) ephemeralPort() uint16 { return uint16(49152 + mrand.IntN(16384)) }

// drive lets every wire that nobody drives make one step.
func (d *Device) drive() {
	for _, p := range d.ports {
		p.drive()
	}
}

// parkOn has the threads of a set of wires take over from a waiter that parks now; unparkOn
// comes after.
func (d *Device) parkOn(set uint32) {
	for ; set != 0; set &= set - 1 {
		d.ports[bits.TrailingZeros32(set)].role.Park()
	}
}

func (d *Device) unparkOn(set uint32) {
	for ; set != 0; set &= set - 1 {
		d.ports[bits.TrailingZeros32(set)].role.Unpark()
	}
}

// stepped returns when the steps that are being made have ended.
func (d *Device) stepped() {
	for _, p := range d.ports {
		_ = p.do(func() error { return nil }) // a closed wire makes no steps
	}
}

// barrier returns when no wire holds anything of memory that was looked up before the call.
func (d *Device) barrier() {
	for _, p := range d.ports {
		// A closed wire makes no steps.
		_ = p.do(func() error { p.wire.Quiesce(d.now()); return nil })
	}
}

// fail ends all waits after the link has died: nothing will be sent or received any more.
func (d *Device) fail(err error) {
	d.warn("the socket failed: " + err.Error())
	d.mu.RLock()
	defer d.mu.RUnlock()
	for o := range d.objects {
		o.shut()
	}
}

func (d *Device) log(msg string, args ...any) {
	if d.cfg.Logger != nil {
		d.cfg.Logger.Info("doorbell: "+msg, args...)
	}
}

func (d *Device) warn(msg string) {
	if d.cfg.Logger != nil {
		d.cfg.Logger.Warn("doorbell: " + msg)
	}
}
