package roce

import (
	"net/netip"
	"strconv"
	"time"

	"github.com/doorbell-rdma/doorbell/verbs"
)

// String returns the packet as one line; see [Packet.AppendText].
func (p *Packet) String() string {
	b, _ := p.AppendText(nil)
	return string(b)
}

// AppendText appends the packet as one line without a line break, the way captures and
// scenario files show packets. It never fails. Numbers that name things are hexadecimal,
// numbers that count are decimal, and what is as usual is left out (P_Key 0xffff, DestQP
// 0, no credits):
//
//	SEND_FIRST psn=fffffe len=1024 dqpn=0x000011
//	WRITE_ONLY_IMM psn=000001 len=8 ackreq solicited dqpn=0x000011 va=0x7f00 rkey=0x1 dmalen=8 imm=0x5
//	ACK psn=000000 msn=1 dqpn=0x000012
//	NAK psn=ffffff seqerr msn=0 dqpn=0x000012
//	RNR_NAK psn=000003 timer=0.64ms msn=0 dqpn=0x000012
//	CM_RTU psn=000001 tid=0x0000000100000002 local=0x00000003 remote=0x00000004
//
// RC opcodes go without their prefix. Datagrams between two QP1 show the management
// datagram inside, and of private data how many bytes there are up to the last that is
// not zero.
func (p *Packet) AppendText(b []byte) ([]byte, error) {
	t := opcodes[p.Opcode]
	if t.has(hasDETH) && p.DestQP == verbs.QPNGSI && p.DETH.SrcQP == verbs.QPNGSI {
		var mad MAD
		if mad.Decode(p.Payload) == nil {
			return p.appendMAD(b, &mad), nil
		}
	}
	ack := p.Opcode == RCAck
	switch s := p.AETH.Syndrome; {
	case ack && IsRNR(s):
		b = append(b, "RNR_NAK"...)
	case ack && IsNak(s):
		b = append(b, "NAK"...)
	case t != 0 && p.Opcode.Transport() == TransportRC:
		b = append(b, operations[p.Opcode]...)
	default:
		b = append(b, p.Opcode.String()...)
	}
	b = appendHex(append(b, " psn="...), uint64(p.PSN), 6)
	if p.Opcode.HasPayload() || len(p.Payload) != 0 {
		b = appendDec(b, "len", uint64(len(p.Payload)))
	}
	if t.has(hasAETH) {
		b = p.AETH.appendText(b)
	}
	b = p.appendFlags(b)
	if t.has(hasDETH) {
		b = appendNum(b, "sqpn", uint64(p.DETH.SrcQP), 6)
		b = appendNum(b, "qkey", uint64(p.DETH.QKey), 8)
	}
	if t.has(hasFETH) {
		b = appendNum(b, "feth", uint64(p.FETH), 1)
	}
	if t.has(hasRETH) {
		b = appendNum(b, "va", p.RETH.VA, 1)
		b = appendNum(b, "rkey", uint64(p.RETH.RKey), 1)
		b = appendDec(b, "dmalen", uint64(p.RETH.DMALen))
	}
	if t.has(hasAtomicETH) {
		b = appendNum(b, "va", p.Atomic.VA, 1)
		b = appendNum(b, "rkey", uint64(p.Atomic.RKey), 1)
		if p.Opcode == RCFetchAdd {
			b = appendNum(b, "add", p.Atomic.SwapAdd, 1)
		} else {
			b = appendNum(b, "compare", p.Atomic.Compare, 1)
			b = appendNum(b, "swap", p.Atomic.SwapAdd, 1)
		}
	}
	if t.has(hasAtomicAck) {
		b = appendNum(b, "original", p.AtomicAck, 1)
	}
	if t.has(hasImm) {
		b = appendNum(b, "imm", uint64(p.Imm), 1)
	}
	if t.has(hasIETH) {
		b = appendNum(b, "inv", uint64(p.InvRKey), 1)
	}
	return b, nil
}

