package transport

import (
	"context"
	"sync"
)

// connLink is what goroutines wait for on a connection: that it is up, that it is down. Most
// connections are waited for briefly and then never again, so that nothing is kept for it.
type connLink struct {
	mu sync.Mutex
	// change is closed when isUp or isDown changes; nil while nobody waits.
	change chan struct{}
	// private is what the peer sent along, without the zeros at its end: there were room bytes.
	private []byte
	room    uint8
	isUp    bool
	isDown  bool
	err     error // why it went down; nil for an orderly end
}

// changed wakes who waits. The caller holds mu.
func (l *connLink) changed() {
	if l.change != nil {
		close(l.change)
		l.change = nil
	}
}

// wait blocks until done, called under mu, says true. A connection that is there wins over ctx.
func (l *connLink) wait(ctx context.Context, done func() bool) error {
	for {
		l.mu.Lock()
		if done() {
			l.mu.Unlock()
			return nil
		}
		if l.change == nil {
			l.change = make(chan struct{})
		}
		change := l.change
		l.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// brought notes private data. The caller holds mu, or nobody else knows the link yet.
func (l *connLink) brought(private []byte) {
	n := len(private)
	for n > 0 && private[n-1] == 0 {
		n--
	}
	l.private, l.room = append([]byte(nil), private[:n]...), uint8(len(private))
}

const _ = uint8(MaxAcceptPrivateData) // room holds it

// established marks the connection as up.
func (l *connLink) established(private []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isUp || l.isDown {
		return
	}
	l.isUp = true
	if private != nil {
		l.brought(private)
	}
	l.changed()
}

// end marks the connection as down; only the first reason counts.
func (l *connLink) end(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isDown {
		return
	}
	l.isDown, l.err = true, err
	l.changed()
}

func (l *connLink) reason() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

func (l *connLink) privateData() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.room == 0 {
		return nil
	}
	return append(make([]byte, 0, l.room), l.private...)[:l.room]
}

func (l *connLink) waitUp(ctx context.Context) error {
	up := false
	if err := l.wait(ctx, func() bool { up = l.isUp; return up || l.isDown }); err != nil || up {
		return err
	}
	if err := l.reason(); err != nil {
		return err
	}
	return ErrDisconnected
}

func (l *connLink) waitDown(ctx context.Context) error {
	if err := l.wait(ctx, func() bool { return l.isDown }); err != nil {
		return err
	}
	if err := l.reason(); err != ErrClosed { //nolint:errorlint // our own sentinel, stored bare
		return err
	}
	return nil
}
