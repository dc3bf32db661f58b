package verbs

// SGE names a piece of registered memory: Length bytes at Addr, an address in the
// device's space (not a Go pointer), in the region of LKey. Length 0 is an empty
// piece, whatever Addr and LKey say.
type SGE struct {
	Addr   uint64
	Length uint32
	LKey   uint32
}

// AH is the handle of an address handle: where a UD message goes. The zero AH is none.
type AH uint32

// SendWR is a work request for a send queue (struct ibv_send_wr). Everything needed
// is copied while it is posted: the value and its slices may be reused at once. The
// memory that SGList names belongs to the transport until the request completes.
type SendWR struct {
	// WRID is returned in the completion.
	WRID uint64
	// SGList is gathered in order; no entries means a message of length zero.
	SGList []SGE
	// InlineData, when not nil, is the message itself, copied at post time; SGList
	// must be empty. It implies Inline.
	InlineData []byte
	Opcode     Opcode
	Flags      SendFlags
	// ImmData travels with SendWithImm and RDMAWriteWithImm, most significant byte first.
	ImmData uint32
	// InvalidateRKey is the peer's R_Key (SendWithInv) or our own key (LocalInv).
	InvalidateRKey uint32
	// RemoteAddr and RKey are the target of WRITE, READ and atomics. For BindMW RKey is the
	// key that the memory window gets: its upper 24 bits name the window, the low 8 are free
	// to choose. What it opens is the one entry of SGList; none, or one of length 0, closes it.
	RemoteAddr uint64
	RKey       uint32
	// BindAccess is what BindMW lets the peer do: RemoteWrite, RemoteRead, RemoteAtomic.
	BindAccess Access
	// CompareAdd is the value compared (CmpAndSwp) or added (FetchAdd).
	CompareAdd uint64
	// Swap is stored by CmpAndSwp when the comparison holds.
	Swap uint64
	// AH, RemoteQPN and RemoteQKey address a UD message.
	AH         AH
	RemoteQPN  QPN
	RemoteQKey uint32
}

// RecvWR is a work request for a receive queue (struct ibv_recv_wr): a message is
// scattered over SGList in order. The value and its slice may be reused at once.
type RecvWR struct {
	WRID   uint64
	SGList []SGE
}
