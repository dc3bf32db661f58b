package cm

import (
	"reflect"
	"testing"
)

// When the last of a crowd of connections has gone, the maps that held them go, too; a few are
// no reason to make new ones.
func TestMapsOfACrowd(t *testing.T) {
	n := uint32(0)
	c := New(Config{Rand: func() uint32 { n++; return n }})
	maps := func() (p [3]uintptr) {
		for i, m := range []any{c.conns, c.byPeer, c.byQPN} {
			p[i] = reflect.ValueOf(m).Pointer()
		}
		return p
	}
	for _, tc := range []struct {
		conns int
		kept  bool
	}{{crowd - 1, true}, {crowd, false}, {1, true}} {
		before := maps()
		all := make([]*conn, tc.conns)
		for i := range all {
			all[i] = c.newConn()
		}
		for _, cn := range all {
			cn.state = Timewait
			c.free(cn)
		}
		after := maps()
		for i := range after {
			if (after[i] == before[i]) != tc.kept {
				t.Errorf("%d connections, map %d: kept %v, want %v", tc.conns, i, after[i] == before[i], tc.kept)
			}
		}
		if len(c.conns) != 0 {
			t.Errorf("%d connections left of %d", len(c.conns), tc.conns)
		}
		c.check()
	}
}
