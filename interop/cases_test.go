//go:build interop && linux

package interop

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// Corners of the connection manager: what happens when something is late, lost or unwanted.

func bothIPs(t *testing.T, f func(e *env)) {
	t.Helper()
	for _, ip := range []string{"IPv4", "IPv6"} {
		t.Run(ip, func(t *testing.T) {
			theRig.setMTU(t, linkMTU[verbs.MTU1024])
			f(newEnv(t, ip))
		})
	}
}

// A Linux client whose RTU gets lost, however often, sends all the same. We have posted our
// greeting in RTR; the client's first message establishes the connection, and the greeting
// leaves.
func TestLostRTUWeArePassive(t *testing.T) {
	bothIPs(t, func(e *env) {
		lose(e.T, loss{name: "RTU", match: mad(0x14), towards: toUs, random: 1})
		ln := e.listen(RDMAPort)
		p, err := theRig.start(e.ctx, fmt.Sprintf("rdma_client -s %v -p %d", e.host, RDMAPort))
		if err != nil {
			e.Fatal(err)
		}
		start := time.Now()
		deferred, err := RDMAServer(e.ctx, e.dev, ln, 0)
		took := time.Since(start)
		if err := e.finish(err, p, "rdma_client: end 0"); err != nil {
			e.Error(err)
		}
		if lost(e.T) == 0 {
			e.Error("no RTU was lost, so this tested nothing")
		}
		if c := e.dev.Counters(); deferred != 1 || c["qp_publications"] != 1 || c["cm_comm_est"] != 1 {
			e.Errorf("%d sends were deferred, want 1; counters: %v", deferred, counters(e.dev))
		}
		e.Logf("request answered %v after we began to listen", took.Round(time.Millisecond))
	})
}

// The same with the sides changed shows what it is good for: a Linux server holds our request
// and does not answer, until its REP was repeated.
func TestLostRTULinuxIsPassive(t *testing.T) {
	bothIPs(t, func(e *env) {
		count(e.T, "reps", mad(0x13), toUs)
		p, err := e.serve(fmt.Sprintf("rdma_server -s %v -p %d", e.guest, RDMAPort), RDMAPort, true)
		if err != nil {
			e.Fatal(err)
		}
		lose(e.T, loss{name: "RTU", match: mad(0x14), towards: toGuest})
		start := time.Now()
		err = RDMAClient(e.ctx, e.dev, e.to(RDMAPort), 0)
		took := time.Since(start)
		if err := e.finish(err, p, "rdma_server: end 0"); err != nil {
			e.Error(err)
		}
		if n := lost(e.T); n != 1 {
			e.Errorf("%d RTUs were lost, want 1", n)
		}
		if n := counted(e.T, "reps"); n < 2 {
			e.Errorf("%d REP: Linux has learned to take a message for an RTU; change the documentation", n)
		}
		e.Logf("request answered after %v", took.Round(time.Millisecond))
	})
}

// A Linux client whose server takes its time repeats its REQ; so does the connection come
// about when we take ours.
func TestSlowAcceptByUs(t *testing.T) {
	bothIPs(t, func(e *env) {
		count(e.T, "reqs", mad(0x10), toUs)
		ln := e.listen(RDMAPort)
		p, err := theRig.start(e.ctx, fmt.Sprintf("rdma_client -s %v -p %d", e.host, RDMAPort))
		if err != nil {
			e.Fatal(err)
		}
		req, err := ln.Next(e.ctx)
		if err != nil {
			e.Fatal(err)
		}
		for counted(e.T, "reqs") < 2 {
			select {
			case <-time.After(100 * time.Millisecond):
			case <-e.ctx.Done():
				e.Fatal("Linux does not repeat its REQ")
			}
		}
		_, err = rdmaServe(e.ctx, e.dev, req, 0)
		if err := e.finish(err, p, "rdma_client: end 0"); err != nil {
			e.Error(err)
		}
	})
}

