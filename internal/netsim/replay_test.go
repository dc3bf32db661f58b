package netsim

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
)

// special says of a capture what cannot be read from it.
type special struct {
	why string
	// skip: there is nothing to replay.
	skip bool
	// regions that Linux had, address and length by R_Key, where no request that it granted
	// shows them.
	regions map[uint32][2]uint64
	// silent: Linux answers something that we do not.
	silent bool
	// truncated: the capture shows answers to packets that are not in it.
	truncated bool
	// deaf: nothing that A sent has reached B.
	deaf bool
}

var specials = map[string]special{
	"nak_write_oob_v4": {
		why:     "64 bytes, 10 before the end of 64 KiB",
		regions: map[uint32][2]uint64{0x3a9f: {0x55f1cb9b4ff6 + 10 - 1<<16, 1 << 16}},
	},
	"send_inv_plain_mr_v4": {
		silent: true,
		why: "rxe ACKs a SEND with invalidate whose R_Key is not a window's, and goes to ERR; the ACK's MSN 0 says that " +
			"it was not done. We go to ERR in silence: an error of class J has no NAK",
	},
	"mtu1024_write_bw_5000_v6": {truncated: true, why: "30 ACKs and not the packets they are for"},
	"retry_exceeded_v4":        {deaf: true, why: "A was cut off"},
	"cm_reject_v4":             {skip: true, why: "no connection"},
	"cm_reject_v6":             {skip: true, why: "no connection"},
	"userspace_probe":          {skip: true, why: "no connection"},
}

// mode is a way to replay a capture.
type mode struct {
	together bool
	// lostCost: see explain; 0 when nothing was lost.
	lostCost int
}

// modes returns the ways to replay a capture in a role.
func modes(name, role string, sp special) []mode {
	switch {
	case role == "B" && sp.deaf:
		return nil
	case role == "A" || !strings.HasPrefix(name, "loss_"):
		return []mode{{}, {together: true}}
	case name == "loss_read_bw_5000_v4", name == "loss_atomic_fadd_v4":
		// Not together: a READ or atomic that comes twice at a time we answer once.
		return []mode{{lostCost: 2}, {lostCost: 4}}
	}
	return []mode{{lostCost: 2}, {lostCost: 4}, {lostCost: 2, together: true}, {lostCost: 4, together: true}}
}

// TestReplayCaptures replays every capture of two Linux hosts with our wire as either host:
// see replay. Packets arrive one by one, and in another run together where Linux answered
// together.
func TestReplayCaptures(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(captureDir, "*.pcap"))
	if err != nil || len(files) == 0 {
		t.Fatal("no captures", err)
	}
	var table strings.Builder
	answers, requests := 0, 0
	table.WriteString(rowHead)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".pcap")
		sp := specials[name]
		if sp.skip {
			fmt.Fprintf(&table, "%-32s skipped: %s\n", name, sp.why)
			continue
		}
		if sp.why != "" {
			fmt.Fprintf(&table, "%-32s (%s)\n", name, sp.why)
		}
		frames := readFrames(t, name)
		hosts := []netip.Addr{frames[0].src.Addr(), frames[0].dst.Addr()}
		for i, role := range []string{"A", "B"} {
			t.Run(name+"/"+role, func(t *testing.T) {
				tales := map[int]*tale{}
				for _, how := range modes(name, role, sp) {
					r := newReplay(t, hosts[i], discover(t, frames), sp.regions, false)
					r.together, r.silent = how.together, sp.silent && role == "B"
					r.truncated = sp.truncated
					r.lossless = !strings.HasPrefix(name, "loss_")
					if cost := how.lostCost; cost > 0 {
						if tales[cost] == nil {
							tales[cost] = explain(t, r.qps[0].endpoint, cost)
						}
						r.lost, r.qps[0].told = tales[cost].lost, tales[cost].answers
					}
					r.play(frames)
					var x row
					r.check(&x)
					if t.Failed() {
						t.Fatalf("%+v", how)
					}
					label := role
					if how.together {
						label += " together"
					}
					table.WriteString(x.line(name, label))
					answers, requests = answers+x.answers, requests+x.requests
				}
			})
		}
	}
	t.Logf("%d answers and %d requests compared\n%s", answers, requests, table.String())
	if !t.Failed() && (answers < 1000 || requests < 2000) {
		t.Errorf("only %d answers and %d requests were compared", answers, requests)
	}
}