// appendFlags appends what the BTH says beyond opcode and PSN.
func (p *Packet) appendFlags(b []byte) []byte {
	if p.AckReq {
		b = append(b, " ackreq"...)
	}
	if p.Solicited {
		b = append(b, " solicited"...)
	}
	if p.FECN {
		b = append(b, " fecn"...)
	}
	if p.BECN {
		b = append(b, " becn"...)
	}
	if p.TVer != 0 {
		b = appendDec(b, "tver", uint64(p.TVer))
	}
	if p.PKey != DefaultPKey {
		b = appendNum(b, "pkey", uint64(p.PKey), 4)
	}
	if p.DestQP != 0 {
		b = appendNum(b, "dqpn", uint64(p.DestQP), 6)
	}
	return b
}

func (a *AETH) appendText(b []byte) []byte {
	switch {
	case a.Syndrome == AckNoCredit:
	case IsAck(a.Syndrome):
		n, _ := Credits(a.Syndrome)
		b = appendDec(b, "credits", uint64(n))
	case IsRNR(a.Syndrome):
		d := RNRTimerOf(a.Syndrome).Duration()
		b = strconv.AppendFloat(append(b, " timer="...), float64(d)/float64(time.Millisecond), 'f', -1, 64)
		b = append(b, "ms"...)
	case a.Syndrome == NakPSNSeq:
		b = append(b, " seqerr"...)
	case a.Syndrome == NakInvReq:
		b = append(b, " invreq"...)
	case a.Syndrome == NakRemAccess:
		b = append(b, " remaccess"...)
	case a.Syndrome == NakRemOp:
		b = append(b, " remop"...)
	case a.Syndrome == NakInvRD:
		b = append(b, " invrd"...)
	default:
		b = appendNum(b, "syndrome", uint64(a.Syndrome), 2)
	}
	return appendDec(b, "msn", uint64(a.MSN))
}

// appendMAD appends a datagram between two QP1.
func (p *Packet) appendMAD(b []byte, mad *MAD) []byte {
	cm := mad.IsCM() && mad.AttrID >= AttrREQ && mad.AttrID <= AttrAPR
	if cm {
		b = append(append(b, "CM_"...), mad.AttrID.String()...)
	} else {
		b = append(b, "MAD"...)
	}
	b = appendHex(append(b, " psn="...), uint64(p.PSN), 6)
	if p.DETH.QKey != GSIQKey {
		b = appendNum(b, "qkey", uint64(p.DETH.QKey), 8)
	}
	if !cm {
		b = appendNum(b, "class", uint64(mad.MgmtClass), 2)
		b = appendNum(b, "method", uint64(mad.Method), 2)
		b = appendNum(b, "attr", uint64(mad.AttrID), 4)
	}
	b = appendNum(b, "tid", mad.TID, 16)
	if !cm {
		return b
	}
	// Decoding cannot fail: the MAD has its 232 bytes.
	switch mad.AttrID {
	case AttrREQ:
		var m REQ
		_ = m.Decode(mad.Data)
		b = m.appendText(b)
	case AttrMRA:
		var m MRA
		_ = m.Decode(mad.Data)
		b = appendIDs(b, m.LocalCommID, m.RemoteCommID)
		b = append(append(b, " of="...), m.Message.String()...)
		b = appendDec(b, "timeout", uint64(m.ServiceTimeout))
		b = appendPrivate(b, m.PrivateData)
	case AttrREJ:
		var m REJ
		_ = m.Decode(mad.Data)
		b = appendIDs(b, m.LocalCommID, m.RemoteCommID)
		b = append(append(b, " of="...), m.Message.String()...)
		b = appendDec(b, "reason", uint64(m.Reason))
		b = append(append(append(b, " ("...), m.Reason.String()...), ')')
		b = appendPrivate(b, m.PrivateData)
	case AttrREP:
		var m REP
		_ = m.Decode(mad.Data)
		b = appendIDs(b, m.LocalCommID, m.RemoteCommID)
		b = appendNum(b, "qpn", uint64(m.LocalQPN), 6)
		b = appendHex(append(b, " start="...), uint64(m.StartingPSN), 6)
		b = appendDepths(b, m.ResponderResources, m.InitiatorDepth)
		b = appendDec(b, "rnr", uint64(m.RNRRetryCount))
		b = appendPrivate(b, m.PrivateData)
	case AttrRTU, AttrDREP:
		var m RTU
		_ = m.Decode(mad.Data)
		b = appendIDs(b, m.LocalCommID, m.RemoteCommID)
		b = appendPrivate(b, m.PrivateData)
	case AttrDREQ:
		var m DREQ
		_ = m.Decode(mad.Data)
		b = appendIDs(b, m.LocalCommID, m.RemoteCommID)
		b = appendNum(b, "qpn", uint64(m.RemoteQPN), 6)
		b = appendPrivate(b, m.PrivateData)
	case AttrSIDRReq:
		var m SIDRReq
		_ = m.Decode(mad.Data)
		b = appendNum(b, "request", uint64(m.RequestID), 8)
		b = appendService(b, m.ServiceID, m.PrivateData)
	case AttrSIDRRep:
		var m SIDRRep
		_ = m.Decode(mad.Data)
		b = appendNum(b, "request", uint64(m.RequestID), 8)
		b = appendDec(b, "status", uint64(m.Status))
		b = appendNum(b, "qpn", uint64(m.QPN), 6)
		b = appendNum(b, "qkey", uint64(m.QKey), 8)
		b = m.ServiceID.appendText(append(b, " service="...))
		b = appendPrivate(b, m.PrivateData)
	case AttrLAP:
		var m LAP
		_ = m.Decode(mad.Data)
		b = appendIDs(b, m.LocalCommID, m.RemoteCommID)
		b = appendNum(b, "qpn", uint64(m.RemoteQPN), 6)
		b = appendPrivate(b, m.PrivateData)
	case AttrAPR:
		var m APR
		_ = m.Decode(mad.Data)
		b = appendIDs(b, m.LocalCommID, m.RemoteCommID)
		b = appendDec(b, "status", uint64(m.Status))
		b = appendPrivate(b, m.PrivateData)
	}
	return b
}

