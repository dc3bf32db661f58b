package transport

import (
	"context"
	"sync"
)

// connLink is what goroutines wait for on a connection: that it is up, that it is down.
// The channels close at most once each.
type connLink struct {
	up, down chan struct{}

	mu      sync.Mutex
	private []byte
	isUp    bool
	isDown  bool
	err     error // why it went down; nil for an orderly end
}

func (l *connLink) init() {
	l.up, l.down = make(chan struct{}), make(chan struct{})
}

// established marks the connection as up.
func (l *connLink) established(private []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isUp || l.isDown {
		return
	}
	l.isUp = true
	if private != nil {
		l.private = private
	}
	close(l.up)
}

// end marks the connection as down; only the first reason counts.
func (l *connLink) end(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isDown {
		return
	}
	l.isDown, l.err = true, err
	close(l.down)
}

func (l *connLink) reason() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

func (l *connLink) privateData() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.private
}

func (l *connLink) waitUp(ctx context.Context) error {
	select {
	case <-l.up:
		return nil
	default:
	}
	select {
	case <-l.up:
		return nil
	case <-l.down:
		if err := l.reason(); err != nil {
			return err
		}
		return ErrDisconnected
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l *connLink) waitDown(ctx context.Context) error {
	select {
	case <-l.down:
	default:
		select {
		case <-l.down:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := l.reason(); err != ErrClosed { //nolint:errorlint // our own sentinel, stored bare
		return err
	}
	return nil
}
