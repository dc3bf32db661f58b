//go:build interop && linux

package interop

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"
)

// A loss says which packets the bridge drops.
type loss struct {
	name string
	// match picks packets by what nftables sees, without the UDP port; "" for all.
	match string
	// towards limits it to packets for the guest or for us; both is each for itself.
	towards direction
	// random drops one in so many, at random; 0 means the first one only.
	random int
}

type direction uint8

const (
	both direction = iota
	toGuest
	toUs
)

// In the UDP payload: the BTH's opcode comes first; a MAD's attribute ID follows 12 bytes of
// BTH, 8 of DETH and 16 of its own header. Offsets are in bits from the UDP header, of 8 bytes.
func opcode(op int) string { return fmt.Sprintf("@th,64,8 0x%02x", op) }
func mad(id int) string    { return fmt.Sprintf("@th,64,8 0x64 @th,352,16 0x%04x", id) }

// The first packet of each kind, and a little of everything. Of the kinds that only one side
// sends, or one side at a time, the rule for the other direction just never fires.
var losses = []loss{
	{name: "0.5%", random: 200},
	{name: "REQ", match: mad(0x10)},
	{name: "REP", match: mad(0x13)},
	{name: "RTU", match: mad(0x14)},
	{name: "DREQ", match: mad(0x15)},
	{name: "ACK", match: opcode(0x11)},
	{name: "SEND", match: "@th,64,8 { 0x00, 0x04 }"},
	{name: "READ response", match: "@th,64,8 { 0x0d, 0x10 }"},
	{name: "atomic ACK", match: opcode(0x12)},
}

func (l loss) rule() string {
	how := "limit rate 1/day burst 1 packets"
	if l.random > 0 {
		how = fmt.Sprintf("numgen random mod %d == 0", l.random)
	}
	return fmt.Sprintf("meta l4proto udp udp dport 4791 %s %s counter drop", l.match, how)
}

// lose makes the bridge drop packets until the test ends.
func lose(t *testing.T, l loss) {
	t.Helper()
	in, out := l.rule(), l.rule()
	switch l.towards {
	case toGuest:
		in = ""
	case toUs:
		out = ""
	}
	nft(t, fmt.Sprintf(`
table bridge loss {
	chain in {
		type filter hook input priority 0
		%s
	}
	chain out {
		type filter hook output priority 0
		%s
	}
}`, in, out))
	t.Cleanup(func() { nft(t, "delete table bridge loss") })
}

func nft(t *testing.T, rules string) {
	t.Helper()
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s\n%s", err, out, rules)
	}
}

// lost returns how many packets have been dropped since lose.
func lost(t *testing.T) (n int) {
	t.Helper()
	return counted(t, "loss")
}

// counted returns the sum of all counters in a table of the bridge.
func counted(t *testing.T, table string) (n int) {
	t.Helper()
	out, err := exec.Command("nft", "-j", "list", "table", "bridge", table).Output()
	if err != nil {
		t.Fatalf("nft: %v", err)
	}
	var list struct {
		NFTables []struct {
			Rule *struct {
				Expr []struct {
					Counter *struct{ Packets int }
				}
			}
		}
	}
	if err := json.NewDecoder(bytes.NewReader(out)).Decode(&list); err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	for _, o := range list.NFTables {
		if o.Rule == nil {
			continue
		}
		for _, e := range o.Rule.Expr {
			if e.Counter != nil {
				n += e.Counter.Packets
			}
		}
	}
	return n
}

// count counts packets by kind until the test ends; see counted.
func count(t *testing.T, table, match string, towards direction) {
	t.Helper()
	hook := map[direction]string{toUs: "prerouting", toGuest: "postrouting"}[towards]
	nft(t, fmt.Sprintf(`
table bridge %s {
	chain c {
		type filter hook %s priority -10
		meta l4proto udp udp dport 4791 %s counter
	}
}`, table, hook, match))
	t.Cleanup(func() { nft(t, "delete table bridge "+table) })
}