func (m *REQ) appendText(b []byte) []byte {
	b = appendNum(b, "local", uint64(m.LocalCommID), 8)
	b = appendNum(b, "qpn", uint64(m.LocalQPN), 6)
	b = appendHex(append(b, " start="...), uint64(m.StartingPSN), 6)
	b = appendDec(b, "mtu", uint64(m.PathMTU.Bytes()))
	if m.TransportService != ServiceRC {
		b = appendDec(b, "transport", uint64(m.TransportService))
	}
	b = appendDepths(b, m.ResponderResources, m.InitiatorDepth)
	b = appendDec(b, "retry", uint64(m.RetryCount))
	b = appendDec(b, "rnr", uint64(m.RNRRetryCount))
	b = appendDec(b, "acktimeout", uint64(m.Primary.AckTimeout))
	return appendService(b, m.ServiceID, m.PrivateData)
}

// appendService appends a service ID and what rdma_cm's header says of the two ends.
func appendService(b []byte, id SID, private []byte) []byte {
	b = id.appendText(append(b, " service="...))
	var h IPCMHeader
	if id.IsIP() && h.Decode(private) == nil {
		b = netip.AddrPortFrom(h.Src, h.SrcPort).AppendTo(append(b, " from="...))
		b = h.Dst.AppendTo(append(b, " to="...))
		private = private[IPCMHeaderLen:]
	}
	return appendPrivate(b, private)
}

func appendIDs(b []byte, local, remote uint32) []byte {
	return appendNum(appendNum(b, "local", uint64(local), 8), "remote", uint64(remote), 8)
}

func appendDepths(b []byte, responder, initiator uint8) []byte {
	return appendDec(appendDec(b, "resp", uint64(responder)), "init", uint64(initiator))
}

func appendPrivate(b, private []byte) []byte {
	n := len(private)
	for n > 0 && private[n-1] == 0 {
		n--
	}
	if n == 0 {
		return b
	}
	return appendDec(b, "private", uint64(n))
}

// appendNum appends " name=0x" and at least n hex digits.
func appendNum(b []byte, name string, v uint64, n int) []byte {
	b = append(append(b, ' '), name...)
	return appendHex(append(b, "=0x"...), v, n)
}

// appendDec appends " name=" and v in decimal.
func appendDec(b []byte, name string, v uint64) []byte {
	b = append(append(b, ' '), name...)
	return strconv.AppendUint(append(b, '='), v, 10)
}

// appendHex appends v in lower case hexadecimal, with at least n digits.
func appendHex(b []byte, v uint64, n int) []byte {
	for d := uint64(1) << (4 * (n - 1)); v < d && d > 1; d >>= 4 {
		b = append(b, '0')
	}
	return strconv.AppendUint(b, v, 16)
}
