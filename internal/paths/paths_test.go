package paths

import (
	"testing"

	"github.com/doorbell-rdma/doorbell/transport"
)

func TestFlag(t *testing.T) {
	var f Flag
	if err := f.Set("gso,cache"); err == nil {
		t.Error("an unknown name was taken")
	}
	if err := f.Set("gso,spin"); err != nil || f.String() != "gso,spin" {
		t.Errorf("got %q, %v", f.String(), err)
	}
	var c transport.Config
	if f.Apply(&c); !c.NoGSO || c.NoGRO || c.Spin >= 0 || c.RecvBuffer != 0 {
		t.Errorf("got %+v", c)
	}
	if err := f.Set(""); err != nil || len(f) != 0 {
		t.Errorf("an empty list: %v, %v", f, err)
	}
}
