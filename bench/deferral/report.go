package deferral

import "time"

// Report is what a study found.
type Report struct {
	// Schema names the form of the JSON document: SchemaID.
	Schema string
	// Seed and Trials are the configuration's: with them the cells can be played again.
	Seed   uint64
	Trials int
	// Truncated says that the budget was used up before all trials were played.
	Truncated bool
	Elapsed   time.Duration
	Machine   Machine
	// Cells is nil without cells, Costs without costs.
	Cells []CellResult
	Costs *Costs
}

// CellResult is a cell and what became of the strategies in it, in their order.
type CellResult struct {
	Cell     Cell
	Outcomes [NumStrategies]Outcome
}

// Outcome is what a strategy did in a cell.
type Outcome struct {
	Counts
	// FirstByte is the time from Accept until the client sees the first message, LastByte
	// until it sees the last. ToWire is the time from the server's move to RTS until its
	// first request packet leaves.
	FirstByte, LastByte, ToWire Quantiles
}