// A Linux server that takes its time answers our repeated REQ with an MRA, which we heed.
func TestSlowAcceptByLinux(t *testing.T) {
	bothIPs(t, func(e *env) {
		count(e.T, "mras", mad(0x11), toUs)
		p, err := e.serve(fmt.Sprintf("cmcase slow %v %d 8", e.guest, RDMAPort), RDMAPort, true)
		if err != nil {
			e.Fatal(err)
		}
		err = RDMAClient(e.ctx, e.dev, e.to(RDMAPort), 0)
		if err := e.finish(err, p, "echoed"); err != nil {
			e.Error(err)
		}
		if counted(e.T, "mras") == 0 {
			e.Error("Linux sent no MRA, so this tested nothing")
		}
	})
}

// A refusal carries its reason and private data, in both directions.
func TestReject(t *testing.T) {
	const why = "not today"
	bothIPs(t, func(e *env) {
		e.Run("by Linux", func(t *testing.T) {
			p, err := e.serve(fmt.Sprintf("cmcase reject %v %d '%s'", e.guest, RDMAPort, why), RDMAPort, true)
			if err != nil {
				t.Fatal(err)
			}
			_, err = e.dev.Dial(e.ctx, e.to(RDMAPort), transport.ConnParam{PrivateData: []byte("hello from Go")})
			var rej *transport.RejectError
			if !errors.As(err, &rej) || rej.Reason != verbs.RejectConsumer || !bytes.HasPrefix(rej.PrivateData, []byte(why+"\x00")) {
				t.Errorf("Dial: %v, want a refusal for reason 28 with %q", err, why)
			}
			if err := e.finish(nil, p, `private data "hello from Go"`); err != nil {
				t.Error(err)
			}
		})
		e.Run("by us", func(t *testing.T) {
			ln := e.listen(RDMAPort)
			defer ln.Close()
			p, err := theRig.start(e.ctx, fmt.Sprintf("cmcase connect %v %d 'hello from C'", e.host, RDMAPort))
			if err != nil {
				t.Fatal(err)
			}
			req, err := ln.Next(e.ctx)
			if err != nil {
				t.Fatal(err)
			}
			if got := req.PrivateData(); !bytes.HasPrefix(got, []byte("hello from C\x00")) {
				t.Errorf("private data of the REQ: %q", got)
			}
			err = req.Reject(0, []byte(why))
			if err := e.finish(err, p, `rejected, reason 28, private data "`+why+`"`); err != nil {
				t.Error(err)
			}
		})
	})
}

// Where nobody listens the reason is 8, in both directions.
func TestNobodyListens(t *testing.T) {
	bothIPs(t, func(e *env) {
		_, err := e.dev.Dial(e.ctx, e.to(9), transport.ConnParam{})
		var rej *transport.RejectError
		if !errors.As(err, &rej) || rej.Reason != verbs.RejectInvalidServiceID {
			e.Errorf("Dial: %v, want a refusal for reason 8", err)
		}
		p, err := theRig.start(e.ctx, fmt.Sprintf("cmcase connect %v 9 x", e.host))
		if err != nil {
			e.Fatal(err)
		}
		if err := e.finish(nil, p, "rejected, reason 8"); err != nil {
			e.Error(err)
		}
	})
}

// Private data of a REP arrives, and a greeting that was posted in RTR, with a client that
// sends nothing: there only the RTU can open the connection.
func TestGreeting(t *testing.T) {
	bothIPs(t, func(e *env) {
		ln := e.listen(RDMAPort)
		p, err := theRig.start(e.ctx, fmt.Sprintf("cmcase connect %v %d x", e.host, RDMAPort))
		if err != nil {
			e.Fatal(err)
		}
		err = func() error {
			req, err := ln.Next(e.ctx)
			if err != nil {
				return err
			}
			qp, err := req.Accept(e.ctx, transport.ConnParam{PrivateData: []byte("welcome")})
			if err != nil {
				return err
			}
			defer qp.Close()
			conn := &linuxpeer.Endpoint{QP: qp}
			greeting := append([]byte("greetings"), 0)
			if err := conn.Do(e.ctx, verbs.SendWR{Opcode: verbs.Send, InlineData: greeting}); err != nil {
				return err
			}
			if n, wait := qp.Published(); n == 1 {
				e.Logf("the greeting waited %v in RTR", wait.Round(time.Microsecond))
			}
			return conn.Disconnected(e.ctx)
		}()
		if err := e.finish(err, p, `connected, private data "welcome"`, `heard "greetings"`); err != nil {
			e.Error(err)
		}
	})
}

