package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/roce"
)

func (a *app) dump() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "dump FILE",
		Short: "Print the RoCEv2 packets of a capture, with the verdict on their ICRC",
		Long: `Prints one line for each packet to UDP port 4791: seconds since the first packet
of the file, source and destination, whether the ICRC is right, and what it says.
It reads pcap and pcapng; Ethernet, Linux cooked, BSD loopback and raw IP; IPv4
and IPv6. It exits with 1 if an ICRC is wrong or could not be checked.

A capture on the loopback interface shows trains of segments unsplit, as single
long packets that no checksum fits: run perf with --no-gso, or use its --capture.`,
		Example: `  perf dump rping.pcap
  perf send_lat 127.0.0.2 --bind 127.0.0.1 -n 5 --capture lat.pcap; perf dump lat.pcap`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{errors.New("dump takes one FILE; see perf dump --help")}
			}
			return nil
		},
	}
	anyPort := false
	cmd.Flags().BoolVar(&anyPort, "any-port", false, "take every UDP datagram for a packet, whatever its port")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		f, err := os.Open(args[0])
		if err != nil {
			return err
		}
		defer f.Close()
		w := bufio.NewWriter(a.stdout)
		err = dump(w, f, anyPort)
		if err := w.Flush(); err != nil {
			return err
		}
		if err != nil {
			return fmt.Errorf("%s: %w", args[0], err)
		}
		return nil
	}
	return cmd
}

// source is what both readers of pcapgo do.
type source interface {
	ReadPacketData() ([]byte, gopacket.CaptureInfo, error)
	LinkType() layers.LinkType
}

// openCapture finds out which format a file has.
func openCapture(r io.Reader) (source, error) {
	br := bufio.NewReaderSize(r, 1<<16)
	head, err := br.Peek(4)
	if err != nil {
		return nil, errors.New("not a capture: shorter than four bytes")
	}
	var s source
	if bytes.Equal(head, []byte{0x0A, 0x0D, 0x0D, 0x0A}) {
		s, err = pcapgo.NewNgReader(br, pcapgo.NgReaderOptions{})
	} else {
		s, err = pcapgo.NewReader(br)
	}
	if err != nil {
		return nil, fmt.Errorf("not a pcap or pcapng capture: %w", err)
	}
	return s, nil
}

// totals counts a file's packets.
type totals struct {
	good, bad, cut, broken, others int
	long                           int // bad ones that are longer than any packet
}

// dump prints a capture and returns why it is not all good.
func dump(w io.Writer, r io.Reader, anyPort bool) error {
	src, err := openCapture(r)
	if err != nil {
		return err
	}
	var t totals
	var first time.Time
	for n := 1; ; n++ {
		frame, ci, err := src.ReadPacketData()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.print(w)
			if errors.Is(err, io.ErrUnexpectedEOF) {
				return fmt.Errorf("the file ends in the middle of packet %d", n)
			}
			return fmt.Errorf("packet %d: %w", n, err)
		}
		if n == 1 {
			first = ci.Timestamp
		}
		d, ok := dissect(frame, src.LinkType(), anyPort)
		if !ok {
			t.others++
			continue
		}
		fmt.Fprintf(w, "%11.6f  %v > %v  %s\n", ci.Timestamp.Sub(first).Seconds(), d.src, d.dst, t.judge(&d))
	}
	t.print(w)
	switch {
	case t.bad > 0:
		return fmt.Errorf("%d packets with a wrong ICRC", t.bad)
	case t.cut > 0:
		return fmt.Errorf("%d packets were cut short by the capture, their ICRC cannot be checked; capture whole packets (tcpdump -s 0)", t.cut)
	}
	return nil
}

// judge counts a packet and returns the verdict and its text.
func (t *totals) judge(d *datagram) string {
	var p roce.Packet
	err := p.Decode(d.payload)
	text := p.String()
	if err != nil {
		text = err.Error()
	}
	switch {
	case d.cut:
		t.cut++
		return "CUT   " + fmt.Sprintf("%d of %d bytes captured", len(d.payload), d.length)
	case !d.icrc():
		t.bad++
		if len(d.payload) > 4096+roce.MaxHeader+roce.ICRCLen {
			t.long++
		}
		return "BAD   " + text
	case err != nil:
		t.broken++
	}
	t.good++
	return "good  " + text
}

// print prints the last line.
func (t *totals) print(w io.Writer) {
	fmt.Fprintf(w, "%d packets: %d good, %d bad ICRC", t.good+t.bad+t.cut, t.good, t.bad)
	if t.cut > 0 {
		fmt.Fprintf(w, ", %d cut short", t.cut)
	}
	if t.broken > 0 {
		fmt.Fprintf(w, ", %d that no receiver takes", t.broken)
	}
	if t.others > 0 {
		fmt.Fprintf(w, "; %d others skipped", t.others)
	}
	if t.long > 0 {
		fmt.Fprintf(w, "; %d bad ones are longer than a packet can be: trains of segments, captured before they were split", t.long)
	}
	fmt.Fprintln(w)
}
