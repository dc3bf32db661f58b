package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strconv"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// client is one connection to a table. One goroutine at a time.
type client struct {
	qp    *transport.QP
	mr    *transport.MR // an entry, and behind it 8 bytes for what an atomic found
	table verbs.RemoteMR
	id    uint64 // what it locks with, which the server has given it; not 0
	// under says that a request is under way: until it completes, its memory is the device's.
	under bool

	torn, busy int // how often it had to try again
}

func dial(ctx context.Context, dev *transport.Device, server netip.AddrPort) (*client, error) {
	mr, err := dev.PD().RegisterMR(make([]byte, entryLen+8), verbs.LocalWrite)
	if err != nil {
		return nil, err
	}
	c := &client{mr: mr}
	// The server asks whether we are there by WRITEs of no bytes.
	if c.qp, err = dev.Dial(ctx, server, transport.ConnParam{Access: verbs.RemoteWrite}); err != nil {
		_ = mr.Close() // the reason to report is err
		return nil, err
	}
	err = c.table.UnmarshalBinary(c.qp.PrivateData())
	if err == nil && c.table.Length != entries*entryLen {
		err = fmt.Errorf("the server's table has %d bytes, want %d", c.table.Length, entries*entryLen)
	}
	if err == nil {
		c.id = binary.BigEndian.Uint64(c.qp.PrivateData()[verbs.RemoteMRSize:])
	}
	if err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

func (c *client) close() {
	_ = c.qp.Close() // it may have ended by itself
	_ = c.mr.Close()
}

// do posts one operation and waits for it. When ctx ends first it goes on, and the next waits for
// it before it begins.
func (c *client) do(ctx context.Context, wr verbs.SendWR, entry, off int) error {
	if err := c.settle(ctx); err != nil {
		return err
	}
	wr.Flags, wr.RKey = verbs.Signaled, c.table.RKey
	wr.RemoteAddr = c.table.Addr + uint64(entry*entryLen+off)
	if err := c.qp.PostSend(wr); err != nil {
		return err
	}
	c.under = true
	return c.settle(ctx)
}

// settle waits for the request that is under way, if there is one.
func (c *client) settle(ctx context.Context) error {
	if !c.under {
		return nil
	}
	wc, err := c.qp.CQ().Next(ctx)
	c.under = err != nil && wc.Status == verbs.WCSuccess // ctx has ended, or the queue: no completion
	return err
}

// read reads an entry, once.
func (c *client) read(ctx context.Context, i int) (entry, error) {
	err := c.do(ctx, verbs.SendWR{Opcode: verbs.RDMARead, SGList: c.mr.SGL(0, entryLen)}, i, 0)
	return c.mr.Bytes()[:entryLen], err
}

// holder reads who holds the lock of an entry.
func (c *client) holder(ctx context.Context, i int) (uint64, error) {
	err := c.do(ctx, verbs.SendWR{Opcode: verbs.RDMARead, SGList: c.mr.SGL(entryLen, 8)}, i, offLock)
	return native(c.mr.Bytes()[entryLen:]), err
}

// swap replaces the lock of an entry if it is old, and reports whether it was.
func (c *client) swap(ctx context.Context, i int, old, to uint64) (bool, error) {
	err := c.do(ctx, verbs.SendWR{
		Opcode: verbs.AtomicCmpAndSwp, SGList: c.mr.SGL(entryLen, 8), CompareAdd: old, Swap: to,
	}, i, offLock)
	return err == nil && native(c.mr.Bytes()[entryLen:]) == old, err
}

// find looks for a key, or for a place to put it in: at its hash and after it, as long as there
// are other keys. What it returns was whole; version 0 means that the key is not there.
func (c *client) find(ctx context.Context, key string) (i int, e entry, value []byte, err error) {
	for probe := 0; probe < entries; {
		i = slot(key, probe)
		if e, err = c.read(ctx, i); err != nil {
			return 0, nil, nil, err
		}
		k, v, err := e.parse()
		switch {
		case errors.Is(err, errTorn):
			c.torn++
			if err := again(ctx); err != nil {
				return 0, nil, nil, err
			}
			continue
		case k == key || e.version() == 0:
			return i, e, v, nil
		}
		probe++
	}
	return 0, nil, nil, errors.New("the table is full")
}

// get returns a key's value: one READ, if nobody writes it just now.
func (c *client) get(ctx context.Context, key string) ([]byte, error) {
	_, e, value, err := c.find(ctx, key)
	if err == nil && e.version() == 0 {
		err = errNoKey
	}
	return value, err
}

func (c *client) put(ctx context.Context, key string, value []byte) error {
	return c.update(ctx, key, func([]byte) ([]byte, error) { return value, nil })
}

// add adds to a counter and returns the sum.
func (c *client) add(ctx context.Context, key string, n int64) (sum int64, err error) {
	err = c.update(ctx, key, func(old []byte) ([]byte, error) {
		sum = n
		if len(old) > 0 {
			was, err := strconv.ParseInt(string(old), 10, 64)
			if err != nil {
				return nil, err
			}
			sum += was
		}
		return strconv.AppendInt(nil, sum, 10), nil
	})
	return sum, err
}

// update replaces a key's value by what f makes of it, under the entry's lock.
func (c *client) update(ctx context.Context, key string, f func(old []byte) ([]byte, error)) error {
	for {
		i, _, _, err := c.find(ctx, key)
		if err != nil {
			return err
		}
		if ok, err := c.swap(ctx, i, 0, c.id); err != nil {
			return err
		} else if !ok {
			c.busy++
			if err := again(ctx); err != nil {
				return err
			}
			continue
		}
		done, err := c.locked(ctx, i, key, f)
		// Whatever happened, others want the lock; ours is the only id that takes it off.
		if ok, uerr := c.swap(context.WithoutCancel(ctx), i, c.id, 0); err == nil && (uerr != nil || !ok) {
			err = errors.Join(errors.New("the lock was not ours any more"), uerr)
		}
		if err != nil || done {
			return err
		}
	}
}

// locked writes an entry that we hold the lock of; false when the place has gone to another key.
func (c *client) locked(ctx context.Context, i int, key string, f func(old []byte) ([]byte, error)) (bool, error) {
	e, err := c.read(ctx, i)
	if err != nil {
		return false, err
	}
	k, old, err := e.parse()
	if err != nil {
		return false, err // nobody writes while we hold the lock, and release mends what is torn
	}
	if k != key && e.version() != 0 {
		return false, nil
	}
	value, err := f(old)
	if err != nil {
		return false, err
	}
	return true, c.write(ctx, i, e, key, value)
}

// write makes the next version of an entry, e as it was read, and writes all but the lock.
func (c *client) write(ctx context.Context, i int, e entry, key string, value []byte) error {
	n, err := e.fill(e.version()+1, key, value)
	if err != nil {
		return err
	}
	return c.do(ctx, verbs.SendWR{Opcode: verbs.RDMAWrite, SGList: c.mr.SGL(offVersion, n-offVersion)}, i, offVersion)
}

// release takes off the locks of a client that has gone, whose requests can come no more. What
// it has left half-written becomes an empty value.
func (c *client) release(ctx context.Context, id uint64) error {
	for i := range entries {
		if holder, err := c.holder(ctx, i); err != nil {
			return err
		} else if holder != id {
			continue
		}
		e, err := c.read(ctx, i)
		if err != nil {
			return err
		}
		// The key is in a WRITE's first packet, and so whole.
		if _, _, torn := e.parse(); torn != nil {
			k, _ := e.lengths()
			if err := c.write(ctx, i, e, string(e[offKey:offKey+k]), nil); err != nil {
				return err
			}
		}
		if _, err := c.swap(ctx, i, id, 0); err != nil {
			return err
		}
	}
	return nil
}

// again lets others go on before the next try.
func again(ctx context.Context) error {
	runtime.Gosched()
	return ctx.Err()
}