// What a program gets that posts in RTR, from Linux and from us. The steps are those of
// testdata/deferral.c.
func TestPostInRTR(t *testing.T) {
	theRig.setMTU(t, linkMTU[verbs.MTU1024])
	e := newEnv(t, "IPv4")
	linux, err := theRig.guest(e.ctx, fmt.Sprintf("deferral rxe0 %d", gid4))
	if err != nil {
		t.Fatalf("%v: %s", err, linux)
	}
	t.Logf("Linux:\n%s", linux)
	for _, s := range []string{`A posts "first": Invalid argument`, `B receives "reused"`} {
		if !strings.Contains(linux, s) {
			t.Errorf("Linux does not say %q any more; change docs/deferral.md", s)
		}
	}
	ours, err := deferral(e)
	t.Logf("Doorbell:\n%s", ours)
	if err != nil {
		t.Fatal(err)
	}
	const want = `A is in RTR
A posts "first": taken
A sees nothing
B sees nothing
A is in RTS
A completes post 0: success
B receives "first"
A posts "second": taken
A completes post 1: success
B receives "second"
`
	if ours != want {
		t.Errorf("got\n%s\nwant\n%s", ours, want)
	}
}

// deferral is testdata/deferral.c on package transport.
func deferral(e *env) (string, error) {
	const slot = 32
	out, err := e.dev.PD().RegisterMR(make([]byte, 2*slot), 0)
	if err != nil {
		return "", err
	}
	defer out.Close()
	in, err := e.dev.PD().RegisterMR(make([]byte, 4*slot), verbs.LocalWrite)
	if err != nil {
		return "", err
	}
	defer in.Close()
	size := verbs.QPCap{MaxSendWR: 8, MaxRecvWR: 8}
	a, err := linuxpeer.NewRaw(e.dev, linuxpeer.RawConfig{Type: verbs.RC, Cap: size})
	if err != nil {
		return "", err
	}
	defer a.Close()
	b, err := linuxpeer.NewRaw(e.dev, linuxpeer.RawConfig{Type: verbs.RC, Cap: size})
	if err != nil {
		return "", err
	}
	defer b.Close()
	for i := range 4 {
		if err := b.PostRecv(verbs.RecvWR{WRID: uint64(i), SGList: in.SGL(i*slot, slot)}); err != nil {
			return "", err
		}
	}

	var said strings.Builder
	post := func(i int, text string) bool {
		copy(out.Bytes()[i*slot:], text+"\x00")
		err := a.PostSend(verbs.SendWR{WRID: uint64(i), Opcode: verbs.Send, Flags: verbs.Signaled, SGList: out.SGL(i*slot, slot)})
		answer := "taken"
		if err != nil {
			answer = err.Error()
		}
		fmt.Fprintf(&said, "A posts %q: %s\n", text, answer)
		return err == nil
	}
	look := func(name string, q *linuxpeer.RawQP) {
		any := false
		for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
			var wc [1]verbs.WC
			if q.CQ().Poll(wc[:]) == 0 {
				continue
			}
			any = true
			if wc[0].Opcode.IsRecv() && wc[0].Status == verbs.WCSuccess {
				text, _, _ := bytes.Cut(in.Bytes()[wc[0].WRID*slot:][:slot], []byte{0})
				fmt.Fprintf(&said, "%s receives %q\n", name, text)
				continue
			}
			fmt.Fprintf(&said, "%s completes post %d: %s\n", name, wc[0].WRID, strings.ToLower(wc[0].Status.String()))
		}
		if !any {
			fmt.Fprintf(&said, "%s sees nothing\n", name)
		}
	}
	if err := a.ToRTR(b.Own, verbs.MTU1024); err != nil {
		return "", err
	}
	if err := b.Connect(a.Own, verbs.MTU1024); err != nil {
		return "", err
	}
	said.WriteString("A is in RTR\n")
	if !post(0, "first") {
		copy(out.Bytes(), "reused\x00")
	}
	look("A", a)
	look("B", b)
	if err := a.ToRTS(b.Own); err != nil {
		return said.String(), err
	}
	said.WriteString("A is in RTS\n")
	look("A", a)
	look("B", b)
	post(1, "second")
	look("A", a)
	look("B", b)
	return said.String(), nil
}
