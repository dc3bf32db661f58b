package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/doorbell-rdma/doorbell/internal/linuxpeer"
	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// pingpongFlags are those of the ibv_*_pingpong programs, as far as they mean something.
type pingpongFlags struct {
	deviceFlags
	o    linuxpeer.Pingpong
	conn string
	srq  bool
	qps  int
}

func (a *app) pingpong() *cobra.Command {
	p := &pingpongFlags{conn: "RC", qps: 16, o: linuxpeer.Pingpong{
		Size: 4096, Count: 1000, MTU: verbs.MTU1024, Depth: 500, Patience: 10 * time.Second,
	}}
	p.port = linuxpeer.PingpongPort
	cmd := &cobra.Command{
		Use:   "pingpong [HOST]",
		Short: "Ping as ibv_rc_pingpong and its kin do, with Linux at the other end or Doorbell",
		Long: `Speaks the protocol of ibv_rc_pingpong, with -c UC or UD of ibv_uc_pingpong or
ibv_ud_pingpong, with --srq of ibv_srq_pingpong: both ends tell each other over
TCP where to find their queue pairs. Options are theirs, but for -c, which is
--check there; both ends must be given the same. Without HOST it is the server
of one client. All speak over UDP port 4791.`,
		Example: `  perf pingpong --bind 127.0.0.2
  perf pingpong 127.0.0.2 --bind 127.0.0.1 -s 64 -n 10000
With Linux, where -g names its own address:
  ibv_rc_pingpong -d rxe0 -g 1             and  perf pingpong 192.0.2.2
  perf pingpong -c UD                      and  ibv_ud_pingpong -d rxe0 -g 1 -s 1024 192.0.2.1`,
		Args: atMost(1, "one HOST"),
	}
	p.registerDevice(cmd)
	f := cmd.Flags()
	f.VarP(whole[uint16]{&p.port, 1, 65535}, "port", "p", "TCP port")
	f.VarP(choice{&p.conn, []string{"RC", "UC", "UD"}}, "connection", "c", "connection type, and so which program")
	f.BoolVar(&p.srq, "srq", false, "be ibv_srq_pingpong: several QPs with one shared receive queue")
	f.VarP(whole[int]{&p.qps, 1, linuxpeer.MaxPingpongQPs}, "num-qp", "q", "with --srq: number of QPs")
	f.VarP(whole[int]{&p.o.Size, 1, 1 << 30}, "size", "s", "message size in bytes; over UD at most a packet, 1024 if not given")
	f.VarP(whole[int]{&p.o.Count, 1, 1 << 30}, "iters", "n", "messages each way, with --srq of all QPs together")
	f.VarP(mtuFlag{&p.o.MTU}, "mtu", "m", "path MTU: 256 to 4096; of no meaning over UD")
	f.VarP(whole[int]{&p.o.Depth, 1, 16384}, "rx-depth", "r", "receives posted")
	f.BoolVar(&p.o.Check, "check", false, "check what comes: their -c, which the other end must be given too")
	f.Var(seconds{&p.o.Patience, time.Millisecond, time.Hour}, "timeout", "give up when nothing comes for so long, as when a message of UC or UD is lost")
	f.BoolVarP(&p.events, "events", "e", false, "sleep on completion events")
	f.IntP("gid-idx", "g", 0, "accepted for their sake: --bind says which address is ours")
	f.StringP("ib-dev", "d", "", "accepted for their sake")
	f.IntP("ib-port", "i", 1, "accepted for their sake")
	f.IntP("sl", "l", 0, "accepted for their sake")
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return a.runPingpong(cmd, p, args) }
	return cmd
}

