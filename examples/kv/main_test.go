package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

func TestEntry(t *testing.T) {
	e := make(entry, entryLen)
	if k, _, err := e.parse(); k != "" || err != nil {
		t.Errorf("an empty entry: %q, %v", k, err)
	}
	n, err := e.fill(7, "key", []byte("value"))
	if err != nil {
		t.Fatal(err)
	}
	if k, v, err := e.parse(); k != "key" || string(v) != "value" || err != nil {
		t.Errorf("parsed %q, %q, %v", k, v, err)
	}
	for i := offVersion; i < n; i++ {
		e[i] ^= 0x40
		if k, v, err := e.parse(); err == nil && e.version() != 0 {
			t.Errorf("byte %d changed, and parsed as %q, %q", i, k, v)
		}
		e[i] ^= 0x40
	}
	for _, bad := range []struct {
		key   string
		value int
	}{{"", 1}, {strings.Repeat("k", keyLen+1), 1}, {"k", valueLen + 1}} {
		if _, err := e.fill(1, bad.key, make([]byte, bad.value)); err == nil {
			t.Errorf("key of %d and value of %d bytes were taken", len(bad.key), bad.value)
		}
	}
}

// startServer runs a server in this process; stop ends it and returns its error.
func startServer(t *testing.T, addr string) (stop func() error) {
	t.Helper()
	dev, err := open(addr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	out, in := newPipe()
	done := make(chan error, 1)
	go func() {
		done <- serve(ctx, dev, 7481, in)
		_ = dev.Close() // what serve says counts
	}()
	select {
	case line := <-out:
		if !strings.HasPrefix(line, "listening") {
			t.Fatalf("the server says %q", line)
		}
	case err := <-done:
		t.Fatal(err)
	}
	return func() error { cancel(); return <-done }
}

// newPipe returns a writer and a channel that gets its first line.
func newPipe() (<-chan string, *firstLine) {
	f := &firstLine{line: make(chan string, 1)}
	return f.line, f
}

type firstLine struct {
	mu   sync.Mutex
	line chan string
}

func (f *firstLine) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case f.line <- string(p):
	default:
	}
	return len(p), nil
}

