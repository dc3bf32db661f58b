package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"
)

// asPeers makes the test's own binary the command.
const asPeers = "DOORBELL_TEST_AS_PEERS"

func TestMain(m *testing.M) {
	if os.Getenv(asPeers) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// TestAll runs every workload of every transport, briefly.
func TestAll(t *testing.T) {
	t.Setenv(asPeers, "1")
	var out bytes.Buffer
	if err := all(t.Context(), os.Args[0], 50*time.Millisecond, &out); err != nil {
		t.Fatal(err)
	}
	var figures []figure
	if err := json.Unmarshal(out.Bytes(), &figures); err != nil {
		t.Fatal(err)
	}
	if want := len(transports) * len(workloads); len(figures) != want {
		t.Errorf("got %d figures, want %d", len(figures), want)
	}
	for _, f := range figures {
		name := fmt.Sprintf("%s: %s", f.Transport, f.Workload)
		if f.Error != "" {
			t.Errorf("%s: %s", name, f.Error)
		}
		if f.P50+f.Rate+f.Gbps <= 0 || f.P50 > f.P99 {
			t.Errorf("%s: got %+v", name, f)
		}
	}
}

func TestUnknownTransport(t *testing.T) {
	if err := run(t.Context(), []string{"sctp", "{}"}, nil); err == nil {
		t.Error("got no error for a transport that is not there")
	}
}
