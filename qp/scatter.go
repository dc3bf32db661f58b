package qp

import "github.com/doorbell-rdma/doorbell/verbs"

// gather adds size bytes from offset off of the message of the WQE at pos to out.
func (q *QP) gather(out *Out, pos uint64, w *SendWQE, off, size uint32) verbs.WCStatus {
	if w.Flags&verbs.Inline != 0 {
		out.add(q.sq.inlineData(pos)[off:][:size])
		return verbs.WCSuccess
	}
	sges := q.sq.sgList(pos)
	for i := range sges {
		s := &sges[i]
		if off >= s.Length {
			off -= s.Length
			continue
		}
		if size == 0 {
			break
		}
		n := min(s.Length-off, size)
		b, st := q.env.Mem.Local(q.pd, s.LKey, s.Addr+uint64(off), n, 0)
		if st != verbs.WCSuccess {
			return st
		}
		out.add(b)
		size -= n
		off = 0
	}
	return verbs.WCSuccess
}

// scatter copies data into the memory of sges from offset off on. The caller has checked
// that it fits.
func (q *QP) scatter(sges []verbs.SGE, off uint64, data []byte) verbs.WCStatus {
	for i := range sges {
		s := &sges[i]
		if off >= uint64(s.Length) {
			off -= uint64(s.Length)
			continue
		}
		if len(data) == 0 {
			break
		}
		n := min(s.Length-uint32(off), uint32(len(data)))
		b, st := q.env.Mem.Local(q.pd, s.LKey, s.Addr+off, n, verbs.LocalWrite)
		if st != verbs.WCSuccess {
			return st
		}
		copy(b, data)
		data = data[n:]
		off = 0
	}
	return verbs.WCSuccess
}