// TestSharedCounters: several clients add to the same counters and overwrite the same long
// values, while the server writes too; no update is lost and no torn value is taken for a
// whole one. With the race detector it shows that nobody touches the table by hand.
func TestSharedCounters(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	stop := startServer(t, "127.4.2.2")
	const clients, rounds = 3, 60
	var wg sync.WaitGroup
	for n := range clients {
		dev, err := open(fmt.Sprintf("127.4.2.%d", 10+n))
		if err != nil {
			t.Fatal(err)
		}
		defer dev.Close()
		c, err := dial(ctx, dev, netip.MustParseAddrPort("127.4.2.2:7481"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.close()
		wg.Go(func() {
			for i := range rounds {
				if _, err := c.add(ctx, "counter", 1); err != nil {
					t.Error(err)
					return
				}
				if err := c.put(ctx, "long", bytes.Repeat([]byte{byte('a' + n)}, 5000+i)); err != nil {
					t.Error(err)
					return
				}
				v, err := c.get(ctx, "long")
				if err != nil || len(v) < 5000 || !bytes.Equal(v, bytes.Repeat(v[:1], len(v))) {
					t.Errorf("a value of %d bytes that nobody wrote: %v", len(v), err)
					return
				}
			}
			t.Logf("client %d: torn %d, busy %d", n, c.torn, c.busy)
		})
	}
	wg.Wait()
	dev, err := open("127.4.2.3")
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	c, err := dial(ctx, dev, netip.MustParseAddrPort("127.4.2.2:7481"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	if v, err := c.get(ctx, "counter"); err != nil || string(v) != fmt.Sprint(clients*rounds) {
		t.Errorf("the counter is %s, want %d; %v", v, clients*rounds, err)
	}
	if v, err := c.get(ctx, "uptime"); err != nil || len(v) == 0 {
		t.Errorf("the server's own entry: %q, %v", v, err)
	}
	if _, err := c.get(ctx, "nothing"); err == nil {
		t.Error("a key that nobody put")
	}
	// More keys than one slot: probing finds each.
	for i := range 40 {
		if err := c.put(ctx, fmt.Sprint("key", i), fmt.Append(nil, i)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 40 {
		if v, err := c.get(ctx, fmt.Sprint("key", i)); err != nil || string(v) != fmt.Sprint(i) {
			t.Fatalf("key%d: %q, %v", i, v, err)
		}
	}
	if err := stop(); err != nil {
		t.Errorf("the server: %v", err)
	}
}

// TestTornRead: a reader that meets a half-written entry reads again until it is whole.
func TestTornRead(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	stop := startServer(t, "127.4.3.2")
	dev, err := open("127.4.3.1")
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	var cs [2]*client
	for i := range cs {
		if cs[i], err = dial(ctx, dev, netip.MustParseAddrPort("127.4.3.2:7481")); err != nil {
			t.Fatal(err)
		}
		defer cs[i].close()
	}
	writer, reader := cs[0], cs[1]
	if err := writer.put(ctx, "k", []byte("old")); err != nil {
		t.Fatal(err)
	}
	// Half of the next version: the version alone.
	i := slot("k", 0)
	whole, err := writer.read(ctx, i)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := whole.fill(2, "k", []byte("new")); err != nil {
		t.Fatal(err)
	}
	half := func(off, n int) {
		if err := writer.do(ctx, verbs.SendWR{Opcode: verbs.RDMAWrite, SGList: writer.mr.SGL(off, n)}, i, off); err != nil {
			t.Fatal(err)
		}
	}
	half(offVersion, 8)
	short, cancelShort := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancelShort()
	if v, err := reader.get(short, "k"); err == nil {
		t.Fatalf("a torn entry was read as %q", v)
	}
	if reader.torn == 0 {
		t.Error("nothing torn was noticed")
	}
	half(offVersion, 100)
	if v, err := reader.get(ctx, "k"); err != nil || string(v) != "new" {
		t.Errorf("the whole entry: %q, %v", v, err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// TestOwnerGone: what a client has locked when it goes is unlocked, and mended if it was half
// written; the locks of others stay.
func TestOwnerGone(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	stop := startServer(t, "127.4.9.2")
	dev, err := open("127.4.9.1")
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	var cs [3]*client
	for i := range cs {
		if cs[i], err = dial(ctx, dev, netip.MustParseAddrPort("127.4.9.2:7481")); err != nil {
			t.Fatal(err)
		}
	}
	stays, goes, other := cs[0], cs[1], cs[2]
	defer stays.close()
	defer other.close()
	// The entries are unlocked from the first on: when the last is free, the others were looked at.
	keys := []string{"one", "two", "three", "four"}
	slices.SortFunc(keys, func(a, b string) int { return slot(a, 0) - slot(b, 0) })
	torn, kept, idle, last := keys[0], keys[1], keys[2], keys[3]
	for _, k := range keys {
		if err := other.put(ctx, k, []byte("first")); err != nil {
			t.Fatal(err)
		}
	}
	for _, l := range []struct {
		c   *client
		key string
	}{{goes, torn}, {stays, kept}, {goes, last}} {
		if ok, err := l.c.swap(ctx, slot(l.key, 0), 0, l.c.id); err != nil || !ok {
			t.Fatal(ok, err)
		}
	}
	// Half of the next version: the version alone.
	whole, err := goes.read(ctx, slot(torn, 0))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := whole.fill(2, torn, []byte("second")); err != nil {
		t.Fatal(err)
	}
	err = goes.do(ctx, verbs.SendWR{Opcode: verbs.RDMAWrite, SGList: goes.mr.SGL(offVersion, 8)}, slot(torn, 0), offVersion)
	if err != nil {
		t.Fatal(err)
	}
	goes.close()
	if err := other.put(ctx, last, []byte("again")); err != nil {
		t.Fatalf("a key whose owner has gone: %v", err)
	}
	if v, err := other.get(ctx, torn); err != nil || len(v) != 0 {
		t.Errorf("what was half written is %q, %v", v, err)
	}
	if err := other.put(ctx, torn, []byte("whole")); err != nil {
		t.Error(err)
	}
	for key, want := range map[string]string{torn: "whole", kept: "first", idle: "first", last: "again"} {
		if v, err := other.get(ctx, key); err != nil || string(v) != want {
			t.Errorf("%s is %q, want %q; %v", key, v, want, err)
		}
	}
	if who, err := other.holder(ctx, slot(kept, 0)); err != nil || who != stays.id {
		t.Errorf("the lock of a client that stays is %d's, want %d; %v", who, stays.id, err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// TestPrograms builds the program and runs both ends as the package comment says.
func TestPrograms(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("other loopback interfaces have one address")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	bin := filepath.Join(t.TempDir(), "kv")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	server := exec.CommandContext(ctx, bin, "-serve", "-bind", "127.4.4.2")
	stdout, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), "listening on 127.4.4.2:4791") {
		t.Fatalf("the server says %q, %v", lines.Text(), lines.Err())
	}
	client := func(args string) (string, error) {
		out, err := exec.CommandContext(ctx, bin, append([]string{"-bind", "127.4.4.1", "127.4.4.2"}, strings.Fields(args)...)...).CombinedOutput()
		return string(out), err
	}
	if out, err := client("put colour blue get colour add n 40 add n 2"); err != nil || out != "blue\n40\n42\n" {
		t.Errorf("%q, %v", out, err)
	}
	if out, err := client("get colour bench 0.1"); err != nil || !strings.HasPrefix(out, "blue\n") || !strings.Contains(out, "pairs a second") {
		t.Errorf("%q, %v", out, err)
	}
	if out, err := client("get nothing"); err == nil || !strings.Contains(out, "no such key") {
		t.Errorf("%q, %v", out, err)
	}
	if out, err := client("put colour"); err == nil || !strings.Contains(out, "want get KEY") {
		t.Errorf("%q, %v", out, err)
	}
	// A client that is killed while it holds a lock.
	holder := exec.CommandContext(ctx, bin, "-bind", "127.4.4.3", "127.4.4.2", "hold", "colour", "600")
	held, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	if l := bufio.NewScanner(held); !l.Scan() || l.Text() != "holding colour" {
		t.Fatalf("the holder says %q, %v", l.Text(), l.Err())
	}
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = holder.Wait() // killed
	if out, err := client("put colour red get colour"); err != nil || out != "red\n" {
		t.Errorf("after the lock's owner was killed: %q, %v", out, err)
	}
	if err := server.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := server.Wait(); err != nil {
		t.Errorf("the interrupted server: %v", err)
	}
}
