// Package bench measures Doorbell: workloads between two devices, what they record, and the
// exchange by which both ends agree on what to run and what came out.
//
// It prints nothing and parses no flags; cmd/perf does. It is not a general benchmark
// framework either: its workloads are those of perftest, so that their figures can be put
// beside those of other RDMA implementations.
//
// A session is one client, one server, and between them a control connection and as many
// data connections as the test asks for. There is no side channel:
//
//	client                                                 server
//	REQ  private data: magic, version, test, parameters  ->        Server.Serve
//	REP  the same magic and version, or REJ saying why  <-         hands a Session to its handler
//	REQ, one per data queue pair: session and index      ->        receives are posted before the REP; not over UD
//	QUEUE, one per data queue pair                      <->        its number, and the memory that is open to the peer
//	START size, iterations or time                       ->
//	GO                                                  <-
//	data                                                <->        also from the server, if bidirectional
//	DONE how many messages there were                   <->        of whoever has sent
//	REPORT what was measured                            <->        both ends now have the same figures
//	... START for the next size, at the end BYE          ->
//
// Only RC delivers everything. Over UC and UD a receiver that has heard DONE waits a fifth of a
// second for what is missing and reports it as lost; a latency test gives a message up that is
// not answered for as long, and lets SYNC make the round before it sends the next, so that no
// late answer is taken for another's.
//
// Messages are SENDs on the control connection. A zero-length RDMA WRITE on it once a second
// asks whether the peer lives: nobody has to answer it but the peer's transport, and a peer
// that is gone ends the session with RETRY_EXC_ERR within seconds, whatever the session waits
// for.
//
//	s, err := bench.Dial(ctx, dev, netip.MustParseAddrPort("127.0.0.2:18515"), bench.Defaults(bench.SendLat), bench.Options{})
//	if err != nil {
//		return err
//	}
//	defer s.Close()
//	return s.Run(ctx, func(r bench.Result) { fmt.Println(r.Latency.Median) })
package bench
