package verbs

import "strconv"

// QPState is the state of a queue pair (enum ibv_qp_state).
//
//	RESET -> INIT -> RTR -> RTS <-> SQD
//	                         |       (UC, UD: RTS -> SQE on a send error, SQE -> RTS)
//	any but RESET -> ERR;  any -> RESET
type QPState uint8

const (
	// QPReset: nothing happens; posting is an error.
	QPReset QPState = 0
	// QPInit: receives may be posted; packets are dropped; posting sends is an error.
	QPInit QPState = 1
	// QPRTR, ready to receive: requests are served; sends may be posted but wait.
	QPRTR QPState = 2
	// QPRTS, ready to send: everything works.
	QPRTS QPState = 3
	// QPSQD, send queue drain: started sends finish, new ones wait.
	QPSQD QPState = 4
	// QPSQE, send queue error (UC, UD): sends are flushed, receives work.
	QPSQE QPState = 5
	// QPErr: everything posted is flushed.
	QPErr QPState = 6
	// QPStates is the number of states.
	QPStates = 7
)

var stateNames = [...]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}

// String returns the state's name.
func (s QPState) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return "QPS_" + strconv.Itoa(int(s))
}