// check finds what is wrong with the flags together.
func (p *pingpongFlags) check(cmd *cobra.Command) error {
	p.o.Type = services[p.conn]
	if p.o.Type == verbs.UD && !cmd.Flags().Changed("size") {
		p.o.Size = 1024
	}
	if p.srq {
		p.o.QPs = p.qps
	}
	switch {
	case p.srq && p.o.Type != verbs.RC:
		return usageError{fmt.Errorf("ibv_srq_pingpong is for RC: --srq and -c %s exclude each other", p.conn)}
	case p.srq && p.o.Check:
		return usageError{errors.New("ibv_srq_pingpong checks nothing: --srq and --check exclude each other")}
	case !p.srq && cmd.Flags().Changed("num-qp"):
		return usageError{errors.New("-q is ibv_srq_pingpong's: it goes with --srq")}
	case p.o.Type == verbs.UD && p.o.Size > verbs.MTU4096.Bytes():
		return usageError{fmt.Errorf("-s is %d: over UD a message is one packet, of at most 4096 bytes", p.o.Size)}
	}
	cfg, err := p.config()
	if err == nil && cfg.Bind.Port() != 0 && cfg.Bind.Port() != transport.Port {
		err = usageError{fmt.Errorf("--bind %s: the pingpongs speak over UDP port %d", p.bind, transport.Port)}
	}
	return err
}

// program is whose protocol is spoken.
func (p *pingpongFlags) program() string {
	if p.srq {
		return "ibv_srq_pingpong"
	}
	return "ibv_" + strings.ToLower(p.conn) + "_pingpong"
}

func (a *app) runPingpong(cmd *cobra.Command, p *pingpongFlags, args []string) (err error) {
	if err := p.check(cmd); err != nil {
		return err
	}
	var to target
	if len(args) > 0 {
		if to, err = parseTarget(args[0]); err != nil {
			return err
		}
		if to.udp != 0 {
			return usageError{fmt.Errorf("host %q: the pingpongs speak over UDP port %d; -p is the TCP port", args[0], transport.Port)}
		}
	}
	return a.onDevice(cmd.Context(), &p.deviceFlags, func(ctx context.Context, dev *device) error {
		return a.pingpongOn(ctx, p, dev, to)
	})
}

// pingpongOn plays, as the client of a server, if there is one to go to, and reports.
func (a *app) pingpongOn(ctx context.Context, p *pingpongFlags, dev *device, to target) (err error) {
	if most := dev.Attr().MaxMTU.Bytes(); p.o.Type == verbs.UD && p.o.Size > most {
		return fmt.Errorf("-s is %d: over UD a message is one packet, which is at most %d bytes here", p.o.Size, most)
	}
	var r linuxpeer.PingpongResult
	if to.name != "" {
		r, err = p.client(ctx, dev, to)
	} else {
		r, err = a.pingpongServer(ctx, p, dev)
	}
	switch {
	case ctx.Err() != nil:
		return errInterrupted
	case errors.Is(err, linuxpeer.ErrSilence) && p.o.Type != verbs.RC:
		return fmt.Errorf("%w; over %s a lost message is not repeated", err, p.conn)
	case err != nil:
		return err
	}
	sec := max(r.Elapsed, 1).Seconds()
	bytes := float64(p.o.Size) * float64(p.o.Count) * 2
	fmt.Fprintf(a.stdout, "%.0f bytes in %.2f seconds = %.2f Mbit/sec\n", bytes, sec, bytes*8/sec/1e6)
	fmt.Fprintf(a.stdout, "%d iters in %.2f seconds = %.2f usec/iter\n", p.o.Count, sec, sec*1e6/float64(p.o.Count))
	return nil
}

func (p *pingpongFlags) client(ctx context.Context, dev *device, to target) (r linuxpeer.PingpongResult, err error) {
	if err := to.resolve(ctx, dev.LocalAddr().Addr()); err != nil {
		return r, err
	}
	r, err = linuxpeer.PingpongClient(ctx, dev.Device, netip.AddrPortFrom(to.addr, p.port), p.o)
	if errors.Is(err, syscall.ECONNREFUSED) {
		err = fmt.Errorf("refused: nobody listens on TCP port %d of %v; start perf pingpong or %s there", p.port, to.addr, p.program())
	}
	return r, err
}

func (a *app) pingpongServer(ctx context.Context, p *pingpongFlags, dev *device) (r linuxpeer.PingpongResult, err error) {
	host := ""
	if local := dev.LocalAddr().Addr(); !local.IsUnspecified() {
		host = local.String()
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", net.JoinHostPort(host, fmt.Sprint(p.port)))
	if err != nil {
		return r, err
	}
	defer ln.Close()
	fmt.Fprintf(a.stdout, "Waiting for %s on %v\n", p.program(), ln.Addr())
	return linuxpeer.PingpongServer(ctx, dev.Device, ln, p.o)
}
