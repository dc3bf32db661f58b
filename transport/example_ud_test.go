package transport_test

import (
	"context"
	"fmt"
	"log"
	"net/netip"

	"github.com/doorbell-rdma/doorbell/transport"
	"github.com/doorbell-rdma/doorbell/verbs"
)

// udQP makes a UD queue pair that is ready to send, with a Q_Key.
func udQP(dev *transport.Device, qkey uint32) (*transport.QP, error) {
	cq, err := dev.CreateCQ(64)
	if err != nil {
		return nil, err
	}
	qp, err := dev.PD().CreateQP(transport.QPConfig{Type: verbs.UD, SendCQ: cq, RecvCQ: cq})
	if err != nil {
		return nil, err
	}
	for _, a := range []verbs.QPAttr{
		{Mask: verbs.AttrState | verbs.AttrPKeyIndex | verbs.AttrPort | verbs.AttrQKey, State: verbs.QPInit, Port: 1, QKey: qkey},
		{Mask: verbs.AttrState, State: verbs.QPRTR},
		{Mask: verbs.AttrState | verbs.AttrSQPSN, State: verbs.QPRTS},
	} {
		if err := qp.Modify(a); err != nil {
			return nil, err
		}
	}
	return qp, nil
}

// A datagram: no connection, but an address handle, a queue pair number and a Q_Key.
func ExamplePD_CreateAH() {
	const qkey = 0x1234
	ctx := context.Background()
	sender, err := transport.Open(transport.Config{Bind: netip.MustParseAddrPort("127.1.9.5:4791")})
	if err != nil {
		log.Fatal(err)
	}
	defer sender.Close()
	receiver, err := transport.Open(transport.Config{Bind: netip.MustParseAddrPort("127.1.9.6:4791")})
	if err != nil {
		log.Fatal(err)
	}
	defer receiver.Close()

	in, err := udQP(receiver, qkey)
	if err != nil {
		log.Fatal(err)
	}
	mr, err := receiver.PD().RegisterMR(make([]byte, transport.GRHLen+64), verbs.LocalWrite)
	if err != nil {
		log.Fatal(err)
	}
	if err := in.PostRecv(verbs.RecvWR{SGList: mr.SGL(0, transport.GRHLen+64)}); err != nil {
		log.Fatal(err)
	}

	out, err := udQP(sender, qkey)
	if err != nil {
		log.Fatal(err)
	}
	ah, err := sender.PD().CreateAH(verbs.AV{Remote: netip.MustParseAddrPort("127.1.9.6:0")})
	if err != nil {
		log.Fatal(err)
	}
	err = out.PostSend(verbs.SendWR{
		Opcode: verbs.Send, InlineData: []byte("hello, whoever you are"),
		AH: ah.Handle(), RemoteQPN: in.Num(), RemoteQKey: qkey,
	})
	if err != nil {
		log.Fatal(err)
	}

	wc, err := in.CQ().Next(ctx)
	if err != nil {
		log.Fatal(err)
	}
	from, err := transport.AVFromWC(&wc, mr.Bytes())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s, from %v\n", mr.Bytes()[transport.GRHLen:wc.ByteLen], from.Remote.Addr())
	// Output: hello, whoever you are, from 127.1.9.5
}
